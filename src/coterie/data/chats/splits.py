"""Splits of a client's conversations or separate documents, in batches of packed rows."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.core.errors import DataError
from coterie.data.splits import Numbers, Split, Tokens


@dataclass(frozen=True)
class ChatBatch:
    """One batch, whose rows hold one or several conversations each, one after another."""

    ids: Tensor  # (B, C + 1) int64 token ids; 0 after the end of a row
    # (B, C + 1) bool: targets of loss and scores; never the first token of a conversation
    counted: Tensor
    positions: Tensor  # (B, C + 1) int64: place within the conversation; -1 after the end

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, rows: slice | Tensor) -> "ChatBatch":
        """Return the given rows."""
        return ChatBatch(self.ids[rows], self.counted[rows], self.positions[rows])

    def split(self, rows: int) -> "list[ChatBatch]":
        """Return batches of at most `rows` rows each, in order."""
        return [self.at(slice(start, start + rows)) for start in range(0, len(self), rows)]

    @property
    def predictions(self) -> int:
        """The number of counted targets."""
        return int(self.counted[:, 1:].sum())

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one conversation."""
        return bool(((self.positions == 0).sum(dim=1) > 1).any())


@dataclass(frozen=True, eq=False)
class ChatSplit(Split):
    """A split of conversations: a row holds as many as fit, and none spans two rows.

    Documents that begin with a token of the base's are handled alike, see `data.text_streams`.
    Raises DataError if there is no conversation.
    """

    name: str
    tokens: Tokens  # (tokens,) unsigned, read-only: all conversations concatenated
    counted: Tokens  # (tokens,) unsigned: 1 for tokens that loss and scores count
    lengths: Tokens  # (conversations,) unsigned: tokens of each, at most C + 1
    context: int  # C; a row has at most C + 1 ids
    seed: int
    packing: bool = True  # whether a row may hold several conversations

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise DataError(
                f"{self.name}: no conversations",
                "Give this split conversations: more of them, or larger fractions or token bounds.",
            )

    @cached_property
    def rows(self) -> list[list[int]]:
        """The numbers of the conversations in each row."""
        if not self.packing:
            return [[number] for number in range(len(self.lengths))]
        return packed(self.lengths.astype(np.int64), self.context + 1)

    @cached_property
    def _starts(self) -> Numbers:
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def windows(self) -> int:
        return len(self.rows)

    @cached_property
    def predictions(self) -> int:
        return int(self.counted.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    def conversation(self, number: int) -> npt.NDArray[np.int64]:
        """Return the token ids of one conversation."""
        return self.tokens[self.place(number)].astype(np.int64)

    def place(self, number: int) -> slice:
        """Return the slice of the tokens of one conversation."""
        return slice(int(self._starts[number]), int(self._starts[number + 1]))

    def take(self, numbers: Numbers) -> ChatBatch:
        """Return the rows of these numbers, padded to the longest."""
        rows = [self.rows[number] for number in numbers]
        widths = [sum(int(self.lengths[number]) for number in row) for row in rows]
        shape = (len(rows), max([2, *widths]))
        ids = np.zeros(shape, np.int64)
        counted = np.zeros(shape, bool)
        positions = np.full(shape, -1)
        for i, row in enumerate(rows):
            start = 0
            for number in row:
                where, end = self.place(number), start + int(self.lengths[number])
                ids[i, start:end] = self.tokens[where]
                counted[i, start:end] = self.counted[where]
                positions[i, start:end] = np.arange(end - start)
                start = end
        return ChatBatch(*map(torch.from_numpy, (ids, counted, positions)))

    def join(self, batches: Sequence[ChatBatch], order: Numbers) -> ChatBatch:
        width = max(batch.ids.shape[1] for batch in batches)

        def joined(name: str, behind: int) -> Tensor:
            parts = [getattr(batch, name) for batch in batches]
            return torch.cat([pad(p, (0, width - p.shape[1]), value=behind) for p in parts])

        columns = {"ids": 0, "counted": False, "positions": -1}
        return ChatBatch(*map(joined, columns, columns.values())).at(torch.from_numpy(order))

    def digest(self) -> str:
        """Return the SHA-256 of tokens, counted flags and lengths."""
        digest = hashlib.sha256()
        for values in (self.tokens, self.counted, self.lengths):
            digest.update(np.ascontiguousarray(values, dtype=np.uint32))
        return digest.hexdigest()


def packed(lengths: Numbers, room: int) -> list[list[int]]:
    """Return the conversations of each row: longest first, each where the least room is left. Best
    fit decreasing needs at most 11/9 of the fewest rows (Johnson, 1974), and gives the same rows on
    every machine. No length may exceed `room`.
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room and number of each row that has any, in rising order
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(left, (length, 0))
        if place == len(left):
            free, row = room, len(rows)
            rows.append([])
        else:
            free, row = left.pop(place)
        rows[row].append(number)
        if free > length:
            insort(left, (free - length, row))
    return rows
