"""Mail in mbox files and Maildir folders; each thread is a conversation."""

import email.utils
import mailbox
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.foreign import opened, path_of, read_bytes, refusing
from coterie.data.archives.conversations import Chat, Post, damaged, plain_name

TITLE = "mail"
# with a time or an address, unlike a note that begins with this word
BEGINNING = re.compile(r"From (?:[^\n]{1,280}\d:\d\d|\S{1,200}@)[^\n]{0,100}\r?\n[!-9;-~]{1,76}:")
_LINE = 1000  # characters of a header with one value that are looked at
_LIST = 20000  # of one with many
_ID = re.compile(r"<[^<>\s]{1,500}>")
_REPLY = re.compile(r"(?:(?:re|aw|antw|sv|vs|odp|rv|r|rif|fwd?|wg|tr)(?:\[\d+\])?: ?)+", re.I)
# Gmail's labels of spam, deleted mails and drafts, in several languages
_DISCARDED = {"spam", "trash", "bin", "draft", "drafts", "papierkorb", "entwurf", "entwürfe"}
_DISCARDED |= {"corbeille", "brouillons", "papelera", "borradores", "cestino", "bozze", "lixeira"}
_DISCARDED |= {"rascunhos", "prullenbak", "concepten", "kosz", "wersje robocze"}
# Encodings whose decoders take quadratic time, and that which programs write for UTF-8
_NOT_USED = ("idna", "punycode", "us-ascii")


class _Mail(NamedTuple):
    """A mail with its id, the ids that it refers to, and what joins it to a thread otherwise."""

    post: Post
    id: str
    references: list[str]
    subject: tuple[str, frozenset[str]]  # without `Re:`, and between whom
    is_reply: bool


def is_maildir(folder: Path) -> bool:
    """Whether a folder holds mails as separate files."""
    return all((folder / name).is_dir() for name in ("cur", "new", "tmp"))


def files(folder: Path) -> list[Path]:
    """Return the mails of a Maildir and its subfolders, without drafts and deleted ones."""
    places = ("cur", "new", ".*/cur", ".*/new")
    paths = (path for place in places for path in sorted(folder.glob(f"{place}/*")))
    return [p for p in paths if p.is_file() and not set("DT") & set(p.name.partition(":2,")[2])]


def chats(paths: Iterable[Path]) -> Iterator[Chat]:
    """Yield the threads of mbox files and Maildir folders together. Raises DataError."""
    mails: dict[str, _Mail] = {}  # of copies in several folders the first
    for path in paths:
        for where, content in _contents(path):
            try:
                message = message_from_bytes(content)
                if not _discarded(message):
                    mail = _read(where, message)
                    mails.setdefault(mail.id, mail)
            except Exception as error:  # the parts of `email` raise whatever they like
                raise damaged(where, f"not a mail ({type(error).__name__})") from None
    times = {id: time for id, mail in mails.items() if (time := mail.post.time) is not None}
    for thread in _threads(list(mails.values())):
        thread.sort(key=lambda mail: _place(mail, times))
        posts = [mail.post for mail in thread]
        yield Chat([post for post in posts if post.text and post.speaker], whole=True)


def _discarded(message: Message) -> bool:
    """Whether a mail is spam, a draft or deleted, by the marks of Gmail and Thunderbird."""
    labels = _decoded(_header(message, "x-gmail-labels", _LIST)).casefold().split(",")
    status = _header(message, "x-mozilla-status")
    deleted = re.fullmatch("[0-9a-f]{4}", status, re.I) is not None and int(status, 16) & 8 > 0
    return deleted or not _DISCARDED.isdisjoint(map(str.strip, labels))


def _place(mail: _Mail, times: Mapping[str, float]) -> tuple[float, bool]:
    """Return the sort key of a mail; one without a valid date follows the mail that it answers."""
    if mail.post.time is not None:
        return mail.post.time, False
    return max((times[id] for id in mail.references if id in times), default=0.0), True


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
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
    """Yield the mails of an mbox file, also where a line of text looks like a separator."""
    parts: list[bytes] = []
    for piece in pieces:
        if parts and BEGINNING.match(piece[:_LINE].decode("latin-1")):
            yield b"\n\n".join(parts)
            parts = []
        parts.append(piece)
    if parts:
        yield b"\n\n".join(parts)


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
    """Return the first `most` characters of a header, raw and unfolded; "" if it is missing."""
    value = next((value for key, value in message.raw_items() if key.lower() == name), "")
    raw = str(value)[:most].encode("ascii", "surrogateescape")
    return " ".join(raw.decode("utf-8", "replace").split())


def _decoded(text: str) -> str:
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
    """Yield the parts that are the mail's text: no attachments, no enclosed mails."""
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
    """Return the text of a plain part with wrapped lines joined (RFC 3676)."""
    text = _content(part)
    if str(part.get_param("format", "")).lower() != "flowed":
        return text
    return re.sub(r"(?m)^(?!-- $|>)([^\n]*) \n(?!>|-- $|\n)", r"\1 ", text)


def _threads(mails: Sequence[_Mail]) -> Iterable[list[_Mail]]:
    """Return the threads: mails that refer to each other, or else share subject and people."""
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


_BLOCKS = {"p", "div", "br", "li", "tr", "ul", "ol", "table", "blockquote", "pre", "hr"}
_BLOCKS |= {f"h{level}" for level in range(1, 7)}
_UNSEEN = {"script", "style", "head", "title"}
_LONGEST = 500  # characters of a line that may introduce a quotation
_HTML = 1 << 18  # characters of HTML that are read; nobody writes more into a mail

_SIGNATURE = ("-- ", "--")
# which phones and Outlook write without a line of two hyphens
_SENT_FROM = re.compile(
    r"(?:Sent from (?:my|Outlook|Mail|Yahoo)|Get Outlook for|Von meine[mr] .{1,30} gesendet|"
    r"Gesendet von|Envoyé de(?:puis)? mon|Enviado d[eo] (?:mi|meu)|Inviato da|Verzonden van).{0,40}"
)
# `---- Forwarded message ----`, and the line that Outlook draws
_RULE = re.compile(r"\s{0,9}(?:-{3,12} ?[^-\n]{4,60} ?-{3,12}|_{20,80})\s{0,9}")
_FIELD = re.compile(r"\*?[^\W\d_][\w ]{1,20}\s?:\*? ")
_SENT = re.compile(r"\*?(?:Sent|Date|Gesendet|Datum|Envoyé|Enviado|Fecha|Inviato|Data)\s?:\*? ")
_WROTE = re.compile(
    r"(?=.*\d)(?:On|Am|Le|El|Il|Em|Op|Den|W dniu|Dne) .*"
    r"(?:wrote|schrieb.*|écrit|escribió|scritto|escreveu|schreef.*|skrev.*|napisał.*|napsal.*)\s?:"
)
_YEAR_OR_ADDRESS = re.compile(r"(?:19|20)\d\d|@")


def written_here(text: str) -> str:
    """Return the lines of a mail that its sender wrote, without quotations and signature."""
    lines = re.sub("(?m)^>From ", "From ", text).split("\n")  # as mbox files escape it
    kept: list[str] = []
    number = 0
    while number < len(lines) and not _ends(lines, number):
        if lines[number].startswith(">"):
            if not lines[number - 1].startswith(">"):
                _remove_introduction(kept)
        elif length := _introduction(lines, number):
            number += length
            behind = (lines[i] for i in range(number, len(lines)))
            following = next((line for line in behind if line.strip()), "")
            if not following.startswith(">"):  # all behind it is quoted
                break
            continue
        else:
            kept.append(lines[number].rstrip())
        number += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _ends(lines: Sequence[str], number: int) -> bool:
    """Whether the sender's text ends before a line: at a signature or another mail's header."""
    line, following = lines[number], lines[number + 1 : number + 5]
    if line in _SIGNATURE or _SENT_FROM.fullmatch(line.strip()):
        return True
    if _RULE.fullmatch(line):
        return sum(bool(_FIELD.match(other)) for other in following) > 1
    return bool(_FIELD.match(line)) and any(map(_SENT.match, following[:3]))


def _introduction(lines: Sequence[str], number: int) -> int:
    """Return how many lines from here on introduce a quotation: `On 12 May Ben wrote:`."""
    for length in (1, 2, 3):
        joined = " ".join(lines[number : number + length]).strip()
        if len(joined) <= _LONGEST and joined.endswith(":") and _WROTE.fullmatch(joined):
            return length
    return 0


def _remove_introduction(kept: list[str]) -> None:
    """Remove the line that introduces a quotation, in any language."""
    for last in range(len(kept) - 1, max(len(kept) - 4, -1), -1):
        if kept[last]:
            if kept[last].endswith(":") and _YEAR_OR_ADDRESS.search(kept[last]):
                del kept[last:]
            return


class _Stripper(HTMLParser):
    """Collect the text of HTML; quoted lines begin with `> ` as in plain text."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = ["\n"]
        self.quoted = self.unseen = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n")
        self.quoted += tag == "blockquote"
        self.unseen = 0 if tag == "body" else self.unseen + (tag in _UNSEEN)

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n")
        self.quoted = max(self.quoted - (tag == "blockquote"), 0)
        self.unseen = max(self.unseen - (tag in _UNSEEN), 0)

    def handle_data(self, data: str) -> None:
        begins = self.pieces[-1] == "\n"
        text = re.sub(r"\s+", " ", data)
        text = text.lstrip() if begins else text
        if text and not self.unseen:
            self.pieces.append("> " * (begins and self.quoted > 0) + text)


def text_of_html(html: str) -> str:
    """Return the text of HTML, one line for each block."""
    stripper = _Stripper()
    stripper.feed(html[:_HTML])
    stripper.close()
    return "".join(stripper.pieces)
