"""WhatsApp's export of a chat: a `.txt` file of Android or iPhone, in any language."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from coterie.core.foreign import read_text as core_text
from coterie.data.archives.conversations import Chat, Post, damaged, plain_name
from coterie.data.plain_text import read_text

TITLE = "WhatsApp's export"
_OMITTED = "\u200e"  # begins what an iPhone writes in place of pictures, and lines of the program
_MARK = r"[\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]{0,4}"
_SPACE = r"[ \u00a0\u202f]?"
_WORD = r"(?:[^\W\d_]{1,6}\.?[ \u00a0\u202f]?){0,2}"  # PM, p. m., 오후
# day, month and year in any order, and the time: 12.05.24, 14:32 or 5/12/24, 2:32:07 PM
_TIME = (
    rf"{_MARK}(\d{{1,4}})[./年-]{_SPACE}(\d{{1,2}})[./月-]{_SPACE}(\d{{1,4}})"
    rf"(?:[.日]| ?\u0433\.)?{_MARK}[,،]?{_SPACE}"  # a Bulgarian year has a letter behind it
    rf"({_WORD})(\d{{1,2}})(?:[:.]| ?h ?)(\d{{2}})(?:[:.](\d{{2}}))?{_SPACE}({_WORD})"
)
_HEADER = re.compile(rf"{_MARK}(?:\[{_TIME}{_MARK}\] ?|{_TIME}{_MARK}(?: ?[-\u2013]|:) ){_MARK}")
# Quotation marks in pairs without a colon: `Ann changed it to "Trip: Rome"` is the program's
_QUOTED = r'"[^":\n]{1,40}"|“[^”:\n]{1,40}”|„[^“”:\n]{1,40}[“”]|«[^»:\n]{1,40}»'
_SPEAKER = re.compile(rf'((?:[^:"“”«»„\n]|{_QUOTED}){{1,100}}):(?: |$)')

_PM = {"pm", "μμ", "오후", "午後", "下午", "晚上", "中午", "م", "ch", "tgh", "ptg", "mlm"}
_PM |= {"datarde", "danoite"}
_AM = {"am", "πμ", "오전", "午前", "上午", "早上", "凌晨", "ص", "sa", "pg", "damanhã"}
_ORDERS = ((2, 1, 0), (2, 0, 1), (0, 1, 2), (0, 2, 1))  # where year, month and day are
# What stands in place of a picture or of a message taken back, where no mark says so
_PHRASES = core_text(Path(__file__).with_name("whatsapp_absent.txt")).splitlines()
_ABSENT = re.compile("|".join(_PHRASES), re.IGNORECASE)
_ADDED = re.compile(  # to what was written: that it was edited, or the name of a picture
    r" ?\u200e<[^<>\n]{1,80}>| ?<[^<>\n]{0,40}(?:edit|bearbeit|modif)[^<>\n]{0,20}>$"
)
_WRAPPING = re.compile(r"[\u200e\u2066-\u2069]")  # around names that are mentioned


class _Line(NamedTuple):
    """The first line of a message or notice."""

    number: int
    date: tuple[int, int, int]  # in the order of the file
    seconds: int  # of the day
    rest: str


def recognises(beginning: str) -> bool:
    """Whether a text that begins like this is such an export."""
    lines = beginning.lstrip().splitlines()
    headers = [_HEADER.match(line) for line in lines[:100]]
    return bool(headers and headers[0]) and any(
        header and _SPEAKER.match(line, header.end())
        for header, line in zip(headers, lines, strict=False)
    )


def chats(path: Path) -> Iterator[Chat]:
    """Yield the chat of an export. Raises DataError."""
    entries = list(_entries(path))
    days = _days(path, [line for line, _ in entries])
    posts = []
    for (line, more), day in zip(entries, days, strict=True):
        speaker = _SPEAKER.match(line.rest)
        if speaker is None:  # a notice: who joined, or that all is encrypted
            continue
        if text := _text([line.rest[speaker.end() :], *more]):
            name, time = plain_name(speaker[1]), day * 86400.0 + line.seconds
            posts.append(Post(f"{path}:{line.number}", name, text, time))
    yield Chat(posts)


def _entries(path: Path) -> Iterator[tuple[_Line, list[str]]]:
    current: tuple[_Line, list[str]] | None = None
    for number, text in enumerate(read_text(path).split("\n"), start=1):
        if header := _HEADER.match(text):
            if current:
                yield current
            current = _line(path, number, header), []
        elif current:
            current[1].append(text)
    if current:
        yield current


def _line(path: Path, number: int, header: re.Match[str]) -> _Line:
    groups = header.groups()
    fields = groups[:8] if groups[0] else groups[8:]
    first, second, third, before, hour, minute, second_of, behind = fields
    word = re.sub(r"[\W\d_]", "", f"{before}{behind}").casefold()
    hours = int(hour) % 12 + 12 * (word in _PM) if word in _PM | _AM else int(hour)
    if hours > 23 or int(minute) > 59:
        raise damaged(f"{path}:{number}", f"{hour}:{minute} is no time")
    seconds = 3600 * hours + 60 * int(minute) + int(second_of or 0)
    rest = header.string[header.end() :]
    return _Line(number, (int(first), int(second), int(third)), seconds, rest)


def _days(path: Path, lines: Sequence[_Line]) -> list[int]:
    """Return the days of all lines, read in the order of day, month and year that fits all and goes
    back in time least often; of several such orders, the one with the shortest chat.
    """
    readings = list[list[int]]()
    for order in _ORDERS:
        days = (_day(line.date, order) for line in lines)
        readings.append([day for day in takewhile(lambda day: day is not None, days) if day])
    if not (whole := [days for days in readings if len(days) == len(lines)]):
        failed = lines[max(map(len, readings))]
        date = "/".join(map(str, failed.date))
        raise damaged(f"{path}:{failed.number}", f"{date} is no date like those before")
    backwards = [sum(b < a for a, b in pairwise(days)) for days in whole]
    lasting = [days[-1] - days[0] if days else 0 for days in whole]
    return min(zip(backwards, lasting, whole, strict=True), key=lambda one: one[:2])[2]


def _day(fields: tuple[int, int, int], order: tuple[int, int, int]) -> int | None:
    year, month, day = (fields[place] for place in order)
    try:
        return datetime(year + 2000 if year < 100 else year, month, day).toordinal()
    except ValueError:
        return None


def _text(lines: Sequence[str]) -> str:
    """Return what a person wrote, without placeholders for media; "" if nothing is left."""
    lines = [_ADDED.sub("", line) for line in lines]
    kept = [line for line in lines if not line.startswith(_OMITTED) and not _ABSENT.fullmatch(line)]
    return _WRAPPING.sub("", "\n".join(kept)).strip()
