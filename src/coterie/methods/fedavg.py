"""FedAvg: every tensor is shared and averaged.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from coterie.aggregation import uniform_mean
from coterie.client import Client
from coterie.methods.method import OneAdapter, Reader
from coterie.protocol import Ask, ClientId, Round, State, task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class FedAvg(OneAdapter):
    """All LoRAs averaged uniformly every round."""

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return model.read(GENERALIST)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, state)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients))
        return uniform_mean(replies) if replies else state

    @task
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        for _ in range(self.local_steps):
            client.step(GENERALIST, on=client.train)
        return client.read(GENERALIST)
