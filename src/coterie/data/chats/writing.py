"""What a base's chat template writes of messages, marked: control tokens in them stay text."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from coterie.core.errors import DataError
from coterie.data.chats.jinja_process import shared
from coterie.data.chats.messages import ASSISTANT, Message, user
from coterie.data.chats.rendering import Excerpt, Renders, as_template
from coterie.data.text_encoding import TextEncoder

NO_TEMPLATE = (
    "Use a base that has one (their names often end in -Instruct or -chat), or name a file: "
    "--set data.chat_template=FILE."
)
_CALL: Message = {"function": {"name": "add", "arguments": {"summand": "two"}}}


class Writer:
    """Writes messages with a chat template.

    Args:
        template: Jinja; None where the base has none.
        with_tools: The template for messages with tools.
        texts: The base's encoder.
    """

    def __init__(self, template: str | None, with_tools: str | None, texts: TextEncoder) -> None:
        self._template, self._with_tools, self._texts = template, with_tools, texts

    def template_for(self, tools: Sequence[Any] | None) -> str:
        """Return the template for messages with these tools, or with none."""
        return str(self._with_tools if tools else self._template)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the text of messages; as a prompt, with the beginning of an answer.

        Args:
            messages: In normal form.
            tools: Descriptions of tools.
            prompt: Whether it is one.
            template: In place of the base's.

        Raises:
            DataError: The base has no template, or it refuses these messages.
        """
        part = Excerpt(0, len(messages), prompt)
        (text,) = self._texts_of(*self._shown(messages, tools), [part], template)
        if isinstance(text, DataError):
            raise text
        return text

    def renders(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Renders:
        """Return the texts of messages and of their parts, to be written when they are asked
        for.
        """
        return Renders(self._texts_of, *self._shown(messages, tools))

    def _texts_of(
        self,
        shown: Sequence[Message],
        tools: Sequence[Any] | None,
        excerpts: Sequence[Excerpt],
        template: str | None = None,
    ) -> list[str | DataError]:
        """Return what the template writes of parts of what it is given, or how it refuses them.
        Raises DataError where it goes beyond its bounds.
        """
        if self._template is None:
            raise DataError("the base has no chat template", NO_TEMPLATE)
        variables = self._texts.tokenizer.special_tokens_map
        template = template or self.template_for(tools)
        texts = shared.texts(template, shown, tools, variables, excerpts)
        return [self._texts.marked(text) if isinstance(text, str) else text for text in texts]

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
        if self._texts.control_tokens == "tokens":
            return shown, tools
        shield = self._texts.shield
        return [shield(message, message["role"] == ASSISTANT) for message in shown], shield(tools)

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether the template takes a call's arguments as JSON text alone."""
        example = [user("Which?"), {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}]

        def written(as_text: bool) -> bool:
            shown = self._shown(example, None, as_text)
            (text,) = self._texts_of(*shown, [Excerpt(0, len(example))])
            return isinstance(text, str) and "two" in text.partition("?")[2]

        return written(True) and not written(False)
