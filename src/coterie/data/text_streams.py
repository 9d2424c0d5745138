"""Texts as streams of token ids: running text, or documents that begin as the base's texts begin.

Where a base's tokenizer puts a token before texts, a window that starts within a document begins as
nothing that the base has read, and the end token may be one that it never predicted. There every
document is read by itself: it begins with that token, which never counts, and the end token counts
in training alone, so that a score is that of the text.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data.chats.splits import ChatSplit
from coterie.data.federation import MakeSplit, token_split
from coterie.data.refusals import SHOWN, Refusals
from coterie.data.splits import Tokens
from coterie.data.store import LONGEST, Streams, dtype_for
from coterie.data.text_encoding import TextEncoder

Arrays = Mapping[str, Tokens]
Controls = Counter[str]  # control tokens in people's text

_DOCUMENTS = 64  # encoded at a time: enough for the tokenizer's threads, few beyond a token bound


@dataclass(frozen=True)
class SplitTexts:
    """The documents of one split of a client.

    Args:
        client: Its id.
        name: The split's.
        documents: Texts.
        limit: Most tokens; None: all.
    """

    client: ClientId
    name: str
    documents: Sequence[str]
    limit: int | None = None


class StreamEncoder(Protocol):
    """What makes token ids of a section's documents, and splits of them."""

    @property
    def fingerprint(self) -> Any:
        """What token ids depend on beside the texts, the fields and the tokenizer, as JSON."""

    @property
    def notes(self) -> Iterable[str]:
        """Sentences about the documents for people, complete when the streams are read."""

    @property
    def maker(self) -> MakeSplit:
        """What makes a split of arrays."""

    def arrays(self, documents: Sequence[str], name: str, context: int) -> dict[str, Tokens]:
        """Return one split of a client as arrays. Raises DataError."""

    def streams(self, parts: Iterable[SplitTexts], context: int) -> Streams:
        """Return the arrays of splits as streams of the cache. Raises DataError."""

    def description(self, arrays: Mapping[ClientId, Arrays]) -> str:
        """Return what was made of the documents, in words."""


@dataclass(frozen=True)
class TextStreams(ABC):
    """Makes token ids of texts.

    Args:
        texts: The base's encoder.
        notes: Sentences about the texts, complete when the streams are read.
    """

    texts: TextEncoder
    notes: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> Any:
        return ["text", self.texts.begin]

    def arrays(self, documents: Sequence[str], name: str, context: int) -> dict[str, Tokens]:
        """Return one split of a client as arrays. Raises DataError for refused control tokens."""
        streams = self._split(SplitTexts("", name, documents), context, Counter())
        empty = np.empty(0, dtype_for(self.texts.tokenizer))
        return {key: np.concatenate([empty, *pieces]) for key, pieces in streams}

    def streams(self, parts: Iterable[SplitTexts], context: int) -> Streams:
        """Return the arrays of splits as streams of the cache, encoded as they are read. Raises
        DataError for refused control tokens.
        """
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
        """Yield the arrays of a split by their names, each in pieces; the control tokens in its
        documents are counted.
        """

    def _encoded(self, part: SplitTexts, controls: Controls) -> Iterator[tuple[list[int], bool]]:
        """Yield the ids of documents, long ones in parts, each with whether it ends its document.
        Documents behind the last that is asked for are not encoded.
        """
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
            count, read = (
                tokens.total(),
                "text" if self.texts.control_tokens == "text" else "tokens",
            )
            yield (
                f"{count:,} control token{'s' * (count > 1)} in {client}'s text ({listed}) "
                f"{'are' if count > 1 else 'is'} read as {read}: data.control_tokens"
            )
        if len(clients) > SHOWN:
            yield f"{len(clients) - SHOWN:,} more clients have control tokens in their text"


class RunningText(TextStreams):
    """Makes running text of documents, the end token behind each."""

    @property
    def maker(self) -> MakeSplit:
        return token_split

    def description(self, arrays: Mapping[ClientId, Arrays]) -> str:
        """Return nothing: it is what the word text says."""
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
    """Makes documents that begin with what the tokenizer puts before texts, for `ChatSplit`. One
    longer than a window is cut into pieces that share one token: every token is predicted once.
    """

    @property
    def maker(self) -> MakeSplit:
        return _document_split

    def description(self, arrays: Mapping[ClientId, Arrays]) -> str:
        """Return how documents begin, in words."""
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
        """Yield the ids of pieces, (P,) each, and which of them count."""
        limit = part.limit
        for ids, counted in self._documents(part, controls):
            for start in range(0, len(ids) - 1, context):
                place = slice(start, start + context + 1)
                piece, predicted = ids[place][:limit], counted[place][:limit].copy()
                predicted[:1] = 0  # nothing is before it, or it was predicted in the piece before
                if predicted.any():
                    yield piece, predicted
                    limit = None if limit is None else limit - len(piece)
            if limit is not None and limit < 2:
                return

    def _documents(self, part: SplitTexts, controls: Controls) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield the ids of whole documents, (T,) each, and which of them count."""
        begin, end, ids = self.texts.begin, self.texts.end, list[int]()
        for some, last in self._encoded(part, controls):
            ids += some
            if last and ids:
                ends = [int(part.name == "train")] * len(end)
                counted = [*([0] * len(begin)), *([1] * len(ids)), *ends]
                yield np.array([*begin, *ids, *end], np.uint32), np.array(counted, np.uint32)
            ids = [] if last else ids


def text_streams(texts: TextEncoder) -> RunningText | SeparateDocuments:
    """Return what makes token ids of texts for a base: running text, or, where its tokenizer puts a
    token before texts, separate documents.
    """
    return SeparateDocuments(texts) if texts.begin else RunningText(texts)


def _document_split(name: str, arrays: Arrays, context: int, seed: int) -> ChatSplit:
    """Return a split of separate documents. Raises DataError without any."""
    if not len(arrays[f"{name}.lengths"]):
        raise DataError(
            f"{name}: no text",
            "Give this client more text, or use larger fractions or token bounds.",
        )
    ids, counted, lengths = (arrays[key] for key in (name, f"{name}.counted", f"{name}.lengths"))
    return ChatSplit(name, ids, counted, lengths, context, seed)


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Parts of documents that are encoded at a time, each with whether it ends its document."""
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
    """Return a text in parts of a million characters at most, each but the first one beginning with
    a space where there is one.
    """
    start = 0
    while len(text) - start > LONGEST:
        space = text.rfind(" ", start + LONGEST // 2, start + LONGEST)
        end = space if space > start else start + LONGEST
        yield text[start:end], False
        start = end
    yield text[start:], True
