"""ChatGPT's export: `conversations.json`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.data.archives.conversations import Chat, Post, damaged, load, member

TITLE = "ChatGPT's export"
BEGINNING = re.compile(r'\s*\[\s*\{(?s:.*)"mapping"\s*:\s*\{')
_SPEAKERS = ("user", "assistant")
_CITATION = re.compile("\ue200[^\ue201]{1,200}\ue201")  # of a page that was searched


def chats(path: Path) -> Iterator[Chat]:
    """Yield the conversations of an export. Raises DataError."""
    for number, conversation in enumerate(load(path, "conversations"), start=1):
        where = f"{path}, conversation {number}"
        if member(conversation, "mapping", dict, where):
            posts = (_post(message, where) for message in _branch(conversation, where))
            yield Chat([post for post in posts if post], whole=True)


def _branch(conversation: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of the branch that was shown last, the first message first."""
    if conversation.get("current_node", "") is None:  # begun, and left without a message
        return []
    nodes = conversation["mapping"]
    id: str | None = member(conversation, "current_node", str, where)
    visited: dict[str, Any] = {}
    while id is not None:
        if id in visited:
            raise damaged(where, f"message {id!r} follows itself")
        node = visited[id] = member(nodes, id, dict, f"{where}, mapping")
        id = node.get("parent")
        if not isinstance(id, str | None):
            raise damaged(where, "'parent' is damaged")
    messages = (node.get("message") for node in reversed(visited.values()))
    return [message for message in messages if message is not None]


def _post(message: Any, where: str) -> Post | None:
    """Return a user's or assistant's message; None for tools, system and hidden ones."""
    role = member(member(message, "author", dict, where), "role", str, where)
    content = member(message, "content", dict, where)
    metadata = message.get("metadata") or {}
    if (
        role not in _SPEAKERS
        or message.get("recipient", "all") != "all"
        or message.get("weight", 1) == 0
        or (isinstance(metadata, dict) and metadata.get("is_visually_hidden_from_conversation"))
        or content.get("content_type") not in ("text", "multimodal_text")
    ):
        return None
    text = "\n".join(filter(None, map(_text, member(content, "parts", list, where)))).strip()
    return Post(where, role, text) if text else None


def _text(part: Any) -> str:
    """Return the text of a part, or a placeholder such as `[image]`."""
    if isinstance(part, str):
        return _CITATION.sub("", part)
    if not isinstance(part, dict):
        return ""
    if isinstance(text := part.get("text"), str):
        return text
    return f"[{str(part.get('content_type', 'file')).partition('_')[0]}]"
