"""The fields of a `data` section whose rows may be conversations."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coterie.core import names
from coterie.core.foreign import read_text
from coterie.data.chats.answers import Loss
from coterie.data.chats.encoding import Encoder, StreamEncoder
from coterie.data.chats.reading import Conversation, read_conversations
from coterie.data.chats.template import ChatTemplate
from coterie.data.section import Names, Section
from coterie.data.splitting import Document, conversation_content
from coterie.data.store import Tokenizer

_FIELDS_OF_CHATS = ("loss", "chat_template", "chat_column", "packing", "unanswered", "me")


def template_text(value: str) -> str:
    """Return a template given as Jinja or as the path of a file. Raises ValueError."""
    if is_template(value):
        return value
    path = Path(value).expanduser()
    try:
        template = read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a chat template ({error})") from None
    if not is_template(template):
        raise ValueError(f"{path} is no chat template: it has no Jinja in it")
    return template


def is_template(value: str) -> bool:
    """Whether a value is Jinja rather than a path."""
    return "{%" in value or "{{" in value


def _listed(me: Any) -> Any:
    """Return a name as a list of one, also as a value of a mapping, whose keys are normalised."""
    if isinstance(me, Mapping):
        return {names.normal(str(id)): _listed(people) for id, people in me.items()}
    return (me,) if isinstance(me, str) else me


class ChatFields(Section):
    """A section whose rows are texts or conversations."""

    # what rows hold: text, or conversations (`messages`, ShareGPT's `conversations`, or `prompt`
    # and `completion`)
    content: Literal["text", "chats"] = "text"
    # of conversations, what is trained and scored: the assistant's answers with the token that ends
    # them, or all tokens
    loss: Loss = "answers"
    # file with a chat template (Jinja), or its text; null: the base's own
    chat_template: Annotated[str, AfterValidator(template_text)] | None = None
    # column that has the conversation; null: the usual ones
    chat_column: str | None = Field(None, min_length=1)
    # whether a window may hold several conversations, none of which sees another
    packing: bool = True
    # what is done with conversations that have no answer to train on
    unanswered: Literal["refuse", "leave-out"] = "refuse"
    # what is done with documents that are nearly equal: keep leaves them where they fall, together
    # puts them into one split
    near_duplicates: Literal["keep", "together"] = "keep"
    # whose messages in people's own archives (ChatGPT, Telegram, WhatsApp, Slack, mail) are the
    # assistant's: names or mail addresses, the same for all clients or by client; null: an archive
    # is refused with the names in it
    me: Annotated[Names | dict[str, Names], BeforeValidator(_listed)] | None = None

    @model_validator(mode="after")
    def _only_of_chats(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in _FIELDS_OF_CHATS if getattr(self, name) != fields[name].default]
        if self.content == "text" and given:
            raise ValueError(f"{given[0]}: for conversations only; set content: chats")
        return self

    def encoder(self, tokenizer: Tokenizer) -> StreamEncoder:
        """Return the encoder of texts or conversations. Raises DataError."""
        if self.content == "text":
            return super().encoder(tokenizer)
        template = ChatTemplate(tokenizer, self.chat_template, self.control_tokens)
        if self.loss == "answers":
            template.way  # noqa: B018 - refuses a template whose answers cannot be told
        return Encoder(template, self.loss, self.packing, self.unanswered == "leave-out")

    def content_of(self, document: str) -> str:
        if self.content == "text":
            return document
        conversation = Conversation.of_document(document)
        return conversation_content(conversation.messages, conversation.text)

    def of_client(self, id: str) -> Self:
        """Return the section with the `me` of one client, unless all clients share it."""
        if isinstance(self.me, tuple):
            return self
        return self.model_copy(update={"me": {id: (self.me or {}).get(id, ())}})

    def conversations(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Document]:
        """Return conversations, given with their locations, as documents. Raises DataError."""
        return [
            conversation.document() for conversation in read_conversations(rows, self.chat_column)
        ]

    def about(self) -> dict[str, Any]:
        fields = super().about()
        ignored = ("content", *_FIELDS_OF_CHATS) if self.content == "text" else ("packing",)
        return {key: value for key, value in fields.items() if key not in ignored}
