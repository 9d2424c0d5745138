"""Invented archives of each form, in which Ann Miller and Ben Jones talk."""

import json
from email.message import EmailMessage
from pathlib import Path
from typing import Any

WHATSAPP = """\
12.05.24, 14:32 - Nachrichten und Anrufe sind Ende-zu-Ende-verschlüsselt.
12.05.24, 14:32 - Ben Jones: Are you there?
12.05.24, 14:33 - Ann Miller: Yes: here
with a second line

and a fourth
12.05.24, 14:33 - Ann Miller: <Medien ausgeschlossen>
12.05.24, 14:34 - Ann Miller: and more
12.05.24, 14:35 - Ben Jones: Good
13.05.24, 09:00 - Ann Miller: Morning
13.05.24, 09:01 - Ben Jones: Morning!
13.05.24, 09:02 - Ann Miller: Tea?
"""


def write(path: Path, value: Any) -> Path:
    """Write text, or anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    return path


def node(id: str, parent: str | None, role: str = "", parts: Any = (), **more: Any) -> Any:
    """A message of ChatGPT's tree."""
    content = {"content_type": "text", "parts": list(parts)}
    message = {"id": id, "author": {"role": role}, "content": content, "recipient": "all"}
    return {"id": id, "parent": parent, "message": message | more if role else None}


def chatgpt() -> list[Any]:
    """A conversation in which a question was asked anew, and with everything that is not shown."""
    image = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}
    hidden = {"is_visually_hidden_from_conversation": True}
    nodes = [
        node("root", None),
        node("s", "root", "system", ["be kind"], metadata={}),
        node("h", "s", "user", ["I am Ann"], metadata=hidden),
        node("old", "h", "user", ["What is 2+3?"]),
        node("q", "h", "user", [image, "What is this?"]),
        node("code", "q", "assistant", ["look()"], recipient="python"),
        node("tool", "code", "tool", ["a cat"]),
        node("a", "tool", "assistant", ["A cat."], weight=1.0),
        node("end", "a", "user", ["Thanks", "a lot"]),
    ]
    nodes[4]["message"]["content"]["content_type"] = "multimodal_text"
    mapping = {one["id"]: one for one in nodes}
    return [{"title": "Cat", "create_time": 1.5, "mapping": mapping, "current_node": "end"}]


def telegram(*messages: Any, name: str | None = "Ben Jones") -> dict[str, Any]:
    """A chat of Telegram's."""
    return {"name": name, "type": "personal_chat", "id": 7, "messages": list(messages)}


def said(person: str, text: Any, at: str = "2024-05-12T14:32:07", **more: Any) -> dict[str, Any]:
    """A message of Telegram's."""
    id = f"user{sum(person.encode())}"
    message = {"id": 1, "type": "message", "date": at, "from": person, "from_id": id}
    return message | {"text": text} | more


def write_slack(folder: Path) -> Path:
    """Write an export of Slack with two channels, a thread, and what programs said."""
    people = [("U1", "ann", "Ann Miller"), ("U2", "ben", "Ben Jones"), ("U3", "cy", "Cy Low")]
    users = [{"id": id, "name": n, "profile": {"real_name": real}} for id, n, real in people]
    write(folder / "users.json", users)
    write(folder / "channels.json", [{"id": "C1", "name": "general"}])

    def message(user: str, text: str, ts: str, **more: Any) -> dict[str, Any]:
        return {"type": "message", "user": user, "text": text, "ts": ts} | more

    write(
        folder / "general" / "2024-05-12.json",
        [
            message("U2", "<@U2> has joined", "1000.0", subtype="channel_join"),
            message("U2", "<@U1> tea &amp; <https://x.org|cake>?", "1001.0", thread_ts="1001.0"),
            message("U3", "Lunch &lt;now&gt;?", "1002.0"),
            message("U1", "in <#C1|general>", "1003.0"),
        ],
    )
    thread = {"thread_ts": "1001.0"}
    late = str(1000.0 + 5 * 86400)
    write(
        folder / "general" / "2024-05-17.json",
        [
            message("U1", "cake", late, **thread),
            {"type": "message", "subtype": "bot_message", "text": "deployed", "ts": "1004.0"},
        ],
    )
    write(folder / "quiet" / "2024-05-12.json", [message("U3", "alone", "1001.0")])
    return folder


def mail(
    sender: str, subject: str, text: str, day: int, html: str = "", **headers: str
) -> EmailMessage:
    """A mail of May 2024."""
    message = EmailMessage()
    message["From"], message["Subject"] = sender, subject
    message["To"] = "Ben <ben@x.org>" if "ann@" in sender.lower() else "ann@x.org"
    message["Date"] = f"Sun, {day} May 2024 10:00:00 +0200"
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    if text:
        message.set_content(text)
    if html:
        message.set_content(html, subtype="html")
    return message


def write_mbox(path: Path, *mails: EmailMessage) -> Path:
    """Write an mbox file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(b"From x@y Sun May 12 10:00:00 2024\n" + bytes(one) + b"\n" for one in mails)
    path.write_bytes(text)
    return path
