"""Posts of people, the common form of archives, and the conversations made of them."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.foreign import json_of
from coterie.data.chats.reading import POSTS
from coterie.data.plain_text import read_text
from coterie.data.splitting import digest

SILENCE = 8 * 3600  # seconds without a post that end a conversation: a night
PAUSE, MUCH = 3600, 8000  # seconds that end one after so many characters
# characters after which a conversation ends as if by silence, at the next post of somebody else:
# windows would lose the oldest turns of a longer one
LONGEST = 2000

Row = tuple[str, Mapping[str, Any]]  # where the conversation begins, `messages` and `POSTS`
Turn = tuple["Post", bool]  # with whether it is mine


@dataclass(frozen=True)
class Post:
    """One message by one person."""

    where: str  # its place, for error messages
    speaker: str  # its author, as `data.me` names people
    text: str  # its text
    time: float | None = None  # its time in seconds; None: unknown
    shown: str = ""  # the author's name in conversations; "": as `speaker`
    forwarded: bool = False  # whether the words are somebody else's


@dataclass(frozen=True)
class Chat:
    """Messages of one conversation, the oldest first."""

    posts: Sequence[Post]  # the posts of all people
    whole: bool = False  # whether they are one conversation, however long it lasts


def plain_name(name: str) -> str:
    """Return a name in normal form, without direction marks and with single spaces."""
    return names.normal(" ".join(name.translate(names.MARKS).split()))


def name_keys(people: Iterable[str]) -> set[str]:
    """Return keys of names, equal for names that differ only in case, spaces or marks."""
    return {names.folded(plain_name(name)) for name in people}


def told_apart(people: Mapping[str, str]) -> dict[str, str]:
    """Return the names of people by id; names that several people have get the id appended."""
    keys = {id: names.folded(plain_name(name)) for id, name in people.items()}
    counts = Counter(keys.values())
    return {id: f"{name} ({id})" if counts[keys[id]] > 1 else name for id, name in people.items()}


def seconds(value: Any, where: str) -> float:
    """Return the time given by a number or an ISO date, in seconds. Raises DataError."""
    try:
        if isinstance(value, str) and "-" in value[1:]:
            return datetime.fromisoformat(value).timestamp()
        return float(value)
    except (ValueError, TypeError, OverflowError, OSError):
        raise damaged(where, f"{str(value)[:40]!r} is no time") from None


def damaged(where: str, problem: str) -> DataError:
    """Return the error for a damaged archive."""
    return DataError(f"{where}: {problem}", "Export the archive again, or leave it out.")


def load(path: Path, list_of: str = "") -> Any:
    """Return the content of a JSON file. Raises DataError if it is not readable JSON, or not a list
    if it should be one.
    """
    try:
        content = json_of(read_text(path))
    except ValueError as error:
        raise damaged(str(path), f"not JSON ({error})") from None
    if list_of and not isinstance(content, list):
        raise damaged(str(path), f"not a list of {list_of}")
    return content


def member(value: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a member of a JSON object. Raises DataError if it is missing or of another type."""
    if not isinstance(value, dict) or not isinstance(value.get(key), kind):
        state = "damaged" if isinstance(value, dict) and key in value else "missing"
        raise damaged(where, f"{key!r} is {state}")
    return value[key]


def conversation_rows(chats: Iterable[Chat], me: Collection[str]) -> Iterator[Row]:
    """Yield the conversations in which `me` (`name_keys`) wrote something as rows for
    `read_conversations`, `me` being the assistant. Several others have their names in the messages.
    """
    for chat in chats:
        speakers = {post.speaker for post in chat.posts}
        mine = {speaker for speaker in speakers if names.folded(plain_name(speaker)) in me}
        turns = [(post, post.speaker in mine and not post.forwarded) for post in chat.posts]
        for part in [turns] if chat.whole else _parts(turns):
            if any(is_mine for _, is_mine in part):
                messages = list(_messages(part, len(speakers - mine) > 1))
                # by minute and text, equal in the exports of all who have a post
                posts = tuple(digest(f"{(post.time or 0) // 60} {post.text}") for post, _ in part)
                yield part[0][0].where, {"messages": messages, POSTS: posts}


def _parts(turns: Iterable[Turn]) -> Iterator[Sequence[Turn]]:
    """Yield the turns in parts, cut at silences, for all alike, and after about `LONGEST`."""
    part, size, answered, talk = deque[Turn](), 0, False, 0
    for post, is_mine in turns:
        too_long = answered and not is_mine and size > LONGEST
        before = part[-1][0].time if part else None
        silence = PAUSE if talk > MUCH else SILENCE
        silent = before is not None and post.time is not None and post.time - before > silence
        if part and (too_long or silent):
            yield part
            part, size, answered = deque(), 0, False
            talk *= not silent
        part.append((post, is_mine))
        talk += len(post.text)
        size, answered = size + len(post.text), answered or is_mine
        while not answered and size > LONGEST and len(part) > 1:
            size -= len(part.popleft()[0].text)
    if part:
        yield part


def _messages(part: Iterable[Turn], several: bool) -> Iterator[dict[str, str]]:
    for is_mine, posts in groupby(part, key=lambda turn: turn[1]):
        texts = [
            f"{post.shown or post.speaker}: {post.text}" if several and not is_mine else post.text
            for post, _ in posts
        ]
        yield {"role": "assistant" if is_mine else "user", "content": "\n".join(texts)}
