"""Which pairs of clients a round of CoBo compares, and how many at once.

"CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024, Section 3 (papers/cobo), and
the authors' code.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation import agreement, midpoints
from coterie.core.protocol import Ask, ClientId, Replies
from coterie.core.tensors import parts_within
from coterie.methods.pairwise import Comparing

Pair = tuple[ClientId, ClientId]


@dataclass(frozen=True)
class SamplingPairs(Comparing):
    """A method whose rounds compare some pairs of clients (Section 3, and the authors' code).

    Args:
        pairs: Which: "all"; "constant": n - 1 on average; "time": each with probability
            min(1, c / (t + 1)); "mixed": "constant" for the first part of the run, then "time".
        pair_rate: c; None for 2 switch T / n, with which the probability of a pair falls from where
            the constant one was. At the paper's 40,000 rounds of 8 clients a pair is then compared
            about 980 times (authors' code: 544); with c = 1 it would be 204.
        switch: The first part of "mixed", as a share of all rounds (authors' code: 800 of 40,000).
    """

    pairs: Annotated[
        Literal["all", "constant", "time", "mixed"],
        Field(description="which pairs a round compares"),
    ] = "mixed"
    pair_rate: Annotated[
        float | None,
        Field(
            gt=0,
            description="c in the probability c / (t + 1) of a pair; null: `mixed` continues "
            "where constant ended",
        ),
    ] = None
    switch: Annotated[
        float,
        Field(
            ge=0, le=1, description="share of the rounds before `mixed` turns from constant to time"
        ),
    ] = 0.02
    exchange_mb: Annotated[
        float, Field(gt=0, description="megabytes of midpoints and gradients in flight at once")
    ] = 256.0

    def sample(self, t: int, order: Sequence[ClientId], rng: torch.Generator) -> list[Pair]:
        """Draw the pairs i < j, of those that take part, that round t compares."""
        every = list(combinations(order, 2))
        if self.pairs == "all":
            return every
        first = self.pairs == "mixed" and t < self.switch * self.rounds
        # Both (i, j) and (j, i) are drawn with probability 1/n, which makes n - 1 pairs a round.
        often = 2 / len(order)
        rate = often * self.switch * self.rounds if self.pair_rate is None else self.pair_rate
        constant = first or self.pairs == "constant"
        probability = min(1.0, often if constant else rate / (t + 1))
        drawn = torch.rand(len(every), generator=rng) < probability
        return [pair for pair, is_drawn in zip(every, drawn.tolist(), strict=True) if is_drawn]

    def compared(
        self, x: Mapping[ClientId, Tensor], order: Sequence[ClientId], pairs: Sequence[Pair]
    ) -> Generator[Ask, Replies, Tensor]:
        """Return how well the gradients of pairs agree at their midpoints z_ij, (n, n): lines 11 to
        13 of Algorithm 1; 0 for pairs that are not compared.

        Args:
            x: The clients' models, (d,) each.
            order: All n clients, as rows.
            pairs: Of clients in x.
        """
        scores = torch.zeros(len(order), len(order), dtype=torch.float64)
        for part in self.exchanges(pairs, x):
            gradients = yield Ask(self.midpoint_gradients, midpoints(x, part))
            scores += agreement(order, gradients)
        return scores

    def exchanges(
        self, pairs: Sequence[Pair], x: Mapping[ClientId, Tensor]
    ) -> Iterator[Sequence[Pair]]:
        """Yield the pairs in as few parts as memory allows: each has a midpoint, two gradients."""
        if not pairs:
            return iter(())
        bytes_each = 3 * 4 * next(iter(x.values())).numel()
        return parts_within(self.exchange_mb, pairs, bytes_each)
