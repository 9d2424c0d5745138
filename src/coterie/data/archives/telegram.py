"""Telegram's export: `result.json`, of one chat or of a whole account."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from coterie.data.archives.conversations import (
    Chat,
    Post,
    damaged,
    load,
    member,
    plain_name,
    seconds,
    told_apart,
)

TITLE = "Telegram's export"
_CHAT = r'"type"\s*:\s*"(?:personal_chat|saved_messages|bot_chat|(?:private|public)_\w{1,20})"'
BEGINNING = re.compile(
    rf'\s*\{{(?s:.*)(?:{_CHAT}|"type"\s*:\s*"(?:message|service)"|"personal_information"\s*:)'
)
_NOBODY = "Deleted Account"  # as the program itself calls it


def chats(path: Path) -> Iterator[Chat]:
    """Yield the chats of an export. Raises DataError."""
    lists = [_messages(chat, path) for chat in _chats_of(load(path), path)]
    people = dict[str, str]()
    for _, message in chain.from_iterable(lists):
        if id := _id(message):
            people[id] = plain_name(str(message.get("from") or _NOBODY))
    shown = told_apart(people)
    for messages in lists:
        posts = (_post(message, where, shown) for where, message in messages)
        yield Chat([post for post in posts if post.text])


def _chats_of(export: Any, path: Path) -> list[Any]:
    if isinstance(export, dict) and "messages" in export:
        return [export]
    parts = [member(export, "chats", dict, str(path)), export.get("left_chats", {"list": []})]
    return [chat for part in parts for chat in member(part, "list", list, str(path))]


def _messages(chat: Any, path: Path) -> list[tuple[str, dict[str, Any]]]:
    messages = member(chat, "messages", list, f"{path}, chat")
    where = f"{path}, chat {str(chat.get('name') or chat.get('id'))!r}"
    places = [(f"{where}, message {n}", message) for n, message in enumerate(messages, start=1)]
    return [
        (at, message) for at, message in places if member(message, "type", str, at) == "message"
    ]


def _id(message: dict[str, Any]) -> str:
    return str(message.get("from_id") or message.get("from") or "")


def _post(message: dict[str, Any], where: str, people: dict[str, str]) -> Post:
    time = seconds(message.get("date_unixtime") or message.get("date"), where)
    forwarded = "forwarded_from" in message or "via_bot" in message
    speaker = people.get(_id(message), _NOBODY)
    return Post(where, speaker, _text(message, where).strip(), time, forwarded=forwarded)


def _text(message: dict[str, Any], where: str) -> str:
    """Return the text of a message, which may consist of pieces: links, bold words, mentions."""
    text = member(message, "text", (str, list), where)
    pieces = [text] if isinstance(text, str) else text
    if not all(isinstance(piece, str | dict) for piece in pieces):
        raise damaged(where, "'text' is damaged")
    return "".join(
        piece if isinstance(piece, str) else member(piece, "text", str, where) for piece in pieces
    )
