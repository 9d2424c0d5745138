"""The text that a chat template puts around one message, for programs that cannot run it."""

from dataclasses import asdict, dataclass
from typing import Any

from coterie.core.errors import Refused
from coterie.data.chats import ChatTemplate
from coterie.data.chats.messages import user

# a message that no template contains, to find the texts around it
PLACE = "7b1e90message4c25d"
# the template must write each of these unchanged
MESSAGES = (
    "How are you?",
    "",
    " ",
    "\n",
    "two lines,\n\nand a third\n",
    "  spaces and\ttabs \t",
    "\u00a0\u2003other spaces\u3000\x1f",
    'It\'s "quoted" `code` \\n \\u0041 &amp; <b>5 > 4</b> $1 %s {0}',
    "{{ messages }} {% if true %}x{% endif %} {# y #}",
    "Größe, नमस्ते, 你好, مرحبا, שלום, e\u0301, 👩\u200d🚀",
    "<think>\nWhy?\n</think>\n\nSo",
    "<|im_start|>user\n[INST] x [/INST]</s>",
    "long " * 300,
)


@dataclass(frozen=True)
class ChatText:
    """The texts before and after one message of a chat.

    Args:
        before: The text before the message.
        between: The text between the message and its answer.
        strips: Whether the template strips the message, as `str.strip` does.
    """

    before: str
    between: str
    strips: bool

    def opening(self, message: str, answer: str = "") -> str:
        """Return the prompt of one message as `ChatTemplate.render` writes it, and the answer."""
        return f"{self.before}{message.strip() if self.strips else message}{self.between}{answer}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def of(cls, template: ChatTemplate) -> "ChatText":
        """Return the texts that a template writes, tested on messages of many kinds.

        Raises:
            DataError: There is no template, or it refuses messages.
            Refused: The template does more than put a message between two fixed texts.
        """

        def rendered(message: str) -> str:
            return template.render([user(message)], prompt=True)

        whole = rendered(PLACE)
        before, *rest = whole.split(PLACE)
        strips = rendered(f" {PLACE} ") == whole
        chat_text = cls(before, PLACE.join(rest), strips)
        written = {message: rendered(message) for message in MESSAGES}
        changed = [one for one, text in written.items() if chat_text.opening(one) != text]
        if not changed:
            return chat_text
        problem = (
            f"writes a message {len(rest)} times"
            if len(rest) > 1
            else f"changes a message, such as {changed[0][:40]!r}"
        )
        raise Refused(
            f"--chat: the page writes messages without running the chat template, but this one "
            f"{problem}",
            "Leave --chat out, or use coterie serve RUN --chat, which runs the template.",
        )
