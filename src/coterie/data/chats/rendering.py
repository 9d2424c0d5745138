"""What a chat template writes of a conversation, and what it leaves out."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import DataError
from coterie.data.chats.messages import REASONING, WEIGHT, Message, is_answer

Write = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
Span = tuple[int, int]  # characters
TOOLS = "tools["  # begins the names of tools among the parts of a conversation

_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OPENS, _CLOSES = (f"\U000f0000{secrets.token_hex(8)}{sign}" for sign in "<>")


def with_marks(template: str) -> str:
    """Return a template that writes where its `{% generation %}` marks are, for `spans_of`."""

    def tag(match: re.Match[str]) -> str:
        left, closes, right = match.groups()
        text = _CLOSES if closes else _OPENS
        # blocks at both sides, so that white space around is treated as around the mark
        return f'{{%{left} if true %}}{{{{ "{text}" }}}}{{% endif {right}%}}'

    return _MARK.sub(tag, template)


def spans_of(text: str) -> tuple[str, list[Span]]:
    """Return what a template with marks has written without them, and the characters between
    them.
    """
    spans, pieces, length = list[Span](), list[str](), 0
    for i, piece in enumerate(re.split(f"{_OPENS}|{_CLOSES}", text)):
        if i % 2:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces), spans


class Renders:
    """The texts of a conversation up to each of its messages, each written once.

    Args:
        write: What writes messages.
        messages: All of them.
        tools: Descriptions of tools.
    """

    def __init__(self, write: Write, messages: Sequence[Message], tools: Any) -> None:
        self._write, self.messages, self._tools = write, messages, tools
        self._texts: dict[tuple[int, bool], str] = {}

    def upto(self, end: int, prompt: bool = False) -> str:
        """Return the text of the first messages; as a prompt, with the beginning of an answer.

        Raises:
            DataError: The template refuses them.
        """
        if (end, prompt) not in self._texts:
            self._texts[end, prompt] = self._write(self.messages[:end], self._tools, prompt)
        return self._texts[end, prompt]

    @property
    def whole(self) -> str:
        """The text of all messages."""
        return self.upto(len(self.messages))

    def before(self, number: int) -> str | None:
        """Return the prompt for an answer; None for one at the beginning, if the template writes no
        prompt for it.
        """
        try:
            return self.upto(number, prompt=True)
        except DataError:
            if number:
                raise
            return None

    def starts(self, text: str) -> list[int]:
        """Return the first characters of the answers in a text that begins with the messages, as
        far as they can be told.
        """
        numbers = [i for i, message in enumerate(self.messages) if is_answer(message)]
        prompts = [self.before(i) for i in numbers]
        return [len(prompt) for prompt in prompts if prompt is not None and text.startswith(prompt)]


def as_template(message: Message, arguments_as_text: bool) -> Message:
    """Return a message as templates know it: reasoning under all of its names, arguments as the
    template takes them.
    """
    shown = {key: value for key, value in message.items() if key != WEIGHT}
    if REASONING[0] in shown:
        shown |= dict.fromkeys(REASONING, shown[REASONING[0]])
    if arguments_as_text and "tool_calls" in shown:
        shown["tool_calls"] = [_as_text(call) for call in shown["tool_calls"]]
    return shown


def _as_text(call: Message) -> Message:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


@dataclass(frozen=True)
class _Part:
    """A part of a conversation that its text should hold, and the word that stands for it."""

    name: str
    text: str
    word: str


def left_out(
    write: Write, messages: Sequence[Message], tools: Sequence[Any] | None, trained: Sequence[int]
) -> list[str]:
    """Return the names of those parts of a conversation that the template does not write: contents,
    tool calls, tools, and the reasoning of trained answers.

    Each part is replaced by a word of its own, by which it is found in the text, whatever the
    template does to it.

    Args:
        write: What writes messages.
        messages: In normal form.
        tools: Descriptions of tools.
        trained: The numbers of the trained answers.
    """
    parts: list[_Part] = []

    def word_for(name: str, text: str) -> str:
        parts.append(_Part(name, text, f"zq{len(parts)}x{len(messages)}q"))
        return parts[-1].word

    words = [_in_words(i, own, word_for, i in trained) for i, own in enumerate(messages)]
    named = [_tool_in_words(i, tool, word_for) for i, tool in enumerate(tools or ())]
    try:
        text = write(words, named or None, False).lower()
        return [part.name for part in parts if part.word not in text]
    except DataError:  # it does not take such words
        text = write(messages, tools, False)
        return [part.name for part in parts if part.text.strip() not in text]


Naming = Callable[[str, str], str]


def _in_words(number: int, message: Message, word_for: Naming, trained: bool) -> Message:
    role, where = message["role"], f"messages[{number}]"
    words = dict(message)
    if message["content"].strip():
        words["content"] = word_for(f"the content of {where} ({role})", message["content"])
    if trained and REASONING[0] in message:
        words[REASONING[0]] = word_for(f"the reasoning of {where}", message[REASONING[0]])
    if calls := message.get("tool_calls"):
        words["tool_calls"] = [
            {**call, "function": _call_in_words(f"{where}.tool_calls[{i}]", call, word_for)}
            for i, call in enumerate(calls)
        ]
    return words


def _call_in_words(where: str, call: Message, word_for: Naming) -> Message:
    function = call["function"]
    arguments = {
        key: word_for(f"argument {key!r} of {where}", value)
        if isinstance(value, str) and value.strip()
        else value
        for key, value in function["arguments"].items()
    }
    name = word_for(f"the name of {where}", function["name"])
    return {**function, "name": name, "arguments": arguments}


def _tool_in_words(number: int, tool: Any, word_for: Naming) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        return tool
    return {**tool, "function": {**function, "name": word_for(f"{TOOLS}{number}]", name)}}
