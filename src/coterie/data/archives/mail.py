"""Mail: mbox files and Maildir folders; threads are conversations."""

import email.utils
import mailbox
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from pathlib import Path
from typing import NamedTuple

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.foreign import opened, path_of, read_bytes, refusing
from coterie.data.archives.conversations import Chat, Post, damaged, plain_name
from coterie.data.archives.mail_text import text_of_html, written_here

TITLE = "mail"
BEGINNING = re.compile(r"From [^\n]{1,300}\r?\n[!-9;-~]{1,76}:")
_LINE = 1000  # characters of a header with one value that are looked at
_LIST = 20000  # of one with many
_ID = re.compile(r"<[^<>\s]{1,500}>")
_REPLY = re.compile(r"(?:(?:re|aw|antw|sv|vs|odp|rv|r|rif|fwd?|wg|tr)(?:\[\d+\])?: ?)+", re.I)
# Encodings whose decoders take quadratic time, and that which programs write for UTF-8
_NOT_USED = ("idna", "punycode", "us-ascii")


class _Mail(NamedTuple):
    """A mail: its own id, those that it names, and what joins it to a thread without them."""

    post: Post
    id: str
    references: list[str]
    subject: tuple[str, frozenset[str]]  # without `Re:`, and between whom
    is_reply: bool


def is_maildir(folder: Path) -> bool:
    """Whether a folder holds mails, each a file."""
    return all((folder / name).is_dir() for name in ("cur", "new", "tmp"))


def files(folder: Path) -> list[Path]:
    """Return the mails of a Maildir and of the folders in it, without drafts and thrown away
    ones.
    """
    places = ("cur", "new", ".*/cur", ".*/new")
    paths = (path for place in places for path in sorted(folder.glob(f"{place}/*")))
    return [p for p in paths if p.is_file() and not set("DT") & set(p.name.partition(":2,")[2])]


def chats(paths: Iterable[Path]) -> Iterator[Chat]:
    """Yield the threads of mbox files and Maildir folders, which may have parts of the same
    threads.

    Raises:
        DataError: A mail is damaged.
    """
    mails: dict[str, _Mail] = {}  # of copies in several folders the first
    for path in paths:
        for where, content in _contents(path):
            mail = _mail(where, content)
            mails.setdefault(mail.id, mail)
    times = {id: time for id, mail in mails.items() if (time := mail.post.time) is not None}
    for thread in _threads(list(mails.values())):
        thread.sort(key=lambda mail: _place(mail, times))
        posts = [mail.post for mail in thread]
        yield Chat([post for post in posts if post.text and post.speaker], whole=True)


def _place(mail: _Mail, times: Mapping[str, float]) -> tuple[float, bool]:
    """Return what mails are sorted by: one without a valid date is behind what it answers."""
    if mail.post.time is not None:
        return mail.post.time, False
    return max((times[id] for id in mail.references if id in times), default=0.0), True


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each mail, with its place."""
    if path.is_dir():
        for mail in files(path):
            with refusing(DataError, str(mail), "Leave it out."):
                content = read_bytes(mail)
            yield str(mail), content
        return
    with opened(path) as file, closing(mailbox.mbox(path_of(file, path), create=False)) as box:
        pieces = (box.get_bytes(key, from_=True) for key in box.keys())  # noqa: SIM118
        for number, content in enumerate(_whole(pieces), start=1):
            yield f"{path}, mail {number}", content


def _whole(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the mails of an mbox file: a line of text may begin as those between mails do."""
    parts: list[bytes] = []
    for piece in pieces:
        if parts and BEGINNING.match(piece[:_LINE].decode("latin-1")):
            yield b"\n\n".join(parts)
            parts = []
        parts.append(piece)
    if parts:
        yield b"\n\n".join(parts)


def _mail(where: str, content: bytes) -> _Mail:
    try:
        return _read(where, message_from_bytes(content))
    except Exception as error:  # the parts of `email` raise whatever they like
        raise damaged(where, f"not a mail ({type(error).__name__})") from None


def _read(where: str, message: Message) -> _Mail:
    name, address = email.utils.parseaddr(_header(message, "from"))
    address = address.lower()
    shown = plain_name(_decoded(name)) or address
    subject = " ".join(_decoded(_header(message, "subject")).split())
    plain = _REPLY.sub("", subject, count=1) if _REPLY.match(subject) else subject
    id, answered = (_ID.findall(_header(message, key)) for key in ("message-id", "in-reply-to"))
    to = email.utils.getaddresses([_header(message, "to", _LIST), _header(message, "cc", _LIST)])
    return _Mail(
        Post(where, address, written_here(_text(message)), _time(message), shown),
        id[0] if id else where,
        [*_ID.findall(_header(message, "references", _LIST)), *answered],
        (names.folded(plain), frozenset({address, *(other.lower() for _, other in to)})),
        plain != subject,
    )


def _header(message: Message, name: str, most: int = _LINE) -> str:
    """Return the first characters of a header as it stands, unfolded; "" where there is none."""
    value = next((value for key, value in message.raw_items() if key.lower() == name), "")
    raw = str(value)[:most].encode("ascii", "surrogateescape")
    return " ".join(raw.decode("utf-8", "replace").split())


def _decoded(text: str) -> str:
    """Return the text of a header, whose words may be encoded."""
    try:
        return str(make_header(decode_header(text)))
    except (ValueError, LookupError):
        return text


def _time(message: Message) -> float | None:
    try:
        date = email.utils.parsedate_to_datetime(_header(message, "date"))
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _text(message: Message) -> str:
    """Return the text of a mail: its plain parts, or else its HTML without tags."""
    parts = list(_text_parts(message))
    plain = [part for part in parts if part.get_content_subtype() != "html"]
    if plain:
        return "\n".join(map(_unwrapped, plain))
    return "\n".join(text_of_html(_content(part)) for part in parts)


def _text_parts(message: Message) -> Iterator[Message]:
    """Yield the parts of a mail that are its text: no attachments, nor mails within it."""
    waiting = [message]
    while waiting:
        part = waiting.pop()
        children = part.get_payload()
        if part.get_content_maintype() == "multipart" and isinstance(children, list):
            waiting += (child for child in reversed(children) if isinstance(child, Message))
        elif (
            part.get_content_type() in ("text/plain", "text/html")
            and part.get_content_disposition() != "attachment"
        ):
            yield part


def _content(part: Message) -> str:
    """Return the characters of a part."""
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    charset = str(part.get_content_charset("utf-8"))
    charset = "utf-8" if charset in _NOT_USED else charset
    try:
        text = content.decode(charset, "replace")
    except (LookupError, ValueError):
        text = content.decode("utf-8", "replace")
    return text.replace("\r\n", "\n")


def _unwrapped(part: Message) -> str:
    """Return the text of a plain part; lines that the mail program broke are whole again
    (RFC 3676).
    """
    text = _content(part)
    if str(part.get_param("format", "")).lower() != "flowed":
        return text
    return re.sub(r"(?m)^(?!-- $|>)([^\n]*) \n(?!>|-- $|\n)", r"\1 ", text)


def _threads(mails: Sequence[_Mail]) -> Iterable[list[_Mail]]:
    """Return the threads: mails that name each other, or answers that name none, by subject and
    people.
    """
    parents: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = key = parents[parent]
        return key

    by_subject = {mail.subject for mail in mails if mail.is_reply and not mail.references}
    for mail in mails:
        for reference in mail.references:
            parents[root(reference)] = root(mail.id)
        if mail.subject in by_subject:
            parents[root(mail.subject)] = root(mail.id)
    threads: dict[Hashable, list[_Mail]] = {}
    for mail in mails:
        threads.setdefault(root(mail.id), []).append(mail)
    return threads.values()
