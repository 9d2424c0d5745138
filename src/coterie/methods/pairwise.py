"""The common part of CoBo and related methods: sampled pairs of clients, gradients at midpoints,
pairwise weights W, and clients that join.

"CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024, Section 3 (papers/cobo), and
the authors' code.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.collaboration import agreement, midpoints, rearranged
from coterie.client.blueprint import AnyClient, Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import by_client, client_of, clients_with, of_client
from coterie.core.tensors import Tensors, parts_within
from coterie.methods.base import Method
from coterie.methods.templates import portion

Pair = tuple[ClientId, ClientId]


@dataclass(frozen=True)
class SamplingPairs(Method):
    """A method whose rounds compare some pairs of clients by their gradients halfway between their
    models.

    The server's state holds `<client>/generalist`, (d,), each client's own, and `weights`, (n, n),
    W over these clients in the order of their ids.

    With a `pair_rate` of None, c is 2 switch T / n. At the paper's 40,000 rounds of 8 clients a
    pair is then compared about 980 times (authors' code: 544); with c = 1 it would be 204. Their
    code has a `switch` of 800 of 40,000 rounds.
    """

    beyond_mean: ClassVar[str] = (
        "sends each client sums of single clients' models, by weights from pairs of their gradients"
    )

    # which pairs a round compares; constant: n - 1 on average; time: each with probability c / (t +
    # 1); mixed: constant at first, then time
    pairs: Literal["all", "constant", "time", "mixed"] = "mixed"
    # c; null: mixed continues where constant ended
    pair_rate: Annotated[float | None, Field(gt=0)] = None
    # share of the rounds before `mixed` turns from constant to time
    switch: Annotated[float, Field(ge=0, le=1)] = 0.02
    # megabytes of midpoints and gradients in flight at once
    exchange_mb: Annotated[float, Field(gt=0)] = 256.0

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        if model.fewest == 1 < len(clients):
            problem = "participation: pairs of clients cannot be compared in a round of one"
            raise RecipeError("method", [problem])

    def sample(self, t: int, order: Sequence[ClientId], rng: torch.Generator) -> list[Pair]:
        """Draw the pairs i < j of participants that round t compares."""
        every = list(combinations(order, 2))
        if self.pairs == "all":
            return every
        first = self.pairs == "mixed" and t < portion(self.switch, self.rounds)
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
        """Return how well gradients agree at midpoints z_ij, (n, n): lines 11 to 13 of Algorithm 1;
        0 for pairs that are not compared.

        Args:
            x: The clients' models, (d,) each.
            order: All n clients, as rows.
            pairs: Of clients in x.
        """
        scores = torch.zeros(len(order), len(order), dtype=torch.float64)
        values = next(iter(x.values())).numel() if pairs else 1
        for part in parts_within(self.exchange_mb, pairs, 3 * 4 * values):  # z_ij, two gradients
            gradients = yield Ask(self.midpoint_gradients, midpoints(x, part))
            scores += agreement(order, gradients)
        return scores

    @task(batched=True)
    def midpoint_gradients(self, client: AnyClient, midpoints: Tensors) -> Tensors:
        """Return g_i = grad f_i(z_ij), (d,), for each received midpoint, on a fresh batch each."""
        return client.gradients_at(midpoints, "midpoints")

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        members = clients_with(state)
        matrix = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        places = [k for k, i in enumerate(clients) if i in members]
        at, rows = torch.tensor(places), torch.tensor([members.index(clients[k]) for k in places])
        matrix[at[:, None], at] = state["weights"][rows[:, None], rows]
        return matrix


@dataclass(frozen=True)
class Joining(Method):
    """A method whose clients may join late, from a model that the server makes, see `rejoined`, and
    sends once.
    """

    def marked(self, state: State, before: State) -> State:
        """Return the state, with `<client>/joined` for clients that are new since `before`."""
        new = set(clients_with(state)) - set(clients_with(before))
        return state | {of_client(i, "joined"): torch.tensor(True) for i in sorted(new)}

    def started(self, state: State, clients: Sequence[ClientId]) -> Round:
        """Have clients that joined take over their models; return the state without their marks."""
        joined = [i for i in sorted(clients) if of_client(i, "joined") in state]
        if not joined:
            return state
        models = {i: Tensors({GENERALIST: state[of_client(i)]}) for i in joined}
        done = yield Ask(self.start, models, empty_reply)
        marks = {of_client(i, "joined") for i in done}
        return {name: tensor for name, tensor in state.items() if name not in marks}

    @task(Sends.NOTHING)
    def start(self, client: Client, x: Tensors) -> Tensors:
        """Take over the mean of the others' models."""
        client.load(x)
        return {}


def rejoined(
    state: State, clients: Sequence[ClientId], start: Tensor, row_stochastic: bool
) -> State:
    """Return the state for these clients: who leaves takes its model and row of W along; who joins
    starts from the mean of the others' models.

    Args:
        state: Of a `SamplingPairs` method.
        clients: The present clients.
        start: (n, n), W of n new clients.
        row_stochastic: Whether each row of W sums to 1.
    """
    members, order = clients_with(state), sorted(clients)
    if order == members:
        return state
    # if all are new, the mean is of the models that are left
    stayed = [i for i in members if i in order] or members
    mean = torch.stack([state[of_client(i)] for i in stayed]).mean(dim=0)
    tensors = {name: t for name, t in state.items() if client_of(name) in (None, *order)}
    for i in sorted(set(order) - set(members)):
        tensors[of_client(i)] = mean.clone()
    places = [members.index(i) if i in members else None for i in order]
    return tensors | {"weights": rearranged(state["weights"], places, start, row_stochastic)}


def check_pull(rho: float, eta: float | None, n: int, row_stochastic: bool) -> None:
    """Raise RecipeError for a rho with which the pull alone diverges: its step (eta if the pull is
    multiplied by it, else 1) times rho and the Laplacian's largest eigenvalue, n if all weights are
    1, 2 for a row-stochastic W, must stay below 2.
    """
    step, largest = 1.0 if eta is None else eta, 2.0 if row_stochastic else n
    if rho * step * largest >= 2:
        by = "" if eta is None else f"{eta:g} (the learning rate) x "
        what = f"method.rho: {rho:g} x {by}{largest:g} (the pull's largest eigenvalue)"
        most = f"use a rho below {2 / (step * largest):.3g}"
        raise RecipeError("method", [f"{what} is not below 2, so models would diverge; {most}"])


def drawn_output(
    state: State, t: int, x: Mapping[ClientId, Tensor], rng: torch.Generator
) -> Tensors:
    """Return `<client>/output`: models of a uniformly drawn round, of an unknown number of rounds.
    New ones replace the former with probability 1 / (t + 1) (Theorem I).
    """
    drawn = float(torch.rand((), generator=rng)) < 1 / (t + 1)
    before = {i: None if drawn else state.get(of_client(i, "output")) for i in x}
    outputs = {i: x[i].clone() if old is None else old for i, old in before.items()}
    return by_client(outputs, "output")
