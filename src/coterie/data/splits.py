"""Splits of a client's data: endless batches for training, one ordered pass for evaluation."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.core.protocol import derive_seed

SPLITS = ("train", "valid", "test")
Tokens = npt.NDArray[np.unsignedinteger]
Numbers = npt.NDArray[np.int64]


class Batch(Protocol):
    """Rows of one kind: a (rows, C + 1) int64 tensor of token ids, or `Examples`."""

    def __len__(self) -> int: ...
    def split(self, rows: int) -> "Sequence[Batch]": ...


# Bounded: the permutations of thousands of clients would outgrow the data.
@lru_cache(maxsize=256)
def _order(seed: int, name: str, epoch: int, windows: int) -> Numbers:
    order = np.random.default_rng(derive_seed(seed, "order", name, epoch)).permutation(windows)
    order.flags.writeable = False
    return order


class Split(ABC):
    """One split of a client's data of any kind: batches for training, along an endless walk in
    which every epoch has each row once, in random order; and all rows in order for scoring.
    """

    name: str  # "train", "valid" or "test": also the key of the client's cursor
    seed: int  # fixes the order of the endless walk
    context: int  # predictions per row of a batch: the window length C in tokens

    @property
    @abstractmethod
    def windows(self) -> int:
        """The number of rows in an epoch."""

    @property
    def predictions(self) -> int:
        """The number of counted predictions in an epoch."""
        return self.windows * self.context

    def __len__(self) -> int:
        """Return the number of tokens or examples."""
        return self.windows

    @abstractmethod
    def take(self, numbers: Numbers) -> Any:
        """Return the rows of these numbers in [0, windows) as a Batch."""

    @abstractmethod
    def join(self, batches: Sequence[Any], order: Numbers) -> Any:
        """Return one batch, whose row i is row order[i] of the concatenated batches."""

    @abstractmethod
    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the data; "" if they are elsewhere."""

    def scoring(self, rows: int) -> Iterator[Any]:
        """Yield all rows once, in order, at most `rows` at a time."""
        for start in range(0, self.windows, rows):
            yield self.take(np.arange(start, min(start + rows, self.windows)))

    def reordered(self, name: str) -> Self:
        """Return the same rows under another name, hence in another order."""
        twin = copy(self)  # not `replace`, which would check the data again
        object.__setattr__(twin, "name", name)
        return twin

    def batch(self, start: int, size: int) -> Any:
        """Return rows start..start+size-1 of the walk, (size, ...); a batch may cross epochs."""
        return self.take(self.numbers(start, size))

    def numbers(self, start: int, size: int) -> Numbers:
        """Return the numbers of rows start..start+size-1 of the walk, (size,). Row i belongs to
        epoch `i // windows`, whose permutation is seeded by `derive_seed(seed, "order", name,
        epoch)`. So a cursor is the only state, and the order does not depend on the batch size.
        """
        numbers, windows = np.arange(start, start + size), self.windows
        chosen = np.empty(size, dtype=np.int64)
        for epoch in range(start // windows, (start + size - 1) // windows + 1):
            inside = numbers // windows == epoch
            chosen[inside] = _order(self.seed, self.name, epoch, windows)[numbers[inside] % windows]
        return chosen


@dataclass(frozen=True, eq=False)
class TokenSplit(Split):
    """One split of a client's text: token ids in a memory-mapped array, in windows.

    Raises DataError if there are fewer than C + 1 tokens.
    """

    name: str
    tokens: Tokens  # (tokens,) uint16 or uint32, read-only
    context: int  # C in tokens; a row is C + 1 ids, inputs `row[:-1]` and targets `row[1:]`
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.context:
            raise DataError(
                f"{self.name}: {len(self.tokens):,} tokens found, {self.context + 1:,} needed "
                f"for one window of context {self.context:,}",
                "Give this split more text (more files, larger fractions or token bounds), or "
                "set a smaller model.context.",
            )

    @property
    def windows(self) -> int:
        """Full training windows; neighbours share one id: target in one, input in the next."""
        return (len(self.tokens) - 1) // self.context

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, numbers: Numbers) -> Tensor:
        """Return the windows of these numbers: (len(numbers), C + 1) int64."""
        places = numbers[:, None] * self.context + np.arange(self.context + 1)
        return torch.from_numpy(self.tokens[places].astype(np.int64))

    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens, dtype=np.uint32)).hexdigest()

    def join(self, batches: Sequence[Tensor], order: Numbers) -> Tensor:
        return torch.cat(list(batches))[torch.from_numpy(order)]

    def scoring(self, rows: int) -> Iterator[Tensor]:
        """Yield all windows in order, (<= rows, C + 1) int64 each, then the shorter rest, (1, m +
        1). Every token but the first is a target exactly once.
        """
        yield from super().scoring(rows)
        rest = self.tokens[self.windows * self.context :]
        if len(rest) > 1:
            yield torch.from_numpy(rest.astype(np.int64))[None]


@dataclass(frozen=True, eq=False)
class UnionSplit(Split):
    """The union of several clients' splits of one name: one walk over all of their rows."""

    name: str
    parts: Sequence[Split]
    seed: int
    context: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", self.parts[0].context)

    @property
    def windows(self) -> int:
        return sum(part.windows for part in self.parts)

    @property
    def predictions(self) -> int:
        return sum(part.predictions for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def take(self, numbers: Numbers) -> Any:
        """Return the rows of these numbers, counted through the parts in order."""
        ends = np.cumsum([part.windows for part in self.parts])
        owners = np.searchsorted(ends, numbers, side="right")
        batches, places = [], []
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            part = self.parts[owner]
            batches.append(part.take(numbers[mine] - (ends[owner] - part.windows)))
            places.append(mine)
        return self.join(batches, np.argsort(np.concatenate(places)))

    def digest(self) -> str:
        return hashlib.sha256("".join(part.digest() for part in self.parts).encode()).hexdigest()

    def join(self, batches: Sequence[Any], order: Numbers) -> Any:
        return self.parts[0].join(batches, order)

    def scoring(self, rows: int) -> Iterator[Any]:
        for part in self.parts:
            yield from part.scoring(rows)


@dataclass(frozen=True, eq=False)
class RemoteSplit(Split):
    """A split on its client's device: only its number of rows is known here."""

    name: str
    rows: int
    seed: int = 0
    context: int = 1

    @property
    def windows(self) -> int:
        return self.rows

    def digest(self) -> str:
        return ""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        problem = f"{self.name}: these data are only on their client's device"
        raise DataError(problem, "They never leave it.")

    take = join = scoring = _refuse
