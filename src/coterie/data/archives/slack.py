"""Slack's export: a folder with `users.json`, `channels.json`, and a folder per channel."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.data.archives.conversations import (
    Chat,
    Post,
    load,
    member,
    plain_name,
    seconds,
    told_apart,
)

TITLE = "Slack's export"
USERS = "users.json"
CHANNELS = "channels.json"
_CANVASES = "canvas_in_the_conversation.json"  # documents beside the days of a channel
# What people write; others say who joined, what was pinned, or are of programs
_SUBTYPES = (None, "thread_broadcast", "reply_broadcast", "file_share", "me_message")
_LINK = re.compile(r"<([^<>\n]{1,4000})>")


def is_export(folder: Path) -> bool:
    """Whether a folder is such an export."""
    return all((folder / name).is_file() for name in (USERS, CHANNELS))


def files(folder: Path) -> list[Path]:
    """Return the files to read, the oldest of each channel first."""
    days = sorted(path for path in folder.glob("*/*.json") if path.is_file())
    return [folder / USERS, *(p for p in days if p.name[0] != "." and p.name != _CANVASES)]


def chats(folder: Path) -> Iterator[Chat]:
    """Yield the threads of an export and the other messages of each channel. Raises DataError."""
    users, *days = files(folder)
    people = _people(users)
    for channel in sorted({path.parent for path in days}):
        talk: dict[str, list[Post]] = {"": []}  # by thread
        for path in days:
            if path.parent == channel:
                for thread, post in _posts(path, people):
                    talk.setdefault(thread, []).append(post)
        for thread, posts in talk.items():
            yield Chat(sorted(posts, key=lambda post: post.time or 0), whole=bool(thread))


def _people(path: Path) -> dict[str, str]:
    people = {}
    for number, user in enumerate(load(path, "people"), start=1):
        id = member(user, "id", str, f"{path}, entry {number}")
        people[id] = _name(user.get("profile"), user, id)
    return told_apart(people)


def _name(profile: Any, user: dict[str, Any], id: str) -> str:
    shown = profile if isinstance(profile, dict) else {}
    candidates = [shown.get("display_name"), shown.get("real_name")]
    candidates += [user.get("real_name"), user.get("name")]
    return next((plain_name(name) for name in candidates if isinstance(name, str) and name), id)


def _posts(path: Path, people: dict[str, str]) -> Iterator[tuple[str, Post]]:
    """Yield the messages of one day, each with its thread, if any."""
    for number, message in enumerate(load(path, "messages"), start=1):
        where = f"{path}, message {number}"
        if member(message, "type", str, where) != "message":
            continue
        if message.get("subtype") not in _SUBTYPES or not isinstance(message.get("user"), str):
            continue
        user = message["user"]
        speaker = people.get(user) or _name(message.get("user_profile"), {}, user)
        if text := _text(member(message, "text", str, where), people):
            thread = str(message.get("thread_ts") or "")
            yield thread, Post(where, speaker, text, seconds(message.get("ts"), where))


def _text(text: str, people: dict[str, str]) -> str:
    """Return text as it was displayed: names in place of ids, without Slack's markup."""
    return html.unescape(_LINK.sub(lambda link: _shown(link[1], people), text)).strip()


def _shown(link: str, people: dict[str, str]) -> str:
    target, _, label = link.partition("|")
    if target[0] == "@":
        return f"@{people.get(target[1:], label or target[1:])}"
    if target[0] in "#!":
        return f"{target[0].replace('!', '@')}{(label or target[1:]).lstrip('#@')}"
    return label or target
