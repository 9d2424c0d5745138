"""Local: every client alone, without communication."""

from dataclasses import dataclass

from coterie.client.blueprint import AnyClient
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Alone, OneAdapter


@dataclass(frozen=True)
class Local(Alone, OneAdapter):
    """Each client trains its own LoRAs on its own data; nothing is sent."""

    by_examples = True

    @task(Sends.NOTHING, batched=True)
    def local_round(self, client: AnyClient, empty: Tensors) -> Tensors:
        for _ in range(self.steps(client)):
            client.step(GENERALIST, on=client.train)
        return {}
