"""Conversations in the forms that others write: `messages`, ShareGPT, prompts and completions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import DataError
from coterie.data.documents import SHOWN, Document

Message = dict[str, Any]

ASSISTANT = "assistant"
_ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
# ShareGPT's names for them
_SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function_call": ASSISTANT,
}
BESIDE = ("system", "tools")  # columns that belong to a conversation
COLUMNS = ("messages", "conversations", "prompt", "completion", *BESIDE)
_FORMS = "messages, conversations (ShareGPT), or prompt and completion"


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Args:
        where: File and row, for messages.
        messages: Each with a `role` and its `content`, and what else the template knows.
        given: How many of the first messages are a prompt, of which no answer is trained.
        tools: Descriptions of tools for the template.
        text: Instead of messages, a prompt and its completion as plain text.
    """

    where: str
    messages: Sequence[Message] = ()
    given: int = 0
    tools: Sequence[Any] | None = None
    text: tuple[str, str] | None = None

    @property
    def answered(self) -> bool:
        """Whether there is an answer to train on."""
        if self.text is not None:
            return bool(self.text[1].strip())
        return any(map(is_answer, self.messages[self.given :]))

    def document(self) -> Document:
        """Return it as JSON, keyed by what is said, so that equal ones are in one split."""
        said = [self.messages, self.given, self.tools, self.text]
        key = json.dumps(said, ensure_ascii=False, sort_keys=True)
        return Document(json.dumps([self.where, *said], ensure_ascii=False), key)

    @classmethod
    def of_document(cls, text: str) -> "Conversation":
        """Return what `document` made JSON of."""
        where, messages, given, tools, pair = json.loads(text)
        return cls(where, messages, given, tools, None if pair is None else tuple(pair))


def user(text: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}


def is_answer(message: Message) -> bool:
    """Whether a message is an assistant's and not empty."""
    said = str(message.get("content") or "").strip() or message.get("tool_calls")
    return message["role"] == ASSISTANT and bool(said)


def read_conversations(
    rows: Iterable[tuple[str, Mapping[str, Any]]], column: str | None = None
) -> list[Conversation]:
    """Return the conversations of rows.

    Args:
        rows: Each with where it is from.
        column: The column that has a conversation; None: the usual ones.

    Raises:
        DataError: Rows that hold no conversation, by file and row.
    """
    found, mistakes = list[Conversation](), list[str]()
    for where, row in rows:
        try:
            found.append(_conversation(where, row, column))
        except _Mistake as mistake:
            mistakes.append(f"{where}: {mistake}")
    if mistakes:
        rest = len(mistakes) - SHOWN
        more = [f"... and {rest:,} more rows"] if rest > 0 else []
        raise DataError(
            "\n".join(mistakes[:SHOWN] + more),
            f"Every row must have {column or _FORMS}; a message has a role "
            f"({', '.join(_ROLES)}) and its content.",
        )
    return found


class _Mistake(Exception):
    """The reason why a row holds no conversation."""


def _conversation(where: str, row: Mapping[str, Any], column: str | None) -> Conversation:
    own = {key: value for key, value in row.items() if value is not None}
    tools = _json(own["tools"], "tools") if own.get("tools") else None
    names = [column] if column else ["messages", "conversations"]
    if name := next((name for name in names if name in own), None):
        messages = _messages(own[name], name)
        system = own.get("system")
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return Conversation(where, messages, tools=tools)
    if column is None and "prompt" in own and "completion" in own:
        return _pair(where, own["prompt"], own["completion"], tools)
    raise _Mistake(f"no {column or _FORMS} (found: {', '.join(own) or 'none'})")


def _pair(where: str, prompt: Any, completion: Any, tools: Any) -> Conversation:
    if isinstance(prompt, str) and isinstance(completion, str):
        for name, text in (("prompt", prompt), ("completion", completion)):
            _check_text(text, name)
        return Conversation(where, text=(prompt, completion))
    before = _messages(prompt, "prompt")
    return Conversation(
        where, [*before, *_messages(completion, "completion")], len(before), tools=tools
    )


def _messages(value: Any, name: str) -> list[Message]:
    """Return the messages of a column."""
    value = _json(value, name)
    if not isinstance(value, Sequence) or not value:
        kind = "empty" if value in ([], ()) else f"{type(value).__name__}, not a list of messages"
        raise _Mistake(f"{name} is {kind}")
    return [_message(own, f"{name}[{i}]") for i, own in enumerate(value)]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise _Mistake(f"{name} is {type(value).__name__}, not a message")
    own = {key: part for key, part in value.items() if part is not None}
    if "from" in own and "role" not in own:  # ShareGPT
        own = {"role": own.pop("from"), "content": own.pop("value", "")} | own
    role = own.get("role")
    role = _SPEAKERS.get(str(role).lower(), role)
    if role not in _ROLES:
        raise _Mistake(f"{name} has role {role!r}")
    content = own.get("content", "")
    if isinstance(content, list):
        content = "".join(_part(part, name) for part in content)
    if not isinstance(content, str):
        raise _Mistake(f"{name} has content of type {type(content).__name__}, not text")
    _check_text(content, name)
    return own | {"role": role, "content": content}


def _part(part: Any, name: str) -> str:
    """Return the text of one of several parts of a message."""
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise _Mistake(f"{name} has a part that is not text ({kind})")


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Mistake(f"{name} is not valid text (half of a surrogate pair)") from None


def _json(value: Any, name: str) -> Any:
    """Return a value that may be written as JSON, as tables have it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _Mistake(f"{name} is text, not a list") from None
