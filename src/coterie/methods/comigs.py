"""CoMiGS: Collaborative learning with a Mixture of Generalists and Specialists.

"On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists", Algorithm 1 (papers/comigs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation import agreement, ascend_simplex, midpoints, mixtures, uniform_mean
from coterie.client import Client
from coterie.methods.method import Comparing, Reader, Routed
from coterie.models.adapter import Layout
from coterie.protocol import Ask, ClientId, Round, State, task
from coterie.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.tensors import Tensors

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class CoMiGS(Routed, Comparing):
    """Generalists and attention LoRAs are averaged; specialists and token-level routers never leave their client.

    A bilevel problem by alternating first-order steps: experts descend on training data (eq. 3), routers on validation data (eq. 4).

    Args:
        generalists: g, shared experts per MLP block.
        specialists: s_i, local experts per MLP block: one number, or one per client in the order of the federation.
        router_every: tau, local iterations between updates of the router, counted over the whole run.
        router_steps: s, optimiser steps per update of the router, each on a fresh batch.
        router_data: Where those batches come from; "train" draws fresh training batches (the rows "-tr").
        aggregate: "mean": theta^G <- 1/N sum_i theta_i^G. "cobo", not in the paper: theta_i^G <- sum_j w_ij theta_j^G, where each row of W
            learns on the simplex, from 1/N, by how well gradients agree halfway between two clients' generalists (CoBo, Remark 1), so that
            unlike groups of users need not share one generalist.
        gamma: Step size of W.

    The server's state is theta^G by its names; with "cobo" it is `<client>/generalist`, (d,) each, and `weights`, (N, N), in the order of
    the clients' ids.
    """

    per_client: ClassVar[tuple[str, ...]] = ("specialists",)

    generalists: Annotated[int, Field(ge=0, description="g, shared experts per MLP block")] = 1
    specialists: Annotated[
        Count | tuple[Count, ...], Field(description="s_i, local experts per MLP block, one number or one per client")
    ] = 1
    router_every: Annotated[int, Field(ge=1, description="tau, local iterations between router updates")] = 30
    router_steps: Annotated[int, Field(ge=0, description="s, optimiser steps per router update")] = 10
    router_data: Annotated[Literal["valid", "train"], Field(description="data of the upper level")] = "valid"
    aggregate: Annotated[
        Literal["mean", "cobo"], Field(description="generalists: one mean for all, or each client's own by collaboration weights")
    ] = "mean"
    gamma: Annotated[float, Field(ge=0, description="step size of the collaboration weights, with aggregate cobo")] = 0.05

    def layout(self, position: int, base: Layout) -> Layout:
        specialists = self.specialists if isinstance(self.specialists, int) else self.specialists[position]
        return self.mixture(base, self.generalists, specialists)

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        if self.aggregate == "mean":
            return model.read(GENERALIST)
        n = len(clients)
        return {f"{i}/{GENERALIST}": model.flat(GENERALIST) for i in sorted(clients)} | {"weights": torch.full((n, n), 1 / n).double()}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        if self.aggregate == "mean":
            return dict.fromkeys(clients, state)
        return {i: {GENERALIST: state[f"{i}/{GENERALIST}"]} for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients))
        if self.aggregate == "mean":
            return uniform_mean(replies) if replies else state  # theta^G <- 1/N sum_i theta_i^G
        theta, order = {i: replies[i][GENERALIST] for i in sorted(replies)}, sorted(clients)
        compared = yield Ask(self.midpoint_gradients, midpoints(theta, combinations(theta, 2)))
        weights = ascend_simplex(state["weights"], agreement(order, compared), self.gamma)
        here = torch.tensor([order.index(i) for i in theta], dtype=torch.int64)  # whoever did not answer is left out, as of a mean
        shares = weights[here][:, here] + 1e-12 * torch.eye(len(here), dtype=torch.float64)
        mixed = mixtures(list(theta.values()), shares / shares.sum(dim=1, keepdim=True)) if theta else ()
        return state | {f"{i}/{GENERALIST}": own for i, own in zip(theta, mixed, strict=True)} | {"weights": weights}

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor | None:
        if self.aggregate == "mean":
            return None
        places = torch.tensor([sorted(clients).index(i) for i in clients])
        return state["weights"][places][:, places]

    @task
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        client.load(theta_g)
        for _ in range(self.steps(client)):
            client.step(GENERALIST, SPECIALIST, on=client.train)  # lower level, eq. 3
            if client.iteration % self.router_every == 0:
                for _ in range(self.router_steps):
                    client.step(ROUTER, on=client.valid if self.router_data == "valid" else client.train)  # upper level, eq. 4
        if self.aggregate == "cobo":
            return {GENERALIST: client.flat(GENERALIST)}
        return client.read(GENERALIST)  # specialists and router never leave
