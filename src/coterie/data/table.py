"""One table with the rows of all clients: in a file, or in memory."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from coterie.core.errors import DataError
from coterie.core.files import writing
from coterie.data.by_client import ByClient
from coterie.data.refusals import outward_links
from coterie.data.rows import ENDINGS, rows_of
from coterie.data.section import Source, stamps
from coterie.data.store import NO_SPACE, default_cache
from coterie.data.values import class_names, plain, uncolumned


class Table(ByClient):
    """One table, of which a column names each row's client: *.csv, *.tsv, *.jsonl, *.json (also
    with .gz behind it) or *.parquet.

    From Python it can be in memory: `coterie.run("table", data={"table": rows, ...})` with a
    `datasets.Dataset`, a pandas data frame, a dict of lists or a list of dicts, which is written to
    the cache.

    Client ids are the column's values without white space around them; what no name may have is
    replaced by `-`. Rows without a value or without text are left out, and counted. With
    `content: chats` every row is a conversation.
    """

    kind: Literal["table"] = "table"
    path: Path | None = None  # file with the table; required
    client_column: str = Field("client", min_length=1)  # column that names the row's client

    @property
    def title(self) -> str:
        name = self.path.name if self.path is not None else "a table"
        return f"{name} by {self.client_column}"

    def source(self) -> Source:
        remedy = f"Name a file that ends in {', '.join(ENDINGS)}: --set data.path=FILE."
        if self.path is None:
            raise DataError("data.path is missing", remedy)
        path = self.path.expanduser()
        if not path.is_file():
            problem = f"data.path: {path} {'is not a file' if path.exists() else 'does not exist'}"
            raise DataError(problem, remedy)
        notes: list[str] = []
        return Source(
            [stamps([path])],
            lambda: self.by_client(rows_of([path]), str(path), notes),
            notes=notes,
            links=outward_links(path.parent, [path]),
        )


def in_memory(data: Any) -> Any:
    """Return a `data` section or its fields with an in-memory table, the value itself or its
    `table`, replaced by a file in the cache. Raises DataError for no table, SaveError.
    """
    if isinstance(data, Mapping) and "table" in data:
        fields = {name: value for name, value in data.items() if name != "table"}
        return {"kind": "table", "path": str(_kept(_rows(data["table"])))} | fields
    if _is_table(data):
        return {"kind": "table", "path": str(_kept(_rows(data)))}
    return data


def _is_table(data: Any) -> bool:
    """Whether a value is a table rather than a section's fields, which have a kind or a path."""
    if isinstance(data, Mapping):
        columns = list(data.values())
        return len(columns) > 1 and all(
            isinstance(column, list | tuple) or hasattr(column, "tolist") for column in columns
        )
    return hasattr(data, "column_names") or hasattr(data, "to_dict") or isinstance(data, list)


def _rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table as Python values; missing ones are None."""
    if hasattr(table, "features") and hasattr(table, "column_names"):  # a datasets.Dataset
        table = list(class_names(table, table.features))
    elif hasattr(table, "to_pylist"):  # of pyarrow
        table = list(map(uncolumned, table.to_pylist()))
    elif hasattr(table, "to_dict") and hasattr(table, "columns"):  # a data frame
        _check_names(list(table.columns))
        table = {name: table[name] for name in table.columns}
    if isinstance(table, Mapping):
        _check_names(list(table))
        table = _zipped({_name(name): plain(column) for name, column in table.items()})
    if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
        return [{_name(name): plain(value) for name, value in row.items()} for row in table]
    remedy = "Give a datasets.Dataset, a data frame, a dict of lists or a list of dicts."
    raise DataError(f"{type(table).__name__} is no table", remedy)


def _name(column: Any) -> str:
    return str(column).strip()


def _check_names(columns: Sequence[Any]) -> None:
    counts = Counter(map(_name, columns))
    if doubled := [name for name, count in counts.items() if count > 1]:
        problem = f"several columns of the table are called {', '.join(map(repr, doubled))}"
        raise DataError(problem, "Rename them.")


def _zipped(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the rows of columns. Raises DataError for different lengths."""
    if len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{name} {len(column):,}" for name, column in columns.items())
        problem = f"the columns of the table have unlike lengths: {sizes}"
        raise DataError(problem, "Give all as many rows.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _kept(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines to the cache, named by their content. Raises SaveError."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="surrogatepass")
    folder = default_cache() / "tables"
    path = folder / f"{blake2b(text, digest_size=12).hexdigest()}.jsonl"
    if path.is_file() and path.read_bytes() == text:
        return path
    with writing(f"the table to {folder}", NO_SPACE):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    return path
