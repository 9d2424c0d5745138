"""Documents read from text files and tables, and cut into chunks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.data.plain_text import read_text
from coterie.data.refusals import SHOWN, LeftOut, Refusals
from coterie.data.rows import CHATS, LIKE_CHATS, ending_of, json_lines, rows_of
from coterie.data.splitting import LocatedText
from coterie.data.values import text_of

CHUNK = 2000  # characters
PLAIN = (".txt", ".text", ".md", ".markdown")  # endings of files that are one document each

Row = dict[str, Any]

# Where text may be cut, best first: before a blank line, behind a line, behind a space.
_BOUNDARIES = tuple(map(re.compile, (r"(?<=\n)(?=[^\S\n]*\n)", r"(?<=\n)", r"(?<=\s)")))


def read_rows(path: Path, columns: Mapping[str, type]) -> list[Row]:
    """Return these columns of a JSON-lines file; see `json_lines`."""
    return [dict(row) for _, row in json_lines(path, columns)]


def read_many(paths: Iterable[Path], text_column: str, left_out: LeftOut) -> list[str]:
    """Return the texts of several files: one per text file, one per row of a table. Raises
    DataError with all mistakes.
    """
    texts: list[str] = []
    with Refusals(alike=True) as refusals:
        for path in paths:
            with refusals.gather():
                table = ending_of(path.name)
                texts += _texts(path, text_column, left_out) if table else _text(path)
    return texts


def _text(path: Path) -> list[str]:
    return [LocatedText.at(str(path), read_text(path))]


def _texts(path: Path, column: str, left_out: LeftOut) -> Iterator[str]:
    with Refusals(SHOWN, alike=True) as refusals, refusals.gather():
        for where, row in rows_of([path]):
            with refusals.gather():
                if column not in row:
                    raise DataError(
                        f"{where}: no column {column!r} (found: {', '.join(row) or 'none'})",
                        f"Every row must have its text in {column!r}; data.text_column names it."
                        f"{'' if CHATS.isdisjoint(row) else LIKE_CHATS}",
                    )
                if text := text_of(row[column], where, column):
                    yield LocatedText.at(where, text)
                else:
                    left_out.add("text", where)


def cut(
    text: str, size: int = CHUNK, boundaries: Sequence[re.Pattern[str]] = _BOUNDARIES
) -> list[str]:
    """Cut a text at blank lines, if any, into chunks of about (at most twice) `size` characters."""
    if not boundaries:
        return [text[start : start + size] for start in range(0, len(text), size)]
    chunks, current = [], ""
    for piece in boundaries[0].split(text):
        if current and len(current) + len(piece) > size:
            chunks.append(current)
            current = ""
        if len(piece) > 2 * size:
            chunks += cut(piece, size, boundaries[1:])
        else:
            current += piece
    return [*chunks, current] if current else chunks
