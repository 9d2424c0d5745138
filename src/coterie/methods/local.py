"""Local: every client alone, without communication."""

from dataclasses import dataclass

from coterie.client import AnyClient
from coterie.methods.method import Alone, OneAdapter
from coterie.protocol import Sends, task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class Local(Alone, OneAdapter):
    """Each client trains its own LoRAs on its own data; nothing is ever sent."""

    by_examples = True

    @task(Sends.NOTHING, batched=True)
    def local_round(self, client: AnyClient, empty: Tensors) -> Tensors:
        for _ in range(self.steps(client)):
            client.step(GENERALIST, on=client.train)
        return {}
