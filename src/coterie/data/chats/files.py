"""Rows of files: JSON lines, JSON, Parquet and CSV."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.core.extras import require
from coterie.data.documents import read_objects, read_text

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")

Row = tuple[str, Mapping[str, Any]]  # with its file and number


def rows_of(paths: Iterable[Path]) -> Iterator[Row]:
    """Yield the rows of files, each with where it stands: the line of JSON lines, else the row,
    from 1.

    Raises:
        DataError: A file is missing, damaged, or of another kind.
    """
    for path in paths:
        yield from _rows(path)


def _rows(path: Path) -> Iterator[Row]:
    if ".jsonl" in path.suffixes:
        yield from read_objects(path)
    elif path.suffix == ".json":
        yield from _numbered(path, _list_of_objects(path))
    elif path.suffix == ".csv":
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        reader = csv.DictReader(io.StringIO(read_text(path)))
        yield from _numbered(path, ({k: v or None for k, v in row.items() if k} for row in reader))
    elif path.suffix == ".parquet":
        yield from _numbered(path, _parquet(path))
    else:
        raise DataError(
            f"{path}: files of this kind cannot be read", f"Files end in {', '.join(ENDINGS)}."
        )


def _numbered(path: Path, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _list_of_objects(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not JSON ({error})", "Repair it, or use JSON lines (.jsonl)."
        ) from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise DataError(f"{path}: not a list of objects", "Use a list, or JSON lines (.jsonl).")
    return found


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    require(f"{path}: a parquet file", "hub", "pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error).splitlines()[0]})", "Write it again."
        ) from None
    for batch in table.to_batches():
        yield from batch.to_pylist()
