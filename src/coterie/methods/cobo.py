"""CoBo: collaborators found by gradients, pair by pair.

"CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024, Algorithm 1 (papers/cobo).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.collaboration import (
    ascend_box,
    ascend_simplex,
    start_weights,
    weighted_differences_on,
)
from coterie.client.blueprint import AnyClient, Blueprint
from coterie.client.settings import Training
from coterie.core.protocol import Ask, ClientId, Replies, Round, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import by_client, clients_with, of_client
from coterie.core.tensors import Tensors
from coterie.methods.pairwise import (
    Joining,
    Pair,
    SamplingPairs,
    check_pull,
    drawn_output,
    rejoined,
)
from coterie.methods.templates import OneAdapter


@dataclass(frozen=True)
class CoBo(OneAdapter, SamplingPairs, Joining):
    """Pull clients towards those whose descent directions agree with theirs halfway between them.

    Outer problem: min_X sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2. Inner problem, one per
    pair: w_ij maximises w <grad f_i(z_ij), grad f_j(z_ij)> at the midpoint z_ij. A round is one
    iteration t of Algorithm 1, or `local_steps` of them between which models are not exchanged. A
    client that does not take part in a round keeps x_i and its row of W.

    Beside what `SamplingPairs` has, the state holds `round`; where the output is "uniform",
    `<client>/output`; of a client that joined late `<client>/joined`, until it has its x_i.
    """

    dynamic_membership: ClassVar[bool] = True

    # L, local iterations per round; 1 is the paper's algorithm
    local_steps: Annotated[int, Field(ge=1)] = 1
    rho: Annotated[float, Field(ge=0)] = 0.03  # rho, strength of the pull towards other clients
    # step size of the collaboration weights; 0 freezes them
    gamma: Annotated[float, Field(ge=0)] = 0.01
    # box: each weight in [0, 1], from 1; simplex: each row sums to 1
    projection: Literal["box", "simplex"] = "box"
    # gradient: the pull is scaled by the learning rate; decoupled: it is applied after the
    # optimiser step
    pull: Literal["gradient", "decoupled"] = "gradient"
    # final models: of the last round, or of one drawn uniformly (Theorem I)
    output: Literal["last", "uniform"] = "last"

    @property
    def row_stochastic(self) -> bool:
        return self.projection == "simplex"

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        eta = training.experts.lr if self.pull == "gradient" else None
        check_pull(self.rho, eta, len(clients), self.row_stochastic)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        x_0 = model.flat(GENERALIST)
        state = by_client({i: x_0.clone() for i in sorted(clients)})
        if self.output == "uniform":
            state |= by_client({i: x_0.clone() for i in sorted(clients)}, "output")
        weights = start_weights(len(clients), self.row_stochastic)
        return state | {"weights": weights, "round": torch.tensor(0)}

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        start = start_weights(len(clients), self.row_stochastic)
        return self.marked(rejoined(state, clients, start, self.row_stochastic), state)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        state = yield from self.started(state, clients)
        t, x = int(state["round"]), {i: state[of_client(i)] for i in clients_with(state)}
        weights = state["weights"]
        if self.gamma:  # line 2
            pairs = self.sample(t, sorted(clients), rng)
            weights = yield from self.client_selection(x, weights, pairs)
        pull = weighted_differences_on(x, weights, sorted(clients))
        requests = {i: {"pull": pull[i]} for i in clients}
        replies = yield Ask(self.descend, requests, lambda sent: {GENERALIST: sent["pull"]})
        x |= {i: reply[GENERALIST] for i, reply in replies.items()}  # lines 3 to 6
        if self.output == "uniform":  # line 7
            state = state | drawn_output(state, t, x, rng)
        return state | by_client(x) | {"weights": weights, "round": torch.tensor(t + 1)}

    def client_selection(
        self, x: Mapping[ClientId, Tensor], weights: Tensor, pairs: Sequence[Pair]
    ) -> Generator[Ask, Replies, Tensor]:
        """Return W after comparing the pairs at their midpoints z_ij: lines 9 to 17."""
        scores = yield from self.compared(x, list(x), pairs)
        ascend = ascend_simplex if self.row_stochastic else ascend_box
        return ascend(weights, scores, self.gamma)  # eq. 4

    @task(batched=True)
    def descend(self, client: AnyClient, pull: Tensors) -> Tensors:
        """x_i <- x_i - eta (g_i(x_i) + rho sum_k w_ik (x_i - x_k)), with the pull as received."""
        for _ in range(self.steps(client)):
            eta = client.lr if self.pull == "gradient" else 1.0
            client.step(GENERALIST, on=client.train)
            client.shift(-eta * self.rho, pull["pull"])
        return {GENERALIST: client.flat(into=pull["pull"])}  # the pull's memory is free now

    def personal(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        output = {i: state.get(of_client(i, "output")) for i in clients}
        return {i: {} if x is None else {GENERALIST: x} for i, x in output.items()}
