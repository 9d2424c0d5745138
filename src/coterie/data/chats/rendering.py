"""The text that a chat template renders for a conversation, and the parts that it omits."""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from coterie.core.errors import DataError
from coterie.data.chats.messages import ASSISTANT, REASONING, WEIGHT, Message, is_answer

Write = Callable[[Sequence[Message], Sequence[Any] | None], str]
WriteParts = Callable[
    [Sequence[Message], Sequence[Any] | None, Sequence["Excerpt"]], list[str | DataError]
]
Span = tuple[int, int]  # characters
TOOLS = "tools["  # begins the names of tools among the parts of a conversation

_WINDOW, _AT_ONCE = 8, 1000  # messages; parts of a conversation that are written at once
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_WORD = re.compile(r"zq\d+x\d+q")  # that stands for a part of a conversation
_OPENS, _CLOSES = (f"\U000f0000{secrets.token_hex(8)}{sign}" for sign in "<>")


def with_marks(template: str) -> str:
    """Return a template that outputs its `{% generation %}` marks, for `spans_of`."""

    def tag(match: re.Match[str]) -> str:
        left, closes, right = match.groups()
        text = _CLOSES if closes else _OPENS
        # blocks at both sides, so that white space around is treated as around the mark
        return f'{{%{left} if true %}}{{{{ "{text}" }}}}{{% endif {right}%}}'

    return _MARK.sub(tag, template)


def spans_of(text: str) -> tuple[str, list[Span]]:
    """Return a text rendered with marks without them, and the spans between them."""
    spans, pieces, length = list[Span](), list[str](), 0
    for i, piece in enumerate(re.split(f"{_OPENS}|{_CLOSES}", text)):
        if i % 2:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces), spans


class Rewritten(Exception):
    """The template changes the text before an answer."""


class Excerpt(NamedTuple):
    """An excerpt of a conversation to render: a system message, if any, and others."""

    begin: int  # the first of the others
    end: int  # behind the last
    prompt: bool = False  # whether the beginning of an answer is to follow


class Renders:
    """The texts of a conversation and its parts, each rendered once."""

    def __init__(self, write: WriteParts, messages: Sequence[Message], tools: Any) -> None:
        self._write, self.messages, self._tools = write, messages, tools
        self._bounds = _bounds(messages)
        self._texts: dict[Excerpt, str | DataError] = {}
        self._known: dict[bool, dict[int, Span]] = {}

    def upto(self, end: int, prompt: bool = False) -> str:
        """Return the text of the first `end` messages, with a prompt if asked. Raises DataError."""
        return self._of(Excerpt(0, end, prompt))

    @property
    def whole(self) -> str:
        """The text of all messages."""
        return self.upto(len(self.messages))

    def before(self, number: int) -> str | None:
        """Return the prompt for an answer; None if the template writes none for a first message."""
        try:
            return self.upto(number, prompt=True)
        except DataError:
            if number:
                raise
            return None

    def added(self, numbers: Sequence[int]) -> list[Span]:
        """Return the spans that these messages add; answers, to their prompts. Raises Rewritten."""
        known = self._by_windows(prompt=False)
        return [known[i] if i in known else self._added(i) for i in numbers]

    def _added(self, number: int) -> Span:
        before = self.before(number) if self._is_answer(number) else self.upto(number)
        behind = self.upto(number + 1)
        if before is None or not (behind.startswith(before) and self.whole.startswith(behind)):
            raise Rewritten
        return len(before), len(behind)

    def starts(self, prompt: bool = False) -> list[int]:
        """Return where answers start in the text of all messages, as far as known."""
        known, text = self._by_windows(prompt), self.upto(len(self.messages), prompt)
        numbers = [i for i, message in enumerate(self.messages) if is_answer(message)]
        first = [self.before(i) for i in numbers if i < self._bounds[1]]
        starts = [len(prefix) for prefix in first if prefix is not None and text.startswith(prefix)]
        return starts + [known[i][0] for i in numbers if i in known]

    def _by_windows(self, prompt: bool) -> dict[int, Span]:
        """Return the spans that messages after the first window add to the text before them. Each
        message is rendered after a few predecessors only, as rendering all of them takes quadratic
        time, and its text is then located in that of all messages.
        """
        if prompt not in self._known:
            spans = self._known.setdefault(prompt, {})
            windows = list(zip(*(self._bounds[i:] for i in range(3)), strict=False))
            whole = Excerpt(0, len(self.messages), prompt)
            edges = [self._edges(begin, range(first, end)) for begin, first, end in windows]
            last = [Excerpt(0, whole.end - 1, prompt=True)] if not prompt else []
            # the first window tells most templates of which the others do not hold
            self._ask([whole, *last, *self._edges(0, range(self._bounds[1])), *chain(*edges[:1])])
            place = 0
            for number, (begin, first, end) in enumerate(windows):
                place = place or len(self.upto(first))
                if number == 1:
                    self._ask(chain(*edges))
                try:
                    added, places = self._window(begin, range(first, end), prompt)
                except (Rewritten, DataError):  # some templates refuse a part of a conversation
                    break
                if not self._of(whole).startswith(added, place):
                    break
                spans |= {i: (place + start, place + end) for i, (start, end) in places.items()}
                place += len(added)
        return self._known[prompt]

    def _window(self, begin: int, numbers: range, prompt: bool) -> tuple[str, dict[int, Span]]:
        """Return the text from `begin` on, and messages' spans. Raises Rewritten, DataError."""
        is_last = numbers.stop == len(self.messages)
        whole = self._of(Excerpt(begin, numbers.stop, prompt and is_last))
        before = self._of(Excerpt(begin, numbers.start))
        if not whole.startswith(before):
            raise Rewritten
        places: dict[int, Span] = {}
        for i in numbers:
            start = self._of(Excerpt(begin, i, self._is_answer(i)))
            behind = self._of(Excerpt(begin, i + 1))
            if behind.startswith(start) and whole.startswith(behind):
                places[i] = (len(start) - len(before), len(behind) - len(before))
        return whole[len(before) :], places

    def _edges(self, begin: int, numbers: range) -> list[Excerpt]:
        """Return the excerpts whose texts end where messages begin and end."""
        ends = [Excerpt(begin, i) for i in range(numbers.start, numbers.stop + 1)]
        return ends + [Excerpt(begin, i, prompt=True) for i in numbers if self._is_answer(i)]

    def _is_answer(self, number: int) -> bool:
        return bool(self.messages[number]["role"] == ASSISTANT)

    def _of(self, part: Excerpt) -> str:
        self._ask([part])
        text = self._texts[part]
        if isinstance(text, DataError):
            raise text
        return text

    def _ask(self, parts: Iterable[Excerpt]) -> None:
        missing = [part for part in dict.fromkeys(parts) if part not in self._texts]
        for i in range(0, len(missing), _AT_ONCE):
            some = missing[i : i + _AT_ONCE]
            texts = self._write(self.messages, self._tools, some)
            self._texts |= zip(some, texts, strict=True)


def _bounds(messages: Sequence[Message]) -> list[int]:
    """Return where windows begin, each at a user's message after an answer, and the end."""
    bounds = [0]
    for i in range(1, len(messages)):
        is_turn = messages[i]["role"] == "user" and is_answer(messages[i - 1])
        if is_turn and i >= bounds[-1] + _WINDOW:
            bounds.append(i)
    return [*bounds, len(messages)]


def as_template(message: Message, arguments_as_text: bool) -> Message:
    """Return a message in templates' form: reasoning under all names, arguments maybe as text."""
    shown = {key: value for key, value in message.items() if key != WEIGHT}
    if REASONING[0] in shown:
        shown |= dict.fromkeys(REASONING, shown[REASONING[0]])
    if arguments_as_text and "tool_calls" in shown:
        functions = [call["function"] for call in shown["tool_calls"]]
        texts = [json.dumps(of["arguments"], ensure_ascii=False) for of in functions]
        shown["tool_calls"] = [
            {**call, "function": {**of, "arguments": text}}
            for call, of, text in zip(shown["tool_calls"], functions, texts, strict=True)
        ]
    return shown


def left_out(
    write: Write, messages: Sequence[Message], tools: Sequence[Any] | None, trained: Sequence[int]
) -> list[str]:
    """Return the names of the parts that the template omits: contents, tool calls, tools, and the
    reasoning of trained answers. Each is replaced by a unique word that is then searched in the
    text.
    """
    parts: dict[str, tuple[str, str]] = {}  # names and texts, by the words that replace them

    def word_for(name: str, text: str) -> str:
        parts[word := f"zq{len(parts)}x{len(messages)}q"] = name, text
        return word

    words = [_in_words(i, message, word_for, i in trained) for i, message in enumerate(messages)]
    named = [_tool_in_words(i, tool, word_for) for i, tool in enumerate(tools or ())]
    try:
        written = set(_WORD.findall(write(words, named or None).lower()))
        return [name for word, (name, _) in parts.items() if word not in written]
    except DataError:  # it does not take such words
        text = write(messages, tools)
        return [name for name, part in parts.values() if part.strip() not in text]


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
