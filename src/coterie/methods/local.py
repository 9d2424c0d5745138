"""Local: every client alone, without communication."""

from collections.abc import Mapping
from dataclasses import dataclass

from coterie.client import Client
from coterie.cohort import Cohort
from coterie.methods.method import Alone, OneAdapter
from coterie.protocol import ClientId, Replies, Sends, task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class Local(Alone, OneAdapter):
    """Each client trains its own LoRAs on its own data; nothing is ever sent."""

    by_examples = True

    @task(Sends.NOTHING)
    def local_round(self, client: Client, empty: Tensors) -> Tensors:
        for _ in range(self.steps(client)):
            client.step(GENERALIST, on=client.train)
        return {}

    def local_round_together(self, cohort: Cohort, empty: Mapping[ClientId, Tensors]) -> Replies:
        """`local_round` of many clients at once."""
        for _ in range(self.local_steps):
            cohort.step()
        return {i: {} for i in cohort.ids}
