"""Conversations from rows: `messages`, ShareGPT's form, or prompts and completions."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.data.chats.messages import (
    ASSISTANT,
    ROLES,
    Message,
    Mistake,
    check_text,
    is_answer,
    is_trained,
    leading,
    normal_messages,
    normal_tools,
)
from coterie.data.refusals import SHOWN, Refusals
from coterie.data.splitting import Digest, Document, conversation_content

_TOOLS = ("tools", "functions")  # OpenAI's name for them until 2023
BESIDE = ("system", *_TOOLS)  # columns that belong to a conversation
COLUMNS = ("messages", "conversations", "prompt", "completion", *BESIDE)
POSTS = "\0posts"  # of a row from an archive: no column of a table has this name
_FORMS = "messages, conversations (ShareGPT), or prompt and completion"


@dataclass(frozen=True)
class Conversation:
    """One conversation."""

    where: str  # file and row, for error messages
    messages: Sequence[Message] = ()  # in normal form, see `coterie.data.chats.messages`
    given: int = 0  # how many of the first messages are a prompt, of which no answer is trained
    tools: Sequence[Any] | None = None  # descriptions of tools for the template
    # instead of messages, a prompt and its completion as plain text
    text: tuple[str, str] | None = None
    posts: tuple[Digest, ...] = ()  # of an archive, see `Document.posts`

    @property
    def trained(self) -> list[int]:
        """The numbers of the messages that are answers to train on."""
        answers = enumerate(self.messages)
        return [i for i, message in answers if i >= self.given and is_trained(message)]

    @property
    def answered(self) -> bool:
        """Whether there is an answer to train on."""
        return bool(self.trained if self.text is None else self.text[1].strip())

    def document(self) -> Document:
        """Return the conversation as JSON, keyed by content so that equal ones share a split."""
        content = [self.messages, self.given, self.tools, self.text]
        key = json.dumps(content, ensure_ascii=False, sort_keys=True)
        text = json.dumps([self.where, *content], ensure_ascii=False)
        return Document(text, key, conversation_content(self.messages, self.text), self.posts)

    @classmethod
    def of_document(cls, text: str) -> "Conversation":
        """Return the inverse of `document`."""
        where, messages, given, tools, pair = json.loads(text)
        return cls(where, messages, given, tools, None if pair is None else tuple(pair))


def read_conversations(
    rows: Iterable[tuple[str, Mapping[str, Any]]], column: str | None = None
) -> list[Conversation]:
    """Return the conversations of rows, each in `column` or in the usual columns. Raises DataError
    that names file and row of those without one.
    """
    conversations = list[Conversation]()
    message = f"a message has a role ({', '.join(ROLES)}) and its content"
    remedy = f"Every row must have {column or _FORMS}; {message}."
    with Refusals(SHOWN) as refusals:
        for where, row in rows:
            try:
                conversations.append(_conversation(where, row, column))
            except Mistake as mistake:
                refusals.add(f"{where}: {mistake.problem}", remedy)
    return conversations


def _conversation(where: str, row: Mapping[str, Any], column: str | None) -> Conversation:
    fields = {key: value for key, value in row.items() if value is not None}
    names = [column] if column else ["messages", "conversations"]
    if name := next((name for name in names if name in fields), None):
        messages, given = normal_messages(fields[name], name), 0
    elif column is None and "prompt" in fields and "completion" in fields:
        prompt, completion = fields["prompt"], fields["completion"]
        if _is_plain(prompt) and _is_plain(completion):
            return _pair(where, prompt, completion, fields)
        if _is_plain(prompt) != _is_plain(completion):
            raise Mistake("prompt and completion are not both text, or both messages")
        messages = normal_messages(prompt, "prompt")
        given = len(messages)
        messages += normal_messages(completion, "completion")
    else:
        raise Mistake(f"no {column or _FORMS} (found: {', '.join(fields) or 'none'})")
    messages, added = _with_system(messages, fields.get("system"))
    messages, tools = _with_tools(messages, fields)
    given += added if given else 0
    return Conversation(where, messages, given, tools, posts=fields.get(POSTS, ()))


def _is_plain(value: Any) -> bool:
    """Whether a prompt or completion is plain text, not messages as JSON text."""
    if not isinstance(value, str):
        return False
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return True
    if not isinstance(messages, list) or not messages:
        return True
    return not all(isinstance(m, dict) and {"role", "from"} & m.keys() for m in messages)


def _pair(where: str, prompt: str, completion: str, fields: Mapping[str, Any]) -> Conversation:
    for name, text in (("prompt", prompt), ("completion", completion)):
        check_text(text, name)
    if beside := [name for name in BESIDE if fields.get(name) not in (None, "", [], "[]")]:
        raise Mistake(f"{beside[0]} beside a prompt and a completion of plain text")
    return Conversation(where, text=(prompt, completion))


def _with_system(messages: list[Message], system: Any) -> tuple[list[Message], int]:
    """Return messages after a column's system message, and how many were added."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages, 0
    (message,) = normal_messages([{"role": "system", "content": system}], "system")
    if messages[0]["role"] not in ("system", "developer"):
        return [message, *messages], 1
    if messages[0]["content"].strip() != message["content"].strip():
        raise Mistake("a column system and another system message; which one is meant?")
    return messages, 0


def _with_tools(
    messages: list[Message], fields: Mapping[str, Any]
) -> tuple[list[Message], list[Any] | None]:
    sources = [fields.get(name) for name in _TOOLS]
    if "tools" in messages[0]:
        first = dict(messages[0])
        sources.append(first.pop("tools"))
        messages = [first, *messages[1:]]
    tools = [normal for source in sources if (normal := normal_tools(source))]
    if any(other != tools[0] for other in tools[1:]):
        raise Mistake("several unlike lists of tools")
    return messages, tools[0] if tools else None


def answers_apart(conversation: Conversation) -> Iterator[Conversation]:
    """Yield, for each trained answer, the conversation that ends with it; none for an assistant's
    opening words, which are context.
    """
    roles = [message["role"] for message in conversation.messages]
    first = next((i for i, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    for number in conversation.trained:
        if number > first:
            yield replace(conversation, messages=conversation.messages[: number + 1], given=number)


def longest_that(
    fits: Callable[[Conversation], bool], conversation: Conversation, guess: int = 1
) -> tuple[Conversation, int]:
    """Return a conversation without its oldest turns, as few as needed, and the number of turns
    kept.

    A system message and the last turn with a trained answer stay, even if they do not fit. The
    search starts at `guess` turns with steps that are doubled, then halved, so that nothing much
    longer than the result is tried. `fits` must hold for fewer turns if it holds for more.
    """
    turns = _turns(conversation)[::-1]  # the last one first
    most, least, step = 0, len(turns) + 1, 1  # of turns that fit; of those that do not
    kept = min(guess, len(turns))
    while least - most > 1:
        if fits(_from(conversation, turns[kept - 1])):
            most, kept = kept, kept + step
        else:
            least, kept = kept, kept - step
        step *= 2
        if not most < kept < least:
            kept, step = (most + least) // 2, 1
    most = max(most, 1)
    return _from(conversation, turns[most - 1]), most


def without_greeting(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation without an assistant's opening words, if more follows."""
    kept = leading(conversation.messages)
    roles = [message["role"] for message in conversation.messages]
    first = next((i for i, role in enumerate(roles) if i >= kept and role != ASSISTANT), kept)
    if first > kept:
        yield _from(conversation, first)


def _turns(conversation: Conversation) -> list[int]:
    """Return the turns at which a conversation may begin, up to the last trained answer."""
    messages = conversation.messages
    answers = (i for i, message in enumerate(messages) if is_answer(message))
    last = max(conversation.trained or answers, default=0)
    first = leading(messages)
    starts = range(first + 1, last)
    return [first, *(start for start in starts if messages[start]["role"] == "user")]


def _from(conversation: Conversation, start: int) -> Conversation:
    """Return the conversation from a later message on."""
    kept = leading(conversation.messages)
    messages = [*conversation.messages[:kept], *conversation.messages[start:]]
    given = max(conversation.given - (start - kept), 0)
    return replace(conversation, messages=messages, given=given)
