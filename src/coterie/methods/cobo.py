"""CoBo: collaborators found by gradients, pair by pair.

"CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024, Algorithm 1 (papers/cobo).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation import (
    agreement,
    ascend_box,
    ascend_simplex,
    midpoints,
    pulls,
    rearranged,
    start_weights,
)
from coterie.client.client import Client
from coterie.client.interfaces import AnyClient
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, nothing, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.base import Reader
from coterie.methods.templates import Comparing, OneAdapter

Pair = tuple[ClientId, ClientId]


@dataclass(frozen=True)
class CoBo(OneAdapter, Comparing):
    """Clients are pulled towards those whose descent directions agree with theirs halfway between
    their models.

    Outer problem: min_X sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2. Inner problem, one per
    pair: w_ij maximises w <grad f_i(z_ij), grad f_j(z_ij)> at the midpoint z_ij. A round is one
    iteration t of Algorithm 1, or `local_steps` of them between which models are not exchanged. A
    client that does not take part in a round keeps x_i and its row of W.

    The server's state holds `<client>/generalist`, (d,), every x_i; `weights`, (n, n), W over the
    clients in the order of their ids; `round`; where the output is "uniform", `<client>/output`;
    and of a client that joined late `<client>/joined`, until it has its x_i.

    Args:
        rho: Strength of the pull.
        gamma: Step size of the weights; 0 freezes them.
        projection: "box": each w_ij in [0, 1], symmetric, from 1; "simplex": each row on the
            probability simplex, from 1 / (n - 1).
        pairs: Which pairs a round compares: "all"; "constant": n - 1 on average; "time": each with
            probability min(1, c / (t + 1)); "mixed": "constant" for the first part of the run, then
            "time".
        pair_rate: c; None for 2 switch T / n, with which the probability of a pair falls from where
            the constant one was. At the paper's 40,000 rounds of 8 clients a pair is then compared
            about 980 times (authors' code: 544); with c = 1 it would be 204.
        switch: The first part of "mixed", as a share of all rounds (the authors' code: 800 of
            40,000).
        pull: "gradient": the pull is part of the gradient, so that its step is eta rho;
            "decoupled": it follows the optimiser's step and is not multiplied by the learning rate
            (language models).
        output: "last": the models after the last round; "uniform": those of a round drawn uniformly
            (Theorem I).
        exchange_mb: Most megabytes of midpoints in flight at once: more pairs are compared in
            several exchanges.
    """

    elastic: ClassVar[bool] = True

    local_steps: Annotated[
        int, Field(ge=1, description="L, local iterations per round; 1 is the paper's algorithm")
    ] = 1
    rho: Annotated[float, Field(ge=0, description="strength of the pull between collaborators")] = (
        0.03
    )
    gamma: Annotated[
        float, Field(ge=0, description="step size of the collaboration weights; 0 freezes them")
    ] = 0.01
    projection: Annotated[
        Literal["box", "simplex"],
        Field(description="box: each weight in [0, 1]; simplex: each row sums to 1"),
    ] = "box"
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
    pull: Annotated[
        Literal["gradient", "decoupled"],
        Field(description="pull times the learning rate, or after the optimiser"),
    ] = "gradient"
    output: Annotated[
        Literal["last", "uniform"],
        Field(description="models of the last round, or of one drawn uniformly"),
    ] = "last"
    exchange_mb: Annotated[
        float, Field(gt=0, description="megabytes of midpoints and gradients in flight at once")
    ] = 256.0

    def check(self, model: Reader, clients: Sequence[ClientId], training: Training) -> None:
        """Refuse a rho at which the pull alone diverges: its step times the largest eigenvalue
        of L must stay below 2.
        """
        eta = training.experts.lr if self.pull == "gradient" else 1.0
        largest = (
            len(clients) if self.projection == "box" else 2.0
        )  # of L, when all weights are 1; of a row-stochastic one
        if self.rho * eta * largest >= 2:
            step = f"{eta:g} (the learning rate) x " if self.pull == "gradient" else ""
            what = (
                f"method.rho: {self.rho:g} x {step}{largest:g} (the pull's largest eigenvalue) "
                f"is not below 2, so models would diverge"
            )
            raise RecipeError("method", [f"{what}; use a rho below {2 / (eta * largest):.3g}"])

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        x_0 = model.flat(GENERALIST)
        state = {f"{i}/{GENERALIST}": x_0.clone() for i in sorted(clients)}
        if self.output == "uniform":
            state |= {f"{i}/output": x_0.clone() for i in sorted(clients)}
        return state | {
            "weights": start_weights(len(clients), self.shares),
            "round": torch.tensor(0),
        }

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        """Who leaves takes its model and its row of W along; who joins starts from the mean of
        the others' models.
        """
        known, order = _known(state), sorted(clients)
        if order == known:
            return state
        stayed = [
            i for i in known if i in order
        ] or known  # if all are new, the models of those who left are what there is
        mean = torch.stack([state[f"{i}/{GENERALIST}"] for i in stayed]).mean(dim=0)
        kept = {
            name: tensor
            for name, tensor in state.items()
            if name.partition("/")[0] in order or "/" not in name
        }
        for i in sorted(set(order) - set(known)):
            kept |= {f"{i}/{GENERALIST}": mean.clone(), f"{i}/joined": torch.tensor(True)}
        places = [known.index(i) if i in known else None for i in order]
        return kept | {"weights": rearranged(state["weights"], places, self.shares)}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        known, here, t = _known(state), sorted(clients), int(state["round"])
        x, weights = {i: state[f"{i}/{GENERALIST}"] for i in known}, state["weights"]
        if newcomers := [i for i in here if f"{i}/joined" in state]:
            started = yield Ask(self.start, {i: {GENERALIST: x[i]} for i in newcomers}, nothing)
            state = {
                name: tensor
                for name, tensor in state.items()
                if name not in {f"{i}/joined" for i in started}
            }
        scores = torch.zeros_like(weights)  # lines 9 to 17, Client-Selection
        for pairs in self._exchanges(self._sample(t, here, rng), x):
            scores += agreement(known, (yield Ask(self.midpoint_gradients, midpoints(x, pairs))))
        if self.gamma:
            weights = self._ascend(weights, scores)
        pulled = pulls(
            [x[i] for i in known], weights, [known.index(i) for i in here]
        )  # lines 3 to 5, Model-Training
        pull = dict(zip(here, pulled, strict=True))
        replies = yield Ask(
            self.descend,
            {i: {"pull": pull[i]} for i in clients},
            lambda sent: {GENERALIST: sent["pull"]},
        )
        x |= {i: reply[GENERALIST] for i, reply in replies.items()}
        models = {f"{i}/{GENERALIST}": x[i] for i in known}
        return (
            state
            | models
            | self._output(state, t, x, rng)
            | {"weights": weights, "round": torch.tensor(t + 1)}
        )

    @task(Sends.NOTHING)
    def start(self, client: Client, x: Tensors) -> Tensors:
        """A client that joins: it takes over the mean of the others' models."""
        client.load(x)
        return {}

    @task(batched=True)
    def descend(self, client: AnyClient, pull: Tensors) -> Tensors:
        """x_i <- x_i - eta (g_i(x_i) + rho sum_k w_ik (x_i - x_k)), the pull as the server found
        it before the round.
        """
        for _ in range(self.steps(client)):
            eta = client.lr if self.pull == "gradient" else 1.0
            client.step(GENERALIST, on=client.train)
            client.shift(-eta * self.rho, pull["pull"])
        return {GENERALIST: client.flat(into=pull["pull"])}  # the pull's memory is free now

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        known = _known(state)
        found = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        here = [k for k, i in enumerate(clients) if i in known]
        places = [known.index(clients[k]) for k in here]
        found[torch.tensor(here)[:, None], torch.tensor(here)] = state["weights"][
            torch.tensor(places)[:, None], torch.tensor(places)
        ]
        return found

    @property
    def shares(self) -> bool:
        return self.projection == "simplex"

    def personal(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return {
            i: {GENERALIST: state[f"{i}/output"]} if f"{i}/output" in state else {} for i in clients
        }

    def _sample(self, t: int, order: Sequence[ClientId], rng: torch.Generator) -> list[Pair]:
        """The pairs i < j, of those that take part, that round t compares."""
        if not self.gamma:  # the weights are frozen
            return []
        every = list(combinations(order, 2))
        if self.pairs == "all":
            return every
        constant = self.pairs == "constant" or (
            self.pairs == "mixed" and t < self.switch * self.rounds
        )
        # Both (i, j) and (j, i) are drawn with probability 1/n, which makes n - 1 pairs a round.
        often = 2 / len(order)
        rate = often * self.switch * self.rounds if self.pair_rate is None else self.pair_rate
        probability = min(1.0, often if constant else rate / (t + 1))
        drawn = torch.rand(len(every), generator=rng) < probability
        return [pair for pair, is_drawn in zip(every, drawn.tolist(), strict=True) if is_drawn]

    def _exchanges(
        self, pairs: Sequence[Pair], x: Mapping[ClientId, Tensor]
    ) -> Iterator[Sequence[Pair]]:
        """The pairs in as few parts as memory allows: each holds a midpoint and two gradients."""
        if pairs:
            bytes_each = 3 * 4 * next(iter(x.values())).numel()
            size = max(1, math.floor(self.exchange_mb * 1e6 / bytes_each))
            for start in range(0, len(pairs), size):
                yield pairs[start : start + size]

    def _ascend(self, weights: Tensor, scores: Tensor) -> Tensor:
        """One step of the inner problem, eq. 1."""
        return (ascend_box if self.projection == "box" else ascend_simplex)(
            weights, scores, self.gamma
        )

    def _output(
        self, state: State, t: int, x: Mapping[ClientId, Tensor], rng: torch.Generator
    ) -> State:
        """A uniformly drawn iterate, without knowing how many there will be: each replaces the
        one before with probability 1 / (t + 1).
        """
        if self.output == "last":
            return {}
        drawn = float(torch.rand((), generator=rng)) < 1 / (t + 1)
        return {
            f"{i}/output": value.clone() if drawn else state.get(f"{i}/output", value.clone())
            for i, value in x.items()
        }


def _known(state: State) -> list[ClientId]:
    """The clients of whom the server has a model, in the order of the weights."""
    return sorted(
        name.removesuffix(f"/{GENERALIST}") for name in state if name.endswith(f"/{GENERALIST}")
    )
