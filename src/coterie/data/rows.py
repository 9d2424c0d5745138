"""Rows of tables in files, read without guessing: JSON lines, JSON, CSV, TSV and Parquet."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.core.foreign import opened as opened_binary
from coterie.core.foreign import path_of, unique
from coterie.core.importing import require
from coterie.data.plain_text import empty, opened, read_text
from coterie.data.refusals import SHOWN, Refusals
from coterie.data.values import text_mistake, uncolumned

CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
JSON = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
ENDINGS = (*JSON, *CSV, ".parquet")

Row = tuple[str, Mapping[str, Any]]  # with its file and number

CHATS = frozenset({"messages", "conversations", "completion"})  # columns of conversations
LIKE_CHATS = " These look like conversations: --set data.content=chats."

_SHORT = 64  # characters of a value that is remembered
_MOST_VALUES = 1000  # that are remembered of a column
_LONGEST_FIELD = 2**31 - 1  # characters: what csv takes on every machine
_QUOTED = re.compile(r'"[^"]*"')
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # a line of Excel's
_QUOTING = (
    "Put the text between double quotes, and double those that are in it, as every program that "
    "writes CSV does; or use JSON lines (.jsonl)."
)


def rows_of(paths: Iterable[Path]) -> Iterator[Row]:
    """Yield the rows of files, each with its file and line (of JSON lines) or number, from 1. An
    empty field of CSV is None. Raises DataError for files that are missing, damaged, ambiguous or
    of another kind.
    """
    for path in paths:
        yield from _rows(path)


def ending_of(name: str, endings: Sequence[str] = ENDINGS) -> str:
    """Return which of the endings a file's name has, in any case; "" if none."""
    return next((ending for ending in endings if name.lower().endswith(ending)), "")


def _rows(path: Path) -> Iterator[Row]:
    match ending_of(path.name).removesuffix(".gz"):
        case ".jsonl":
            return _stripped(json_lines(path))
        case ".json":
            return _stripped(_json(path))
        case ".csv":
            return _csv(path)
        case ".tsv":
            return _csv(path, "\t")
        case ".parquet":
            return _stripped(_numbered(path, parquet_rows(path)))
    problem = f"{path}: files of this kind cannot be read"
    raise DataError(problem, f"Files end in {', '.join(ENDINGS)}.")


def _stripped(rows: Iterable[Row]) -> Iterator[Row]:
    for where, row in rows:
        plain = {name.strip("\ufeff \t\r\n"): value for name, value in row.items()}
        if len(plain) < len(row):
            raise DataError(f"{where}: two columns differ only in white space", "Rename one.")
        yield where, plain


def _numbered(path: Path, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


# NaN is no JSON, but what pandas and Python write for a missing value
_JSON = json.JSONDecoder(
    object_pairs_hook=unique, parse_constant=lambda name: None if name == "NaN" else float(name)
)


def json_lines(path: Path, columns: Mapping[str, type] | None = None) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file, each with its file and line; blank lines are skipped.
    `columns` maps the columns to return to their types; None: all. Raises DataError as
    `plain_text.read_text`, for lines that are not JSON objects, and for missing or mistyped
    columns; no row after the first mistake is yielded.
    """
    mistakes: list[str] = []
    blank, chats = True, False
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            blank = False
            row, mistake = _parsed(line, columns)
            if mistake:
                mistakes.append(f"{path}:{number}: {mistake}")
                chats |= not CHATS.isdisjoint(row)
            elif not mistakes:
                yield f"{path}:{number}", row
    if blank:
        raise empty(path)
    if mistakes:
        raise _mistaken(path, mistakes, columns or {}, chats)


def _mistaken(
    path: Path, mistakes: list[str], columns: Mapping[str, type], chats: bool
) -> DataError:
    more = len(mistakes) - SHOWN
    last = [f"... and {more:,} more lines of {path}"] if more > 0 else []
    described = " and ".join(f"{name!r} ({kind.__name__})" for name, kind in columns.items())
    return DataError(
        "\n".join(mistakes[:SHOWN] + last),
        f"Every line must be a JSON object{f' with {described}' if described else ''}."
        f"{LIKE_CHATS if chats else ''}",
    )


def _parsed(line: str, columns: Mapping[str, type] | None) -> tuple[dict[str, Any], str]:
    try:
        row = _JSON.decode(line)
    except (ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits, too
        return {}, f"not JSON ({error})"
    if not isinstance(row, dict):
        return {}, f"found {type(row).__name__}, expected a JSON object"
    return (row, "") if columns is None else _chosen(row, columns)


def _chosen(row: dict[str, Any], columns: Mapping[str, type]) -> tuple[dict[str, Any], str]:
    """Return the chosen columns of a row; or the whole row and its mistake."""
    for name, kind in columns.items():
        if name not in row:
            return row, f"no column {name!r} (found: {', '.join(row) or 'none'})"
        if not isinstance(row[name], kind):
            return row, f"column {name!r} is {type(row[name]).__name__}, expected {kind.__name__}"
        if kind is str and (mistake := text_mistake(row[name])):
            return row, f"column {name!r} {mistake}"
    return {name: row[name] for name in columns}, ""


def _json(path: Path) -> Iterator[Row]:
    """Yield the objects of a list, or of JSON lines in a .json file."""
    with opened(path) as file:
        first = list(islice((line for line in file if not line.isspace()), 2))
    if not first:
        raise empty(path)
    if first[0].lstrip().startswith("["):
        return _numbered(path, _listed(path))
    if len(first) == 1 or _parsed(first[0], None)[1]:
        raise DataError(f"{path}: not a list of objects", "Use a list, or JSON lines (.jsonl).")
    return json_lines(path)


def _listed(path: Path) -> list[Mapping[str, Any]]:
    try:
        rows = _JSON.decode(read_text(path))
    except (ValueError, RecursionError) as error:
        problem = f"{path}: not JSON ({error})"
        raise DataError(problem, "Repair it, or use JSON lines (.jsonl).") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            problem = f"{path}, row {number}: {type(row).__name__}, not a JSON object"
            raise DataError(problem, "Use a list of objects, or JSON lines (.jsonl).")
    return list(rows)


def _csv(path: Path, delimiter: str = "") -> Iterator[Row]:
    """Yield the rows of CSV by RFC 4180: fields with commas, quotes or line ends are quoted."""
    csv.field_size_limit(_LONGEST_FIELD)
    with opened(path, newline="") as file:  # line ends in quotes stay as they are
        before, first = next(((n, line) for n, line in enumerate(file) if line.strip()), (0, ""))
        if not first:
            raise empty(path)
        if named := _SEPARATOR.fullmatch(first):
            yield from _fields(path, file, named[1], before + 1)
        else:
            delimiter = delimiter or _delimiter(path, first)
            yield from _fields(path, chain([first], file), delimiter, before)


def _delimiter(path: Path, header: str) -> str:
    counts = Counter(c for c in _QUOTED.sub("", header) if c in ",;\t").most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        problem = f"{path}: its header could be separated by {counts[0][0]!r} or {counts[1][0]!r}"
        raise DataError(problem, "Put names that have one of them between double quotes.")
    return counts[0][0] if counts else ","


def _fields(path: Path, lines: Iterable[str], delimiter: str, before: int) -> Iterator[Row]:
    """Yield the rows in lines that follow `before` others, up to the first mistake."""
    raw: list[str] = []  # the lines of the row that is read
    reader = csv.reader(_remembered(lines, raw), delimiter=delimiter, strict=True)
    names: list[str] = []
    number, line = 0, before + 1
    seen = _Seen(delimiter)
    with Refusals(SHOWN) as refusals:

        def place() -> str:
            return f"{f'row {number}' if names else 'header'} (line {line})"

        def refuse(mistake: str) -> None:
            refusals.add(f"{path}, {place()}: {mistake}", _QUOTING)

        try:
            for fields in reader:
                if any(map(str.strip, raw)):
                    if mistake := _mistake(fields, len(names or fields), raw, delimiter):
                        refuse(mistake)
                    elif not names:
                        names = column_names(path, fields)
                    elif not refusals.errors:
                        seen.add(place, fields, raw)
                        pairs = zip(names, fields, strict=True)
                        yield f"{path}, row {number}", {n: v or None for n, v in pairs if n}
                    number += 1
                line = before + reader.line_num + 1
                raw.clear()
        except csv.Error as error:
            refuse(
                "a quote is opened and never closed"
                if "unexpected end" in str(error)
                else "text behind a closing quote; a quote within quotes must be doubled"
            )
        for row in seen.several_rows():
            mistake = "its quote ends rows later: each line in it is as a row"
            refusals.add(f"{path}, {row}: {mistake}", _QUOTING)


class _Seen:
    """The short values of each column, to detect a quote that a later row closed by chance: each
    line inside it looks like a row with a value that its column has elsewhere. (If all rows begin
    with a quote, such a line would have closed it, so no row can be hidden.)
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self._columns: list[set[str]] = []
        self._suspects: list[tuple[str, list[str]]] = []
        self._quoted = True  # all rows begin with a quote

    def add(self, where: Callable[[], str], fields: list[str], raw: list[str]) -> None:
        """Remember the values of a row."""
        self._columns = self._columns or [set() for _ in fields]
        self._quoted = self._quoted and raw[0].startswith('"')
        for values, value in zip(self._columns, fields, strict=True):
            if len(values) < _MOST_VALUES and 0 < len(value) <= _SHORT:
                values.add(value)
        lines, between = raw[1:], len(fields) - 1
        if lines and between and all(line.count(self._delimiter) == between for line in lines):
            self._suspects.append((where(), lines))

    def several_rows(self) -> list[str]:
        """Return the locations of rows that hide several rows, after all have been added."""

        def is_row(line: str) -> bool:
            parts = line.rstrip("\r\n").split(self._delimiter)
            return any(part in values for part, values in zip(parts, self._columns, strict=True))

        suspects = () if self._quoted else self._suspects
        return [row for row, lines in suspects if all(map(is_row, lines))]


def _remembered(lines: Iterable[str], memory: list[str]) -> Iterator[str]:
    for line in lines:
        memory.append(line)
        yield line


def column_names(table: Path | str, header: Sequence[Any]) -> list[str]:
    """Return the names of columns; "" for an unnamed one, as pandas writes its index. Raises
    DataError for a name that occurs twice.
    """
    names = [str(name).strip() for name in header]
    if doubled := [name for name, count in Counter(names).items() if name and count > 1]:
        problem = f"{table}: several columns are called {', '.join(map(repr, doubled))}"
        raise DataError(problem, "Rename them.")
    return names


def _mistake(fields: list[str], width: int, raw: list[str], delimiter: str) -> str:
    """Return the mistake of a row; "" if it has none."""
    if len(fields) != width:
        return f"{len(fields)} fields, but the header has {width}"
    if any(line.startswith(' "') or f'{delimiter} "' in line for line in raw):  # maybe in quotes
        lenient = next(csv.reader(raw, delimiter=delimiter, skipinitialspace=True))
        if [field.lstrip(" ") for field in fields] != [field.lstrip(" ") for field in lenient]:
            return "a space before an opening quote"
    return ""


def parquet_rows(
    path: Path, columns: Sequence[str] | None = None, extra: str = "hub"
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a Parquet file with these columns, or all. Raises DataError: it cannot be
    read, or lacks a column; Refused without the `extra` that reads it.
    """
    require(f"{path}: a parquet file", extra, "pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with opened_binary(path) as binary, parquet.ParquetFile(path_of(binary, path)) as file:
            names = column_names(path, file.schema_arrow.names)
            if missing := [name for name in columns or () if name not in names]:
                problem = f"{path}: no column {', '.join(map(repr, missing))}"
                raise DataError(problem, f"Give a file that has {' and '.join(columns or ())}.")
            for batch in file.iter_batches(columns=columns):
                yield from map(uncolumned, batch.to_pylist())
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: text that is not UTF-8
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: cannot be read ({reason})", "Write it again.") from None
