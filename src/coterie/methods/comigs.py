"""CoMiGS: Collaborative learning with a Mixture of Generalists and Specialists.

"On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists", Algorithm 1 (papers/comigs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from coterie.aggregation import uniform_mean
from coterie.client import Client
from coterie.methods.method import Reader, Routed
from coterie.models.adapter import Layout
from coterie.protocol import Ask, ClientId, Round, State, task
from coterie.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.tensors import Tensors

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class CoMiGS(Routed):
    """Generalists and attention LoRAs are averaged; specialists and token-level routers never leave their client.

    A bilevel problem by alternating first-order steps: experts descend on training data (eq. 3), routers on validation data (eq. 4).

    Args:
        generalists: g, shared experts per MLP block.
        specialists: s_i, local experts per MLP block: one number, or one per client in the order of the federation.
        router_every: tau, local iterations between updates of the router, counted over the whole run.
        router_steps: s, optimiser steps per update of the router, each on a fresh batch.
        router_data: Where those batches come from; "train" draws fresh training batches (the rows "-tr").
    """

    per_client: ClassVar[tuple[str, ...]] = ("specialists",)

    generalists: Annotated[int, Field(ge=0, description="g, shared experts per MLP block")] = 1
    specialists: Annotated[
        Count | tuple[Count, ...], Field(description="s_i, local experts per MLP block, one number or one per client")
    ] = 1
    router_every: Annotated[int, Field(ge=1, description="tau, local iterations between router updates")] = 30
    router_steps: Annotated[int, Field(ge=0, description="s, optimiser steps per router update")] = 10
    router_data: Annotated[Literal["valid", "train"], Field(description="data of the upper level")] = "valid"

    def layout(self, position: int, base: Layout) -> Layout:
        specialists = self.specialists if isinstance(self.specialists, int) else self.specialists[position]
        return self.mixture(base, self.generalists, specialists)

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return model.read(GENERALIST)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, state)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients))
        return uniform_mean(replies) if replies else state  # theta^G <- 1/N sum_i theta_i^G

    @task
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        client.load(theta_g)
        for _ in range(self.local_steps):
            client.step(GENERALIST, SPECIALIST, on=client.train)  # lower level, eq. 3
            if client.iteration % self.router_every == 0:
                for _ in range(self.router_steps):
                    client.step(ROUTER, on=client.valid if self.router_data == "valid" else client.train)  # upper level, eq. 4
        return client.read(GENERALIST)  # specialists and router never leave
