"""Local: every client alone, without communication."""

from dataclasses import dataclass

from coterie.client import Client
from coterie.methods.method import Alone, OneAdapter
from coterie.protocol import task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class Local(Alone, OneAdapter):
    """Each client trains its own LoRAs on its own data; nothing is ever sent."""

    @task
    def local_round(self, client: Client, nothing: Tensors) -> Tensors:
        for _ in range(self.local_steps):
            client.step(GENERALIST, on=client.train)
        return {}
