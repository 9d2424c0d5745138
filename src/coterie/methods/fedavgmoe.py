"""FedAvg-MoE: two experts and a router, all of them averaged (CoMiGS, Table 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.aggregation import uniform_mean
from coterie.client import Client
from coterie.methods.method import Reader, TwoExperts
from coterie.protocol import Ask, ClientId, Round, State, task
from coterie.roles import GENERALIST, ROUTER, Role
from coterie.tensors import Tensors


@dataclass(frozen=True)
class FedAvgMoE(TwoExperts):
    """Experts, attention LoRAs and routers are averaged uniformly every round."""

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, ROUTER)

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return model.read(*self.shared)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, state)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients))
        return uniform_mean(replies) if replies else state

    @task
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        for _ in range(self.local_steps):
            self.iterate(client)
        return client.read(*self.shared)
