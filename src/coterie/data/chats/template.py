"""A base's chat template: the token ids of conversations, and which of them are the assistant's.

If the template has `{% generation %}` marks, these delimit answers. Otherwise an answer is the text
by which the conversation up to it is longer than its prompt, provided that the conversation begins
with the prompt and the whole one with both: these are exactly the characters that the model is to
write. If a template rewrites what came before (Qwen3 leaves out earlier thoughts), each answer
becomes a conversation of its own, as the model would see it. Other templates are refused, as are
conversations of which the template omits a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from coterie.core.errors import DataError
from coterie.data.chats.answers import (
    REMEDY,
    Loss,
    Rendered,
    behind_prompt,
    counted,
    ending,
    pair,
    tokens,
    within,
)
from coterie.data.chats.jinja_process import Writer
from coterie.data.chats.messages import ASSISTANT, WEIGHT, Message, normal_messages, normal_tools
from coterie.data.chats.reading import Conversation, answers_apart, longest_that, without_greeting
from coterie.data.chats.rendering import (
    TOOLS,
    Renders,
    Rewritten,
    Span,
    left_out,
    spans_of,
    with_marks,
)
from coterie.data.text_encoding import ControlTokens, TextEncoder

GENERATION = "its {% generation %} marks"
DIFFERENCE = "what each answer adds to its prompt"
APART = "what each answer adds to its prompt, each in a conversation of its own"

_EXAMPLE: list[Message] = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three and three?"},
    {"role": "assistant", "content": "That is six."},
]
_LEFT_OUT = (
    "Change the rows (another role, or the text in the content), or use another base or "
    "data.chat_template, whose template writes it."
)


class TooLong(DataError):
    """Messages are longer than allowed; `tokens` is their length or a lower bound of it."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the messages have {tokens:,} tokens", "Leave out the oldest.")
        self.tokens = tokens


class ChatTemplate:
    """A chat template: of a fast tokenizer of transformers, or another one (Jinja) in its place.
    Without either, only prompts and completions of plain text can be encoded. `control_tokens` says
    how control tokens in messages are treated.
    """

    def __init__(
        self, tokenizer: Any, template: str | None = None, control_tokens: ControlTokens = "text"
    ) -> None:
        self.tokenizer = tokenizer
        default = getattr(tokenizer, "chat_template", None)
        several = default if isinstance(default, Mapping) else {}  # by their names
        default = several.get("default") if several else default
        self.template: str | None = default if template is None else template
        self.with_tools = several.get("tool_use", default) if template is None else template
        self.texts = TextEncoder(tokenizer, control_tokens, self.template)
        self._writer = Writer(self.template, self.with_tools, self.texts)

    @property
    def has_marks(self) -> bool:
        """Whether the template marks answers with `{% generation %}`."""
        return self.template is not None and with_marks(self.template) != self.template

    @cached_property
    def way(self) -> str:
        """How answers are located, in words. Raises DataError if they cannot be, or never end."""
        return self._checked() if self.template is not None else "completions"

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer: the template's and the tokenizer's end tokens."""
        ends = list(self.texts.end)
        try:
            example = Conversation("example", _EXAMPLE)
            rendered = [] if self.template is None else self.encode(example)
        except DataError:  # nothing else does
            rendered = []
        for part in rendered:
            ends += part.ends.tolist()
        return tuple(dict.fromkeys(ends))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False
    ) -> str:
        """Return messages as text; with `prompt`, with an answer's beginning. Raises DataError."""
        return self.texts.unmarked(self._writer.text(messages, tools, prompt))

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Return the ids of messages with an answer's beginning. Raises DataError, TooLong for more
        than `most`.
        """
        renders, text = self._rendered(messages, tools, most)
        return cast(list[int], tokens(self.texts, text, renders.starts(prompt=True))[0].tolist())

    def opened(self, messages: Sequence[Message], answer: str = "") -> str:
        """Return the text of `prompt` and of an answer so far, marked, for `TextEncoder.prompt`.
        Raises DataError.
        """
        return self.texts.begun(self._rendered(messages)[1] + answer)

    def encode(
        self, conversation: Conversation, loss: Loss = "answers", room: int | None = None
    ) -> list[Rendered]:
        """Return a conversation as token ids, or as several if the template rewrites earlier
        messages. `loss` says which tokens are counted, `room` how many tokens each may have: the
        oldest messages except a system's are left out, and if the last exchange alone is too long,
        its beginning is cut. Raises DataError: it cannot be rendered, a part of it is omitted, or
        an answer has no end.
        """
        try:
            whole = self._whole(conversation, loss)
            if room is None or len(whole.ids) <= room:
                return [whole]
            return [self._longest(conversation, loss, room)[0]]
        except Rewritten:
            pass
        rendered, kept = list[Rendered](), 1
        try:
            for part in answers_apart(conversation):
                one, kept = self._longest(part, loss, room, kept + 1)
                rendered.append(one)
        except Rewritten:
            raise DataError(
                f"{conversation.where}: the chat template writes an answer otherwise than behind "
                f"its own prompt",
                REMEDY,
            ) from None
        return rendered

    def _longest(
        self, conversation: Conversation, loss: Loss, room: int | None, guess: int = 1
    ) -> tuple[Rendered, int]:
        """Return the ids that fit in `room`, and the number of their turns. Raises as `_whole`."""
        if room is None:
            return self._whole(conversation, loss), 0
        rendered: dict[int, Rendered] = {}  # by how many messages there are

        def fits(part: Conversation) -> bool:
            rendered[len(part.messages)] = last = self._whole(part, loss)
            return len(last.ids) <= room

        longest, kept = longest_that(fits, conversation, guess)
        last = rendered[len(longest.messages)]
        cut = last.cut or len(longest.messages) < len(conversation.messages)
        if len(last.ids) <= room:
            return replace(last, cut=cut), kept
        flags = last.counted[-room:].copy()
        flags[0] = False
        return replace(last, ids=last.ids[-room:], counted=flags, cut=True), kept

    def _whole(self, conversation: Conversation, loss: Loss) -> Rendered:
        """Return a conversation in one piece. Raises Rewritten or DataError."""
        try:
            if conversation.text is not None:
                return pair(self.texts, *conversation.text, loss)
            try:
                return self._messages(conversation, loss)
            except DataError:
                for rest in without_greeting(conversation):
                    return replace(self._messages(rest, loss), cut=True)
                raise
        except DataError as error:
            if error.problem.startswith(conversation.where):
                raise
            raise DataError(f"{conversation.where}: {error.problem}", error.remedy) from None

    def _messages(self, conversation: Conversation, loss: Loss) -> Rendered:
        messages, tools, trained = conversation.messages, conversation.tools, conversation.trained
        self.texts.check([messages, tools])
        renders = self._writer.renders(messages, tools)
        if loss == "all":
            silent = [i for i, message in enumerate(messages) if message.get(WEIGHT) == 0]
            spans, starts = renders.added(silent), renders.starts()
        else:
            if self.has_marks:
                spans = self._marked(renders, conversation)
            else:
                spans = renders.added([i for i in trained if i or renders.before(i) is not None])
            starts = sorted({*renders.starts(), *(start for start, _ in spans)})
        without_tools = self._refuse_left_out(messages, tools, trained)
        text = renders.whole
        ids, offsets = tokens(self.texts, text, starts)
        if loss == "answers":
            flags = counted(text, ids, offsets, spans, self._special)
        else:
            flags = ~within(offsets, spans)
        return replace(ending(ids, flags), without_tools=without_tools)

    def _marked(self, renders: Renders, conversation: Conversation) -> list[Span]:
        """Return the marked spans of the trained answers, without the ends of prompts."""
        marked = with_marks(self._writer.template_for(conversation.tools))
        text, spans = spans_of(
            self._writer.text(conversation.messages, conversation.tools, template=marked)
        )
        if text != renders.whole:  # which the marks would have to leave alone
            raise Rewritten
        answers = [
            i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT
        ]
        trained = set(conversation.trained)
        if len(spans) == len(answers):
            spans = [span for i, span in zip(answers, spans, strict=True) if i in trained]
        elif trained != {i for i in answers if conversation.messages[i]["content"].strip()}:
            raise DataError(
                f"the chat template marks {len(spans)} of {len(answers)} answers by "
                f"{{% generation %}}, so that those of the prompt cannot be told",
                REMEDY,
            )
        starts = renders.starts()
        return [behind_prompt(text, span, starts, self._header) for span in spans]

    @cached_property
    def _header(self) -> str:
        messages = _EXAMPLE[:1]
        prompt = self._writer.text(messages, prompt=True)
        return prompt.removeprefix(self._writer.text(messages))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        most: int | None = None,
    ) -> tuple[Renders, str]:
        """Return the texts of messages to answer, and their prompt. Raises as `prompt`."""
        normal, described = normal_messages(messages), normal_tools(tools)
        self.texts.check([normal, described])
        try:
            return self._prompted(normal, described, most)
        except TooLong:
            raise
        except DataError:
            for rest in without_greeting(Conversation("", normal)):
                return self._prompted(rest.messages, described, most)
            raise

    def _prompted(
        self, messages: Sequence[Message], tools: Any, most: int | None
    ) -> tuple[Renders, str]:
        renders = self._writer.renders(messages, tools)
        text = renders.upto(len(messages), prompt=True)
        if most is not None and (count := len(self.texts.encode_marked(text)[0])) > most:
            raise TooLong(count)
        self._refuse_left_out(messages, tools, ())
        return renders, text

    def _refuse_left_out(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, trained: Sequence[int]
    ) -> bool:
        """Refuse messages of which a part is left out; return whether the tools are, as some do."""
        missing = left_out(self._writer.text, messages, tools, trained)
        if parts := [name for name in missing if not name.startswith(TOOLS)]:
            raise DataError(f"the chat template leaves out {', '.join(parts)}", _LEFT_OUT)
        return bool(missing)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {
            id for id, token in added.items() if token.special
        }

    def _checked(self) -> str:
        """Return how answers are located, in words. Raises DataError if not, or if none ends."""
        rendered = self.encode(Conversation("chat template", _EXAMPLE))
        for part in rendered:
            if not len(part.ends) or not self._special.issuperset(part.ends.tolist()):
                raise DataError("chat template: nothing of it is marked as an answer", REMEDY)
        prompt = self.prompt(_EXAMPLE[:-1])
        if rendered[-1].ids[: len(prompt)].tolist() != prompt:
            raise DataError("chat template: its prompt ends within a token", REMEDY)
        if self.has_marks:
            return GENERATION
        return DIFFERENCE if len(rendered) == 1 else APART
