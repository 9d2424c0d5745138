"""Sections with a column that names each row's client: the handling of small clients, and one table
with the rows of all, in a file or in memory.
"""

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.files import writing
from coterie.core.protocol import ClientId
from coterie.data.chats.encoding import few, merged_notes
from coterie.data.chats.fields import ChatFields
from coterie.data.chats.reading import BESIDE, COLUMNS
from coterie.data.refusals import SHOWN, LeftOut, Refusals, outward_links
from coterie.data.rows import ENDINGS, Row, column_names, rows_of
from coterie.data.section import Bound, Names, Source, TextFractions, Texts, choose, stamps
from coterie.data.splits import SPLITS, Tokens
from coterie.data.splitting import Document, LocatedText, split_clients
from coterie.data.store import NO_SPACE, default_cache
from coterie.data.values import class_names, client_name, plain, text_of, uncolumned

Arrays = Mapping[ClientId, Mapping[str, Tokens]]

OTHERS = "others"  # the client that those with too little are merged into


class ByClient(ChatFields):
    """A section of rows, each with the name of its client in a column."""

    text_column: str = Field("text", min_length=1)  # column with the text
    client_column: str = Field(min_length=1)  # column that names the row's client
    clients: Names | None = None  # values of the client column; null: those with the most documents
    max_clients: int | None = Field(None, ge=1)  # most clients, if `clients` is null; null: all
    # what is done with clients that have less than a window of text, or no conversation, for one of
    # their splits: merge makes them one client, `others`
    small_clients: Literal["refuse", "leave-out", "merge"] = "refuse"
    # training tokens below which a client counts as small, too; null: none
    least_tokens: Bound | None = None
    fractions: TextFractions = (0.8, 0.1, 0.1)

    @model_validator(mode="after")
    def _without_archives(self) -> Self:
        if self.me is not None:
            raise ValueError("me: for people's archives in folders alone (data.kind: folders)")
        return self

    def columns(self, available: Sequence[str]) -> Sequence[str]:
        """Return the columns that hold text or conversations."""
        if self.content == "text":
            return (self.text_column,)
        if self.chat_column is not None:
            return (self.chat_column, *(name for name in BESIDE if name in available))
        return [name for name in COLUMNS if name in available] or COLUMNS[:1]

    def by_client(self, rows: Iterable[Row], where: str, notes: list[str]) -> Texts:
        """Return the documents of each client in splits, from rows that have a client and text.
        `notes` get a sentence for each kind of omitted row. Raises DataError for missing columns
        and invalid values.
        """
        owners, left_out = list[str](), LeftOut()
        owned = self._owned(rows, where, owners, left_out)
        chats = self.content == "chats"
        every = self.conversations(owned) if chats else list(self._texts(owned, left_out))
        notes += left_out.sentences()
        documents: dict[str, list[Document]] = {}
        for owner, document in zip(owners, every, strict=True):
            if document.text:
                documents.setdefault(owner, []).append(document)
        chosen = {client_id(name): documents[name] for name in self._choose(documents, where)}
        together = self.near_duplicates == "together"
        return split_clients(chosen, self.fractions, self.seed, together)

    def _owned(
        self, rows: Iterable[Row], where: str, owners: list[str], left_out: LeftOut
    ) -> Iterator[Row]:
        """Yield the rows that have a client, fill `owners`, and finally refuse missing columns."""
        columns: dict[str, None] = {}
        for place, row in rows:
            columns.update(dict.fromkeys(row))
            owner = client_name(row.get(self.client_column), place, self.client_column)
            if owner is None:
                left_out.add("a client", place)
            else:
                owners.append(owner)
                yield place, row
        required = [*self.columns(list(columns)), self.client_column]
        if missing := [name for name in required if name not in columns]:
            remedy = f"Choose among: {', '.join(sorted(columns)) or 'none; the table is empty'}."
            raise DataError(f"{where}: no column {', '.join(map(repr, missing))}", remedy)

    def _texts(self, rows: Iterable[Row], left_out: LeftOut) -> Iterator[Document]:
        with Refusals(SHOWN) as refusals, refusals.gather():
            for place, row in rows:
                with refusals.gather():
                    text = text_of(row.get(self.text_column), place, self.text_column)
                    if text is None:
                        left_out.add("text", place)
                    yield Document(LocatedText.at(place, text or ""), text or "")

    def _choose(self, documents: Mapping[str, Sequence[Document]], where: str) -> list[str]:
        if self.clients is not None:
            choose(documents, self.clients, "clients", f"column {self.client_column!r} of {where}")
            chosen = list(self.clients)
        else:
            by_size = sorted(documents, key=lambda name: (-len(documents[name]), name))
            chosen = by_size[: self.max_clients]
        doubled = [id for id, count in Counter(map(client_id, chosen)).items() if count > 1]
        if doubled:
            problem = f"{where}: several clients would be called {', '.join(doubled)}"
            raise DataError(problem, "Rename them, or list data.clients.")
        return chosen

    def about(self) -> dict[str, Any]:
        left = ("small_clients", "least_tokens")
        return {key: value for key, value in super().about().items() if key not in left}

    def enough(self, arrays: Arrays, context: int) -> tuple[Arrays, str]:
        small = {id: why for id, streams in arrays.items() if (why := self._lack(streams, context))}
        if not small:
            return arrays, ""
        if self.small_clients == "refuse":
            raise DataError(f"clients with too little: {_named(small)}", _REMEDY)
        large = {id: streams for id, streams in arrays.items() if id not in small}
        if self.small_clients == "leave-out":
            if not large:
                raise DataError(f"every client has too little: {_named(small)}", _REMEDY)
            return large, f"left out, with too little text: {_named(small)}"
        if OTHERS in large:
            problem = f"small clients are to be merged into {OTHERS!r}, but there is such a client"
            raise DataError(problem, "Rename it.")
        together = merged([arrays[id] for id in small])
        if why := self._lack(together, context):
            raise DataError(f"{', '.join(small)}: too little even when merged ({why})", _REMEDY)
        return {**large, OTHERS: together}, f"merged into {OTHERS!r}: {_named(small)}"

    def _lack(self, streams: Mapping[str, Tokens], context: int) -> str:
        """Return what a client has too little of; "" if it has enough."""
        if self.least_tokens is not None and len(streams["train"]) < self.least_tokens:
            return f"train has {len(streams['train']):,} of {self.least_tokens:,} tokens"
        for name in SPLITS:
            lengths = streams.get(f"{name}.lengths")  # of separate documents; running text has none
            if lengths is not None and not len(lengths):
                what = "conversation" if self.content == "chats" else "text"
                return f"{name} has no {what}: {few(streams)}"
            if lengths is None and len(streams[name]) <= context:
                return f"{name} has {len(streams[name]):,} of {context + 1:,} tokens"
        return ""


_REMEDY = (
    "Give them more, or have them left out or merged: data.small_clients: leave-out or merge; or "
    "lower data.least_tokens or model.context."
)


def _named(small: Mapping[ClientId, str]) -> str:
    shown = [f"{id} ({why})" for id, why in list(small.items())[:SHOWN]]
    return ", ".join(shown) + (f" and {len(small) - SHOWN:,} more" if len(small) > SHOWN else "")


def merged(clients: Sequence[Mapping[str, Tokens]]) -> dict[str, Tokens]:
    """Return the concatenated streams of several clients."""
    return {
        key: merged_notes([streams[key] for streams in clients])
        if key.endswith(".notes")
        else np.concatenate([streams[key] for streams in clients])
        for key in clients[0]
    }


def client_id(name: str) -> ClientId:
    """Return the client id of a value in the column."""
    if name.isascii():
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".")
    return names.nearest(name)


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
    return {"kind": "table", "path": str(_kept(_rows(data)))} if _is_table(data) else data


def _is_table(data: Any) -> bool:
    """Whether a value is a table rather than a section's fields, which have a kind or a path."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        columns = list(data.values())
        return len(columns) > 1 and all(
            isinstance(column, list | tuple) or hasattr(column, "tolist") for column in columns
        )
    return hasattr(data, "column_names") or hasattr(data, "to_dict") or isinstance(data, list)


def _rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table as Python values; missing ones are None."""
    if hasattr(table, "column_names") and isinstance(table, Mapping):  # a datasets.DatasetDict
        problem = f"the data are splits of a data set ({', '.join(table)}), not one table"
        raise DataError(problem, "Give one, or datasets.concatenate_datasets(list(data.values())).")
    if hasattr(table, "features") and hasattr(table, "column_names"):  # a datasets.Dataset
        table = list(class_names(table, table.features))
    elif hasattr(table, "to_pylist"):  # of pyarrow
        table = list(map(uncolumned, table.to_pylist()))
    elif hasattr(table, "to_dict") and hasattr(table, "columns"):  # a data frame
        column_names("the table", list(table.columns))
        table = {name: table[name] for name in table.columns}
    if isinstance(table, Mapping):
        names = column_names("the table", list(table))
        columns = dict(zip(names, map(plain, table.values()), strict=True))
        if len({len(column) for column in columns.values()}) > 1:
            sizes = ", ".join(f"{name} {len(column):,}" for name, column in columns.items())
            problem = f"the columns of the table have unlike lengths: {sizes}"
            raise DataError(problem, "Give all as many rows.")
        rows = zip(*columns.values(), strict=True)
        table = [dict(zip(columns, row, strict=True)) for row in rows]
    if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
        return [{str(n).strip(): plain(value) for n, value in row.items()} for row in table]
    remedy = "Give a datasets.Dataset, a data frame, a dict of lists or a list of dicts."
    raise DataError(f"{type(table).__name__} is no table", remedy)


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
