"""A base's chat template: conversations become token ids, and which of them are the assistant's.

Where the template says by `{% generation %}` what the assistant writes, that is taken. Otherwise an
answer is the text by which the conversation up to it is longer than the prompt for it, if the one
begins with the other and the whole conversation with both: then these are the very characters that
the model is to write. Where a template rewrites what came before (Qwen3 leaves out earlier
thoughts), each answer becomes a conversation of its own, as the model would see it. A template for
which none of this holds is refused, as is a conversation of which it leaves out a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from coterie.core.errors import DataError
from coterie.data.chats.answers import (
    REMEDY,
    Loss,
    Rendered,
    Rewritten,
    added,
    behind_prompt,
    counted,
    ending,
    pair,
    tokens,
    within,
)
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
)
from coterie.data.chats.shortening import answers_apart, longest_that, without_greeting
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
_CALL: Message = {"function": {"name": "add", "arguments": {"summand": "two"}}}
_LEFT_OUT = (
    "Change the rows (another role, or the text in the content), or use another base or "
    "data.chat_template, whose template writes it."
)
NO_TEMPLATE = (
    "Use a base that has one (their names often end in -Instruct or -chat), or name a file: "
    "--set data.chat_template=FILE."
)


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
            ends += part.ends.tolist()
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
        ids: list[int] = tokens(self.texts, text, renders.starts(text))[0].tolist()
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
        except Rewritten:
            pass
        try:
            return [(part, self._whole(part, loss)) for part in answers_apart(conversation)]
        except Rewritten:
            raise DataError(
                f"{conversation.where}: the chat template writes an answer otherwise than behind "
                f"its own prompt",
                REMEDY,
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
        flags = last.counted[-room:].copy()
        flags[0] = False
        return replace(last, ids=last.ids[-room:], counted=flags)

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
        renders = self._renders(messages, tools)
        text = renders.whole
        if loss == "all":
            silent = [i for i, message in enumerate(messages) if message.get(WEIGHT) == 0]
            spans = added(renders, silent)
        else:
            spans = self._answers(renders, conversation)
        without_tools = self._refuse_left_out(messages, tools, trained)
        ids, offsets = tokens(self.texts, text, renders.starts(text))
        if loss == "answers":
            flags = counted(text, ids, offsets, spans, self._special)
        else:
            flags = ~within(offsets, spans)
        return replace(ending(ids, flags), without_tools=without_tools)

    def _answers(self, renders: Renders, conversation: Conversation) -> list[Span]:
        """Return the characters of the trained answers. Raises Rewritten where they cannot be
        told.
        """
        if self.has_marks:
            return self._marked(renders, conversation)
        numbers = [i for i in conversation.trained if renders.before(i) is not None]
        return added(renders, numbers)

    def _marked(self, renders: Renders, conversation: Conversation) -> list[Span]:
        """Return the characters that the template marks of the trained answers, without what their
        prompts end with.
        """
        marked = with_marks(self._template_for(conversation.tools))
        text, spans = spans_of(
            self._write(conversation.messages, conversation.tools, template=marked)
        )
        if text != renders.whole:  # which the marks would have to leave alone
            raise Rewritten
        answers = [i for i, own in enumerate(conversation.messages) if own["role"] == ASSISTANT]
        trained = set(conversation.trained)
        if len(spans) == len(answers):
            spans = [span for i, span in zip(answers, spans, strict=True) if i in trained]
        elif trained != {i for i in answers if conversation.messages[i]["content"].strip()}:
            raise DataError(
                f"the chat template marks {len(spans)} of {len(answers)} answers by "
                f"{{% generation %}}, so that those of the prompt cannot be told",
                REMEDY,
            )
        starts = renders.starts(text)
        return [behind_prompt(text, span, starts, self._header) for span in spans]

    @cached_property
    def _header(self) -> str:
        """What a prompt adds to the messages before it."""
        messages = _EXAMPLE[:1]
        prompt = self._write(messages, prompt=True)
        return prompt.removeprefix(self._write(messages))

    def _asked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[Renders, str]:
        """Return the texts of messages that are asked, and that of the prompt. Raises DataError."""
        normal, described = normal_messages(messages), normal_tools(tools)
        self.texts.check([normal, described])
        try:
            return self._prompted(normal, described)
        except DataError:
            for rest in without_greeting(Conversation("", normal)):
                return self._prompted(rest.messages, described)
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
            if not len(part.ends) or not self._special.issuperset(part.ends.tolist()):
                raise DataError("chat template: nothing of it is marked as an answer", REMEDY)
        prompt = self.prompt(_EXAMPLE[:-1])
        if rendered[-1].ids[: len(prompt)].tolist() != prompt:
            raise DataError("chat template: its prompt ends within a token", REMEDY)
        if self.has_marks:
            return GENERATION
        return DIFFERENCE if len(rendered) == 1 else APART
