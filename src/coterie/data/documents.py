"""Documents: read from text files and JSON lines, and cut into chunks."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.data.refusals import Refusals

CHUNK = 2000  # characters

Row = dict[str, Any]

_PLAIN, _RATIO = (
    64 << 20,
    100,
    # bytes that any gzip file may become, and how many times its size; text is a tenth or a fifth
    # of itself
)
SHOWN = 5  # mistakes of one file that a message lists

# Where text may be cut, best first: before a blank line, behind a line, behind a space.
_BOUNDARIES = tuple(map(re.compile, (r"(?<=\n)(?=[^\S\n]*\n)", r"(?<=\n)", r"(?<=\s)")))


def read_text(path: Path) -> str:
    r"""Return the text of a UTF-8 file, gzipped if it ends in .gz, with \n line ends.

    Raises:
        DataError: It is missing, unreadable, empty or not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise DataError(
            f"{path}: not a regular file", "Remove it, or put a text file in its place."
        )
    try:
        data = decompressed(path) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: damaged gzip file ({error})", "Copy or download it again."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror})", "Check the path and its permissions."
        ) from None
    if not data.strip():
        raise DataError(f"{path}: the file is empty", "Put text into it, or remove it.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 text", "Convert it: iconv -f latin1 -t utf-8 OLD > NEW."
        ) from None


def decompressed(path: Path) -> bytes:
    """Return the content of a gzip file.

    Raises:
        DataError: It would expand so much that it cannot be data: a few kilobytes can expand to any
            number of gigabytes.
        OSError: It cannot be read, or is damaged; or EOFError, zlib.error.
    """
    most = max(_PLAIN, _RATIO * path.stat().st_size)
    with gzip.open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(
            f"{path}: its {path.stat().st_size:,} bytes would expand to more than {most:,}",
            "Text does not compress like that: leave the file out.",
        )
    return data


def read_rows(path: Path, columns: Mapping[str, type]) -> list[Row]:
    """Return the rows of a JSON-lines file, with the columns asked for; blank lines are skipped.

    Raises:
        DataError: As `read_text`, or lines that are not JSON objects or lack a column of its type;
            each by file and line.
    """
    return [row for _, row in read_objects(path, columns)]


def read_objects(path: Path, columns: Mapping[str, type] | None = None) -> list[tuple[str, Row]]:
    """Return the objects of a JSON-lines file, each with its file and line; blank lines are
    skipped.

    Args:
        path: The file.
        columns: Which of their columns, and the types of these; None: all.

    Raises:
        DataError: As `read_rows`.
    """
    rows: list[tuple[str, Row]] = []
    mistakes: list[str] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        row, mistake = _parse(line, columns)
        rows.append((f"{path}:{number}", row))
        if mistake:
            mistakes.append(f"{path}:{number}: {mistake}")
    if mistakes:
        more = (
            [f"... and {len(mistakes) - SHOWN:,} more lines of {path}"]
            if len(mistakes) > SHOWN
            else []
        )
        described = " and ".join(
            f"{name!r} ({kind.__name__})" for name, kind in (columns or {}).items()
        )
        raise DataError(
            "\n".join(mistakes[:SHOWN] + more),
            f"Every line must be a JSON object{f' with {described}' if described else ''}."
            f"{_CHATS if _look_like_chats(rows) else ''}",
        )
    return rows


def _parse(line: str, columns: Mapping[str, type] | None) -> tuple[Row, str]:
    """Return the row of a line, and what is wrong with it, if anything."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits, too
        return {}, f"not JSON ({error})"
    if not isinstance(row, dict):
        return {}, f"found {type(row).__name__}, expected a JSON object"
    return (row, "") if columns is None else _chosen(row, columns)


def _chosen(row: Row, columns: Mapping[str, type]) -> tuple[Row, str]:
    """Return the columns that are asked for, and what is wrong with them; then the whole row."""
    for name, kind in columns.items():
        if name not in row:
            return row, f"no column {name!r} (found: {', '.join(row) or 'none'})"
        if not isinstance(row[name], kind):
            return row, f"column {name!r} is {type(row[name]).__name__}, expected {kind.__name__}"
        if kind is str and not _encodable(row[name]):
            return row, f"column {name!r} is not valid text (half of a surrogate pair)"
    return {name: row[name] for name in columns}, ""


_CHATS = " These look like conversations: --set data.content=chats."


def _look_like_chats(rows: Iterable[tuple[str, Row]]) -> bool:
    """Whether rows have a column of conversations."""
    return any({"messages", "conversations", "completion"} & row.keys() for _, row in rows)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_many(paths: Iterable[Path], text_column: str) -> list[str]:
    """Return the texts of several files: one of each text file, one of each line of JSON-lines
    files.

    Raises:
        DataError: All that is wrong with any of them.
    """
    texts: list[str] = []
    with Refusals() as refusals:
        for path in paths:
            with refusals.gather():
                is_rows = ".jsonl" in path.suffixes
                texts += (
                    [row[text_column] for row in read_rows(path, {text_column: str})]
                    if is_rows
                    else [read_text(path)]
                )
    return texts


def cut(
    text: str, size: int = CHUNK, boundaries: Sequence[re.Pattern[str]] = _BOUNDARIES
) -> list[str]:
    """Consecutive chunks of about `size` characters (at most twice that), cut at blank lines
    where there are any; nothing is lost.
    """
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
