"""Sections with a column that names each row's client, and the handling of small clients."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data.chats.encoding import few, merged_notes
from coterie.data.chats.fields import ChatFields
from coterie.data.chats.reading import BESIDE, COLUMNS
from coterie.data.refusals import SHOWN, LeftOut, Refusals
from coterie.data.rows import Row
from coterie.data.section import Bound, Names, TextFractions, Texts, choose
from coterie.data.splits import SPLITS, Tokens
from coterie.data.splitting import Document, LocatedText, split_clients
from coterie.data.values import client_name, text_of

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
        """Yield a document for each row, empty if the row has no text."""
        with Refusals(SHOWN) as refusals, refusals.gather():
            for place, row in rows:
                with refusals.gather():
                    text = text_of(row.get(self.text_column), place, self.text_column)
                    if text is None:
                        left_out.add("text", place)
                    yield Document(LocatedText.at(place, text or ""), text or "")

    def _choose(self, documents: Mapping[str, Sequence[Document]], where: str) -> list[str]:
        if self.clients is not None:
            column = f"column {self.client_column!r} of {where}"
            choose(documents, self.clients, "clients", column)
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
    """Return the first few small clients, each with what it has too little of."""
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
