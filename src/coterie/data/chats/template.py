"""A base's chat template: conversations become token ids, and which of them are the assistant's.

Where the template says by `{% generation %}` what the assistant writes, that is taken. Otherwise an
answer is the text by which the conversation up to it is longer than the prompt for it, if the one
begins with the other and the whole conversation with both: then these are the very characters that
the model is to write. Where a template rewrites what came before (Qwen3 leaves out earlier
thoughts), each answer becomes a conversation of its own, as the model would see it. A template for
which none of this holds is refused, as is a conversation of which it leaves out a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.data.chats.messages import (
    ASSISTANT,
    WEIGHT,
    Message,
    normal_messages,
    normal_tools,
)
from coterie.data.chats.reading import Conversation
from coterie.data.chats.rendering import (
    TOOLS,
    Renders,
    Span,
    as_template,
    left_out,
    spans_of,
    with_marks,
    without_greeting,
)
from coterie.data.chats.shortening import answers_apart, longest_that
from coterie.data.text_encoding import ControlTokens, Ids, TextEncoder

Loss = Literal["answers", "all"]
Flags = npt.NDArray[np.bool_]

GENERATION = "its {% generation %} marks"
DIFFERENCE = "what each answer adds to its prompt"
APART = "what each answer adds to its prompt, each in a conversation of its own"

_EXAMPLE: list[Message] = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three and three?"},
    {"role": "assistant", "content": "That is six."},
]
_CALL: Message = {"function": {"name": "add", "arguments": {"summand": "two"}}}
_REMEDY = (
    "Name a file with another template: --set data.chat_template=FILE. It must write a special "
    "token behind every answer, and either mark answers by {% generation %} or add each message to "
    "what it wrote before."
)
_LEFT_OUT = (
    "Change the rows (another role, or the text in the content), or use another base or "
    "data.chat_template, whose template writes it."
)
NO_TEMPLATE = (
    "Use a base that has one (their names often end in -Instruct or -chat), or name a file: "
    "--set data.chat_template=FILE."
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as token ids.

    Args:
        ids: (T,).
        counted: (T,) which of them the loss counts; never the first.
        cut: Whether something of the conversation was left out.
        without_tools: Whether the template does not write the descriptions of its tools.
    """

    ids: Ids
    counted: Flags
    cut: bool = False
    without_tools: bool = False


class _Rewritten(Exception):
    """The template rewrites what came before an answer."""


class ChatTemplate:
    """A tokenizer's chat template, or another one in its place.

    Args:
        tokenizer: A fast tokenizer of transformers.
        template: Jinja; None: the tokenizer's own, which it may lack: then only prompts and
            completions of plain text can be encoded.
        control_tokens: What is done with control tokens in messages.
    """

    def __init__(
        self, tokenizer: Any, template: str | None = None, control_tokens: ControlTokens = "text"
    ) -> None:
        self.tokenizer = tokenizer
        own = getattr(tokenizer, "chat_template", None)
        several = own if isinstance(own, Mapping) else {}  # by their names
        own = several.get("default") if several else own
        self.template: str | None = own if template is None else template
        self.with_tools = several.get("tool_use", own) if template is None else template
        self.texts = TextEncoder(tokenizer, control_tokens, self.template)

    @property
    def has_marks(self) -> bool:
        """Whether the template says by `{% generation %}` what the assistant writes."""
        return self.template is not None and with_marks(self.template) != self.template

    @cached_property
    def way(self) -> str:
        """How answers are found, in words.

        Raises:
            DataError: It cannot be found out exactly which tokens are the assistant's, or nothing
                ends its answers.
        """
        return self._checked() if self.template is not None else "completions"

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer: the template's, and the tokenizer's end token."""
        ends = list(self.texts.end)
        try:
            example = Conversation("example", _EXAMPLE)
            rendered = [] if self.template is None else self.encode(example)
        except DataError:  # nothing else does
            rendered = []
        for part in rendered:
            ends += part.ids[_last_of_runs(part.counted)].tolist()
        return tuple(dict.fromkeys(ends))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False
    ) -> str:
        """Return messages as text; as a prompt, with the beginning of the assistant's answer.

        Raises:
            DataError: The base has no template, or it refuses these messages.
        """
        return self.texts.unmarked(self._write(messages, tools, prompt))

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Return the token ids that a model continues with its answer.

        Args:
            messages: In any form that `normal_messages` takes.
            tools: Descriptions of tools.

        Raises:
            DataError: They are no messages, or the template refuses them or leaves out a part.
        """
        renders, text = self._asked(messages, tools)
        ids: list[int] = self._tokens(text, renders.starts(text))[0].tolist()
        return ids

    def opening(self, messages: Sequence[Message], answer: str = "") -> str:
        """Return the text of `prompt` and of an answer so far, for who encodes it as text: without
        the first token that the tokenizer itself puts before texts. Raises DataError.
        """
        text, first = self._asked(messages)[1], self.tokenizer.bos_token
        text = self.texts.unmarked(text)
        return (text.removeprefix(first) if first and self.texts.begin else text) + answer

    def opened(self, messages: Sequence[Message], answer: str = "") -> str:
        """Return the text of `prompt` and of an answer so far, marked, which `TextEncoder.prompt`
        encodes as they are. Raises DataError.
        """
        return self.texts.begun(self._asked(messages)[1] + answer)

    def controls(self, conversation: Conversation) -> int:
        """Return how many control tokens stand in what was said."""
        said = [conversation.text, conversation.messages, conversation.tools]
        return self.texts.count(said)

    def encode(self, conversation: Conversation, loss: Loss = "answers") -> list[Rendered]:
        """Return a conversation as token ids, or as several, where the template rewrites what came
        before an answer.

        Raises:
            DataError: It cannot be rendered, a part of it is left out, or nothing ends an answer.
        """
        return [rendered for _, rendered in self._parts(conversation, loss)]

    def _parts(self, conversation: Conversation, loss: Loss) -> list[tuple[Conversation, Rendered]]:
        """Return what `encode` does, each with the conversation that it is of."""
        try:
            return [(conversation, self._whole(conversation, loss))]
        except _Rewritten:
            pass
        try:
            return [(part, self._whole(part, loss)) for part in answers_apart(conversation)]
        except _Rewritten:
            raise DataError(
                f"{conversation.where}: the chat template writes an answer otherwise than behind "
                f"its own prompt",
                _REMEDY,
            ) from None

    def fitted(
        self, conversation: Conversation, room: int, loss: Loss = "answers"
    ) -> list[Rendered]:
        """As `encode`, each of at most `room` tokens: the oldest messages are left out, but for a
        system's; if the last exchange alone is too long, its beginning is cut.
        """
        return [
            rendered if len(rendered.ids) <= room else self._shortened(part, room, loss)
            for part, rendered in self._parts(conversation, loss)
        ]

    def _shortened(self, conversation: Conversation, room: int, loss: Loss) -> Rendered:
        def fits(part: Conversation) -> bool:
            return len(self._whole(part, loss).ids) <= room

        last = replace(self._whole(longest_that(fits, conversation), loss), cut=True)
        if len(last.ids) <= room:
            return last
        counted = last.counted[-room:].copy()
        counted[0] = False
        return replace(last, ids=last.ids[-room:], counted=counted)

    def _whole(self, conversation: Conversation, loss: Loss) -> Rendered:
        """Return a conversation in one piece. Raises _Rewritten or DataError."""
        try:
            if conversation.text is not None:
                return self._plain(*conversation.text, loss)
            try:
                return self._messages(conversation, loss)
            except DataError:
                for rest in without_greeting(conversation.messages):
                    left = len(conversation.messages) - len(rest)
                    given = max(conversation.given - left, 0)
                    part = replace(conversation, messages=rest, given=given)
                    return replace(self._messages(part, loss), cut=True)
                raise
        except DataError as error:
            if error.problem.startswith(conversation.where):
                raise
            raise DataError(f"{conversation.where}: {error.problem}", error.remedy) from None

    def _messages(self, conversation: Conversation, loss: Loss) -> Rendered:
        messages, tools, trained = conversation.messages, conversation.tools, conversation.trained
        self.texts.check([messages, tools])
        renders = self._renders(messages, tools)
        text = renders.whole
        if loss == "all":
            silent = [i for i, message in enumerate(messages) if message.get(WEIGHT) == 0]
            spans = _added(renders, silent)
        else:
            spans = self._answers(renders, conversation)
        without_tools = self._refuse_left_out(messages, tools, trained)
        ids, offsets = self._tokens(text, renders.starts(text))
        if loss == "answers":
            counted = self._counted(text, ids, offsets, spans)
        else:
            counted = ~_within(offsets, spans)
        return replace(_ending(ids, counted), without_tools=without_tools)

    def _answers(self, renders: Renders, conversation: Conversation) -> list[Span]:
        """Return the characters of the trained answers. Raises _Rewritten where they cannot be
        told.
        """
        if self.has_marks:
            return self._marked(renders, conversation)
        numbers = [i for i in conversation.trained if renders.before(i) is not None]
        return _added(renders, numbers)

    def _marked(self, renders: Renders, conversation: Conversation) -> list[Span]:
        """Return the characters that the template marks of the trained answers, without what their
        prompts end with.
        """
        marked = with_marks(self._template_for(conversation.tools))
        text, spans = spans_of(
            self._write(conversation.messages, conversation.tools, template=marked)
        )
        if text != renders.whole:  # which the marks would have to leave alone
            raise _Rewritten
        answers = [i for i, own in enumerate(conversation.messages) if own["role"] == ASSISTANT]
        trained = set(conversation.trained)
        if len(spans) == len(answers):
            spans = [span for i, span in zip(answers, spans, strict=True) if i in trained]
        elif trained != {i for i in answers if conversation.messages[i]["content"].strip()}:
            raise DataError(
                f"the chat template marks {len(spans)} of {len(answers)} answers by "
                f"{{% generation %}}, so that those of the prompt cannot be told",
                _REMEDY,
            )
        starts = renders.starts(text)
        return [self._behind_prompt(text, span, starts) for span in spans]

    def _behind_prompt(self, text: str, span: Span, starts: Sequence[int]) -> Span:
        """Return a marked span without the end of the answer's prompt, if that is marked, too."""
        start, end = span
        within = [own for own in starts if start <= own < end]
        if within:
            return within[0], end
        header = self._header
        return (start + len(header), end) if text.startswith(header, start, end) else span

    @cached_property
    def _header(self) -> str:
        """What a prompt adds to the messages before it."""
        messages = _EXAMPLE[:1]
        prompt = self._write(messages, prompt=True)
        return prompt.removeprefix(self._write(messages))

    def _plain(self, prompt: str, completion: str, loss: Loss) -> Rendered:
        """Return a prompt and its completion as a document, with its beginning and end."""
        if not self.texts.end:
            raise DataError(
                "the tokenizer has no end token, so that completions would not end",
                "Set eos_token in the base's tokenizer_config.json.",
            )
        self.texts.check([prompt, completion])
        begin, end = self.texts.begin, self.texts.end
        text = prompt + completion
        if self.texts.control_tokens == "tokens":
            text, prompt = self.texts.marked(text), self.texts.marked(prompt)
        ids, _ = self._tokens(text, [len(prompt)])
        before = len(begin) + len(self.texts.encode_marked(prompt)[0])
        ids = np.concatenate([begin, ids, end]).astype(np.int64)
        counted = np.arange(len(ids)) >= (before if loss == "answers" else 0)
        return _ending(ids, counted)

    def _tokens(self, text: str, starts: Sequence[int] = ()) -> tuple[Ids, Ids]:
        """Return the ids of marked text, (T,), and the first character and the end of each, (T, 2).

        Where the ids of an answer's prompt are others than those of the text up to the answer, as
        where a token would begin before the answer and end in it, prompt and answer are encoded
        apart: so does whoever answers that prompt.

        Args:
            text: All of it.
            starts: The first characters of answers.
        """
        ids, offsets = self.texts.encode_marked(text)
        apart = [start for start in starts if not self._begins_alike(text, ids, offsets, start)]
        if not apart:
            return ids, offsets
        pieces = [
            (first, *self._piece(text[first:end], bool(first)))
            for first, end in pairwise([0, *apart, len(text)])
        ]
        return (
            np.concatenate([ids for _, ids, _ in pieces]),
            np.concatenate([first + offsets for first, _, offsets in pieces]),
        )

    def _begins_alike(self, text: str, ids: Ids, offsets: Ids, start: int) -> bool:
        """Whether the ids up to a place are those of the text that ends there. It is enough to look
        from the last control token on, since tokens do not cross it.
        """
        first = self.texts.last_control(text, start)
        alone, _ = self.texts.encode_marked(text[first:start])
        place = int(np.searchsorted(offsets[:, 0], first))
        end = place + len(alone)
        if end < len(ids) and offsets[end, 0] < start:
            return False
        return bool(np.array_equal(ids[place:end], alone))

    def _piece(self, text: str, follows: bool) -> tuple[Ids, Ids]:
        """Return the ids and offsets of a piece of text; of one that follows others, without what
        the tokenizer would put before a text that begins.
        """
        ids, offsets = self.texts.encode_marked(text)
        if not follows or self.tokenizer.decode(ids) == self.texts.unmarked(text):
            return ids, offsets
        before = len(self.texts.encode_marked("\n")[0])
        ids, offsets = self.texts.encode_marked("\n" + text)
        return ids[before:], np.maximum(offsets[before:] - 1, 0)

    def _asked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[Renders, str]:
        """Return the texts of messages that are asked, and that of the prompt. Raises DataError."""
        normal, described = normal_messages(messages), normal_tools(tools)
        self.texts.check([normal, described])
        try:
            return self._prompted(normal, described)
        except DataError:
            for rest in without_greeting(normal):
                return self._prompted(rest, described)
            raise

    def _prompted(self, messages: Sequence[Message], tools: Any) -> tuple[Renders, str]:
        renders = self._renders(messages, tools)
        text = renders.upto(len(messages), prompt=True)
        self._refuse_left_out(messages, tools, ())
        return renders, text

    def _refuse_left_out(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, trained: Sequence[int]
    ) -> bool:
        """Refuse messages of which the template leaves out a part; return whether it leaves out
        the tools, which some that write calls do not describe.
        """
        missing = left_out(self._write, messages, tools, trained)
        if parts := [name for name in missing if not name.startswith(TOOLS)]:
            raise DataError(f"the chat template leaves out {', '.join(parts)}", _LEFT_OUT)
        return bool(missing)

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the text of messages, marked. Raises DataError."""
        return self._written(*self._shown(messages, tools), prompt, template)

    def _renders(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Renders:
        return Renders(self._written, *self._shown(messages, tools))

    def _shown(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments_as_text: bool | None = None,
    ) -> tuple[list[Message], Any]:
        """Return messages and tools as the template is given them."""
        if arguments_as_text is None:
            arguments_as_text = self._arguments_as_text
        shown = [as_template(message, arguments_as_text) for message in messages]
        if self.texts.control_tokens == "tokens":
            return shown, tools
        shield = self.texts.shield
        return [shield(own, own["role"] == ASSISTANT) for own in shown], shield(tools)

    def _written(
        self,
        shown: Sequence[Message],
        tools: Sequence[Any] | None,
        prompt: bool,
        template: str | None = None,
    ) -> str:
        """Return what the template writes of what it is given, marked. Raises DataError."""
        if self.template is None:
            raise DataError("the base has no chat template", NO_TEMPLATE)
        try:
            (text,) = self.tokenizer.apply_chat_template(
                [shown],  # a batch, since a list of no messages is refused
                tools=tools,
                chat_template=template or self._template_for(tools),
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except Exception as error:  # templates raise whatever they like
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise DataError(
                f"the chat template refuses the messages: {reason}",
                "Change the roles or their order, or use another base or data.chat_template.",
            ) from None
        return self.texts.marked(text)

    def _template_for(self, tools: Sequence[Any] | None) -> str:
        return str(self.with_tools if tools else self.template)

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether the template takes a call's arguments as JSON text alone."""
        asked = [*_EXAMPLE[:1], {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}]

        def written(as_text: bool) -> bool:
            try:
                text = self._written(*self._shown(asked, None, as_text), prompt=False)
            except DataError:
                return False
            return "two" in text.partition("?")[2]

        return written(True) and not written(False)

    def _counted(self, text: str, ids: Ids, offsets: Ids, spans: Sequence[Span]) -> Flags:
        """Return which tokens are of answers, each up to the special token that ends it; none of an
        answer that is nothing but special tokens.
        """
        counted = np.zeros(len(ids), dtype=bool)
        special = np.isin(ids, list(self._special))
        for start, end in spans:
            answer = np.flatnonzero(_within(offsets, [(start, end)]))
            if not len(answer):
                continue
            ends = answer[special[answer]]
            if not len(ends) or text[offsets[ends[-1], 1] : end].strip():
                ends = answer[-1:] + 1  # right behind the mark
                if ends[-1] == len(ids) or not special[ends[-1]]:
                    raise DataError("no special token ends an answer of the chat template", _REMEDY)
            counted[answer[0] : ends[-1] + 1] = not special[answer].all()
        return counted

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {
            id for id, token in added.items() if token.special
        }

    def _checked(self) -> str:
        """Return how answers are found, in words. Raises DataError for a template whose answers
        cannot be told, or do not end.
        """
        rendered = self.encode(Conversation("chat template", _EXAMPLE))
        for part in rendered:
            ends = part.ids[_last_of_runs(part.counted)]
            if not len(ends) or not np.isin(ends, list(self._special)).all():
                raise DataError("chat template: nothing of it is marked as an answer", _REMEDY)
        prompt = self.prompt(_EXAMPLE[:-1])
        if rendered[-1].ids[: len(prompt)].tolist() != prompt:
            raise DataError("chat template: its prompt ends within a token", _REMEDY)
        if self.has_marks:
            return GENERATION
        return DIFFERENCE if len(rendered) == 1 else APART


def _added(renders: Renders, numbers: Sequence[int]) -> list[Span]:
    """Return the characters that messages of these numbers add to their prompts. Raises _Rewritten
    where they cannot be told.
    """
    spans = list[Span]()
    for i in numbers:
        answer = renders.messages[i]["role"] == ASSISTANT
        before = renders.before(i) if answer else renders.upto(i) if i else ""
        behind = renders.upto(i + 1)
        if before is None or not (behind.startswith(before) and renders.whole.startswith(behind)):
            raise _Rewritten
        spans.append((len(before), len(behind)))
    return spans


def _within(offsets: Ids, spans: Sequence[Span]) -> Flags:
    """Return which tokens lie in any of some spans."""
    inside: Flags = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        inside |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return inside


def _last_of_runs(counted: Flags) -> Flags:
    """Return the last token of each run of those that count."""
    behind: Flags = np.append(counted[1:], False)
    return counted & ~behind


def _ending(ids: Ids, counted: Flags) -> Rendered:
    """Return what there is up to the last token that counts; the first has nothing before it."""
    counted[:1] = False
    end = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return Rendered(ids[:end], counted[:end])
