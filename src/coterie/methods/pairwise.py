"""What CoBo and its relatives share: gradients halfway, weights W of pairs, and which pairs to ask.

"CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024 (papers/cobo).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation import rearranged
from coterie.client.interfaces import AnyClient
from coterie.core.protocol import ClientId, State, task
from coterie.core.tensor_names import by_client, client_of, clients_with, of_client
from coterie.core.tensors import Tensors
from coterie.methods.base import Method

Pair = tuple[ClientId, ClientId]


@dataclass(frozen=True)
class Comparing(Method):
    """A method whose server compares clients by their gradients halfway between their models.

    The server's state holds `<client>/generalist`, (d,), each client's own, and `weights`, (n, n),
    W over these clients in the order of their ids.
    """

    @task(batched=True)
    def midpoint_gradients(self, client: AnyClient, midpoints: Tensors) -> Tensors:
        """Return g_i = grad f_i(z_ij), (d,), for each j whose midpoint came, each on a fresh batch
        of the client's own data.
        """
        return client.gradients_at(midpoints, "midpoints")

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        known = clients_with(state)
        found = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        here = [k for k, i in enumerate(clients) if i in known]
        at, rows = torch.tensor(here), torch.tensor([known.index(clients[k]) for k in here])
        found[at[:, None], at] = state["weights"][rows[:, None], rows]
        return found


def rejoined(state: State, clients: Sequence[ClientId], row_stochastic: bool) -> State:
    """Return the state for these clients: who leaves takes its model and its row of W along; who
    joins starts from the mean of the others' models, and is marked `<client>/joined`.

    Args:
        state: Of a `Comparing` method.
        clients: Those that are there now.
        row_stochastic: Whether each row of W sums to 1.
    """
    known, order = clients_with(state), sorted(clients)
    if order == known:
        return state
    stayed = [i for i in known if i in order] or known  # if all are new: the models that are left
    mean = torch.stack([state[of_client(i)] for i in stayed]).mean(dim=0)
    kept = {name: t for name, t in state.items() if client_of(name) in (None, *order)}
    for i in sorted(set(order) - set(known)):
        kept |= {of_client(i): mean.clone(), of_client(i, "joined"): torch.tensor(True)}
    places = [known.index(i) if i in known else None for i in order]
    return kept | {"weights": rearranged(state["weights"], places, row_stochastic)}


def drawn_output(
    state: State, t: int, x: Mapping[ClientId, Tensor], rng: torch.Generator
) -> Tensors:
    """Return `<client>/output`: models of a uniformly drawn round, though nobody knows how many
    there will be. Each takes the place of those before with probability 1 / (t + 1) (Theorem I).
    """
    drawn = float(torch.rand((), generator=rng)) < 1 / (t + 1)
    before = {i: None if drawn else state.get(of_client(i, "output")) for i in x}
    kept = {i: x[i].clone() if old is None else old for i, old in before.items()}
    return by_client(kept, "output")


@dataclass(frozen=True)
class SamplingPairs(Method):
    """A method whose rounds compare some pairs of clients (Section 3, and the authors' code).

    Args:
        pairs: Which: "all"; "constant": n - 1 on average; "time": each with probability
            min(1, c / (t + 1)); "mixed": "constant" for the first part of the run, then "time".
        pair_rate: c; None for 2 switch T / n, with which the probability of a pair falls from where
            the constant one was. At the paper's 40,000 rounds of 8 clients a pair is then compared
            about 980 times (authors' code: 544); with c = 1 it would be 204.
        switch: The first part of "mixed", as a share of all rounds (authors' code: 800 of 40,000).
        exchange_mb: Most megabytes of midpoints in flight at once: more pairs take more exchanges.
    """

    pairs: Annotated[
        Literal["all", "constant", "time", "mixed"],
        Field(description="which pairs a round compares"),
    ] = "mixed"
    pair_rate: Annotated[
        float | None,
        Field(
            gt=0,
            description="c of the probability c / (t + 1) of a pair; null: `mixed` goes on where "
            "constant ended",
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

    def exchanges(
        self, pairs: Sequence[Pair], x: Mapping[ClientId, Tensor]
    ) -> Iterator[Sequence[Pair]]:
        """Yield the pairs in as few parts as memory allows: each has a midpoint, two gradients."""
        if pairs:
            bytes_each = 3 * 4 * next(iter(x.values())).numel()
            size = max(1, math.floor(self.exchange_mb * 1e6 / bytes_each))
            for start in range(0, len(pairs), size):
                yield pairs[start : start + size]
