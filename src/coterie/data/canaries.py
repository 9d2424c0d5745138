"""Canaries: random texts planted in clients' training data by coin flips, to measure how much of
them a trained model reveals (Carlini et al., "The Secret Sharer: Evaluating and Testing Unintended
Memorization in Neural Networks", USENIX Security 2019).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from coterie.core.errors import CheckpointError, DataError
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.chats.splits import ChatSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.refusals import Refusals
from coterie.data.splits import Numbers, TokenSplit

Ids = npt.NDArray[np.int64]


class Audit(BaseModel):
    """Canaries and observations that a run keeps, for `coterie audit` to measure what leaks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # candidates per client, each a fixed prefix and random tokens; a coin flip plants it or leaves
    # it out
    canaries: int = Field(32, ge=0)
    repeats: int = Field(4, ge=1)  # how often a planted canary occurs in its client's training text
    prefix: int = Field(4, ge=0)  # length in tokens of the prefix that all canaries begin with
    length: int = Field(8, ge=1)  # random tokens per canary, uniform over the vocabulary
    # reference sequences of the same distribution that no client has; exposure is the rank among
    # them
    references: int = Field(256, ge=1)
    # number of last training exchanges whose updates are kept in the run's folder; null: all
    exchanges: int | None = Field(5, ge=1)
    seed: int = Field(0, ge=0)  # seed of canaries and coin flips, used with the run's seed


@dataclass(frozen=True)
class Canaries:
    """The candidates of one client."""

    prefix: Ids  # (p,) token ids
    tokens: Ids  # (n, k) token ids: the random part of each
    planted: npt.NDArray[np.bool_]  # (n,) the coin flips
    windows: Numbers  # (planted ones x repeats,) the training windows that hold one

    def to_json(self) -> dict[str, Any]:
        """Return the candidates as JSON values."""
        return {name: values.tolist() for name, values in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Canaries":
        """Return the inverse of `to_json`. Raises ValueError or KeyError."""
        prefix, tokens, windows = (
            np.array(values[name], dtype=np.int64) for name in ("prefix", "tokens", "windows")
        )
        parts = tokens.reshape(len(values["tokens"]), -1)
        return cls(prefix, parts, np.array(values["planted"], dtype=bool), windows)


@dataclass(frozen=True)
class PlantedCanaries:
    """The canaries that `plant` drew for a run."""

    canaries: Mapping[ClientId, Canaries]
    references: Ids  # (references, k) random parts that no client has

    def to_json(self) -> dict[str, Any]:
        """Return the content of the run's `canaries.json`."""
        clients = {i: canaries.to_json() for i, canaries in self.canaries.items()}
        return {"clients": clients, "references": self.references.tolist()}

    @classmethod
    def from_json(cls, values: Any) -> "PlantedCanaries":
        """Return the inverse of `to_json`. Raises CheckpointError."""
        try:
            canaries = {i: Canaries.from_json(known) for i, known in values["clients"].items()}
            return cls(canaries, np.array(values["references"], dtype=np.int64))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"the list of planted canaries is damaged ({error})"
            raise CheckpointError(problem, "Run the recipe again, to another --out.") from None


def plant(
    federation: Federation,
    audit: Audit,
    seed: int,
    vocabulary: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
) -> tuple[Federation, dict[ClientId, Canaries], Ids]:
    """Plant canaries in the training text of every client. Raises DataError if windows are too
    short or too few.

    Every candidate has `repeats` places, each within a training window of its own. A coin flip
    decides whether `begin prefix tokens end` replaces the client's own text there. A flip changes
    only these windows: neither their number nor their order. The draws depend on the two seeds and
    the data alone, so they can be repeated.

    `vocabulary` holds the ids that random tokens are drawn from; `begin` and `end` are the ids
    around every document (for running text, `begin` is `end`).

    Returns the federation with planted training splits, each client's candidates, and (references,
    k) random parts that no client has.
    """
    allowed = np.asarray(vocabulary, dtype=np.int64)
    prefix = np.random.default_rng(derive_seed(seed, "audit", audit.seed, "prefix")).choice(
        allowed, audit.prefix
    )
    references = np.random.default_rng(derive_seed(seed, "audit", audit.seed, "references")).choice(
        allowed, (audit.references, audit.length)
    )
    clients, canaries = dict(federation.clients), dict[ClientId, Canaries]()
    with Refusals() as refusals:
        for id, data in federation.clients.items():
            assert isinstance(data.train, TokenSplit | ChatSplit)
            rng = np.random.default_rng(derive_seed(seed, "audit", audit.seed, "client", id))
            tokens = rng.choice(allowed, (audit.canaries, audit.length))
            planted = rng.random(audit.canaries) < 0.5
            pieces = np.array(
                [[*begin, *prefix, *random_part, *end] for random_part in tokens], dtype=np.int64
            )
            with refusals.gather(f"client {id!r}, "):
                places = np.repeat(pieces, audit.repeats, axis=0)
                train, windows = _planted(
                    data.train, places, np.repeat(planted, audit.repeats), rng
                )
                clients[id] = ClientData(id, train, data.valid, data.test)
                canaries[id] = Canaries(prefix, tokens, planted, windows)
    return replace(federation, clients=clients), canaries, references


def _planted(
    split: TokenSplit | ChatSplit,
    pieces: Ids,
    planted: npt.NDArray[np.bool_],
    rng: np.random.Generator,
) -> tuple[TokenSplit | ChatSplit, Numbers]:
    """Return the split with the `planted` ones of (m, l) pieces, and their windows' numbers."""
    count, length = pieces.shape if len(pieces) else (0, 0)
    if length >= split.context:
        problem = f"{split.name}: canaries of {length} tokens in windows of {split.context}"
        raise DataError(problem, "Set a smaller audit.length, or a larger model.context.")
    firsts = _first_tokens(split, length)
    if count > len(firsts):
        problem = f"{split.name}: {count} places for canaries, but only {len(firsts)} windows"
        raise DataError(problem, "Set fewer audit.canaries or audit.repeats, or give more text.")
    # pieces that are not planted occupy a window, too
    windows = rng.permutation(list(firsts))[:count]
    starts = np.array([firsts[number] for number in windows.tolist()], dtype=np.int64)
    if isinstance(split, TokenSplit):
        # a window shares its first and its last id with its neighbours: a piece lies between them,
        # so that it is in no other window
        starts = starts + 1 + rng.integers(0, split.context - length, count)
    tokens = np.array(split.tokens)
    for start, piece in zip(starts[planted], pieces[planted], strict=True):
        tokens[start : start + length] = piece
    tokens.flags.writeable = False
    return replace(split, tokens=tokens), windows[planted]


def _first_tokens(split: TokenSplit | ChatSplit, length: int) -> dict[int, int]:
    """Return where a canary may begin in each window: within its longest document."""
    if isinstance(split, TokenSplit):
        return {number: number * split.context for number in range(split.windows)}
    longest = {
        window: max(row, key=lambda number: int(split.lengths[number]))
        for window, row in enumerate(split.rows)
    }
    return {
        window: split.place(number).start
        for window, number in longest.items()
        if split.lengths[number] >= length
    }
