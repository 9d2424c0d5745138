"""Local: every client alone, without communication."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie.client import Client
from coterie.methods.method import OneAdapter, Reader
from coterie.protocol import Ask, ClientId, Round, State, task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class Local(OneAdapter):
    """Each client trains its own LoRAs on its own data; nothing is ever sent."""

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return {}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        yield Ask(self.local_round, {i: {} for i in clients})
        return state

    @task
    def local_round(self, client: Client, nothing: Tensors) -> Tensors:
        for _ in range(self.local_steps):
            client.step(GENERALIST, on=client.train)
        return {}
