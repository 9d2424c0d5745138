"""Texts as streams of token ids: running text, or documents that begin as the base's texts do.

If a base's tokenizer puts a token before texts, the base has never read a window that starts within
a document, and may never have predicted the end token. For such a base every document is read by
itself: it begins with that token, which never counts, and the end token counts in training only, so
that a score is that of the text.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data.chats.splits import ChatSplit
from coterie.data.federation import token_split
from coterie.data.refusals import SHOWN, Refusals
from coterie.data.splits import Split, Tokens
from coterie.data.store import LONGEST, Streams, dtype_for
from coterie.data.text_encoding import TextEncoder

Arrays = Mapping[str, Tokens]
Controls = Counter[str]  # control tokens in people's text

_DOCUMENTS = 64  # encoded at a time: enough for the tokenizer's threads, few beyond a token bound


@dataclass(frozen=True)
class SplitTexts:
    """The documents of one split of a client."""

    client: ClientId
    name: str  # of the split
    documents: Sequence[str]
    limit: int | None = None  # most tokens; None: all


@dataclass(frozen=True)
class TextStreams(ABC):
    """The common part of encoders of texts."""

    texts: TextEncoder  # the base's encoder
    # sentences about the texts, complete when the streams are read
    notes: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> Any:
        """What token ids depend on besides texts, fields and tokenizer, as JSON."""
        return ["text", self.texts.begin]

    def arrays(self, documents: Sequence[str], name: str, context: int) -> dict[str, Tokens]:
        """Return one split of a client as arrays. Raises DataError for refused control tokens."""
        streams = self._split(SplitTexts("", name, documents), context, Counter())
        empty = np.empty(0, dtype_for(self.texts.tokenizer))
        return {key: np.concatenate([empty, *pieces]) for key, pieces in streams}

    def streams(self, parts: Iterable[SplitTexts], context: int) -> Streams:
        """Return the arrays of splits as streams, encoded as they are read. Raises DataError."""
        controls: dict[ClientId, Controls] = {}
        for part in parts:
            counted = controls.setdefault(part.client, Counter())
            for key, pieces in self._split(part, context, counted):
                yield part.client, key, pieces
        self.notes.extend(self._notes(controls))

    @abstractmethod
    def _split(
        self, part: SplitTexts, context: int, controls: Controls
    ) -> Iterator[tuple[str, Iterable[Tokens]]]:
        """Yield the arrays of a split by name, each in pieces; count control tokens."""

    def _encoded(self, part: SplitTexts, controls: Controls) -> Iterator[tuple[list[int], bool]]:
        """Yield, lazily, documents' ids, long ones in parts, with whether each is the last."""
        where = f"client {part.client!r}, " * bool(part.client) + f"{part.name}: "
        with Refusals() as refusals, refusals.gather(where):
            for batch in _batches(part.documents):
                texts = [text for text, _ in batch]
                for text in texts:
                    controls.update(self.texts.controls_in(text))
                yield from zip(self.texts.encode(texts), (last for _, last in batch), strict=True)

    def _notes(self, controls: Mapping[ClientId, Controls]) -> Iterator[str]:
        if not self.texts.end:
            yield (
                "the base's tokenizer has no end token, so documents do not end: set eos_token in "
                "its tokenizer_config.json"
            )
        clients = {client: tokens for client, tokens in controls.items() if tokens}
        for client, tokens in list(clients.items())[:SHOWN]:
            listed = ", ".join(f"`{token}`" for token in tokens)
            count = tokens.total()
            read = "text" if self.texts.control_tokens == "text" else "tokens"
            yield (
                f"{count:,} control token{'s' * (count > 1)} in {client}'s text ({listed}) "
                f"{'are' if count > 1 else 'is'} read as {read}: data.control_tokens"
            )
        if len(clients) > SHOWN:
            yield f"{len(clients) - SHOWN:,} more clients have control tokens in their text"


class RunningText(TextStreams):
    """Encodes documents as running text, each followed by the end token."""

    split = staticmethod(token_split)

    def description(self, arrays: Mapping[ClientId, Arrays]) -> str:
        """Return "": running text needs no explanation."""
        return ""

    def _split(
        self, part: SplitTexts, context: int, controls: Controls
    ) -> Iterator[tuple[str, Iterable[Tokens]]]:
        yield part.name, self._pieces(part, controls)

    def _pieces(self, part: SplitTexts, controls: Controls) -> Iterator[Tokens]:
        dtype, limit = dtype_for(self.texts.tokenizer), part.limit
        encoded = self._encoded(part, controls)
        while (limit is None or limit > 0) and (some := next(encoded, None)):
            ids, last = some
            piece = np.array([*ids, *(self.texts.end if last else [])], dtype=dtype)[:limit]
            limit = None if limit is None else limit - len(piece)
            yield piece


class SeparateDocuments(TextStreams):
    """Encodes separate documents that begin as the base's texts, for `ChatSplit`. One longer than a
    window is cut into pieces that share one token: every token is predicted once.
    """

    def split(self, name: str, arrays: Arrays, context: int, seed: int) -> Split:
        """Return a split of a client's arrays. Raises DataError if it is empty."""
        lengths = arrays[f"{name}.lengths"]
        if not len(lengths):
            remedy = "Give this client more text, or use larger fractions or token bounds."
            raise DataError(f"{name}: no text", remedy)
        return ChatSplit(name, arrays[name], arrays[f"{name}.counted"], lengths, context, seed)

    def description(self, arrays: Mapping[ClientId, Arrays]) -> str:
        """Return a phrase about how documents begin."""
        begin = self.texts.tokenizer.decode(self.texts.begin)
        return f"each document begins with {begin}, as the base's texts do, and is read by itself"

    def _split(
        self, part: SplitTexts, context: int, controls: Controls
    ) -> Iterator[tuple[str, Iterable[Tokens]]]:
        pieces = list(self._pieces(part, context, controls))
        yield part.name, (ids for ids, _ in pieces)
        yield f"{part.name}.counted", (counted for _, counted in pieces)
        yield f"{part.name}.lengths", [np.array([len(ids) for ids, _ in pieces], dtype=np.uint32)]

    def _pieces(
        self, part: SplitTexts, context: int, controls: Controls
    ) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield the ids of pieces, (P,) each, and whether each id counts."""
        limit = part.limit
        for ids, counted in self._documents(part, controls):
            for start in range(0, len(ids) - 1, context):
                place = slice(start, start + context + 1)
                piece, predicted = ids[place][:limit], counted[place][:limit].copy()
                predicted[:1] = 0  # the first token of all, or predicted in the previous piece
                if predicted.any():
                    yield piece, predicted
                    limit = None if limit is None else limit - len(piece)
            if limit is not None and limit < 2:
                return

    def _documents(self, part: SplitTexts, controls: Controls) -> Iterator[tuple[Tokens, Tokens]]:
        begin, end, ids = self.texts.begin, self.texts.end, list[int]()
        for some, last in self._encoded(part, controls):
            ids += some
            if last and ids:
                ends = [int(part.name == "train")] * len(end)
                counted = [*([0] * len(begin)), *([1] * len(ids)), *ends]
                yield np.array([*begin, *ids, *end], np.uint32), np.array(counted, np.uint32)
            ids = [] if last else ids


def text_streams(texts: TextEncoder) -> RunningText | SeparateDocuments:
    """Return the encoder for a base: running text unless its tokenizer begins texts."""
    return SeparateDocuments(texts) if texts.begin else RunningText(texts)


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yield batches of parts of documents, with whether each ends its document."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for part in (part for text in documents for part in _parts(text)):
        if batch and (len(batch) == _DOCUMENTS or characters + len(part[0]) > LONGEST):
            yield batch
            batch, characters = [], 0
        batch.append(part)
        characters += len(part[0])
    if batch:
        yield batch


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield parts of at most a million characters, cut before spaces, and whether each is last."""
    start = 0
    while len(text) - start > LONGEST:
        space = text.rfind(" ", start + LONGEST // 2, start + LONGEST)
        end = space if space > start else start + LONGEST
        yield text[start:end], False
        start = end
    yield text[start:], True
