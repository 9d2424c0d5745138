"""Local-MoE: every client alone, with two experts and a router (CoMiGS, Table 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie.client import Client
from coterie.methods.method import Reader, TwoExperts
from coterie.protocol import Ask, ClientId, Round, State, task
from coterie.tensors import Tensors


@dataclass(frozen=True)
class LocalMoE(TwoExperts):
    """Nothing is ever sent."""

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return {}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        yield Ask(self.local_round, {i: {} for i in clients})
        return state

    @task
    def local_round(self, client: Client, nothing: Tensors) -> Tensors:
        for _ in range(self.local_steps):
            self.iterate(client)
        return {}
