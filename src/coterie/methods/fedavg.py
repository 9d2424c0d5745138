"""FedAvg: every tensor is shared and averaged.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from coterie.client import Client
from coterie.cohort import Cohort
from coterie.methods.method import Averaged, OneAdapter
from coterie.protocol import ClientId, Replies, Sends, task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class FedAvg(Averaged, OneAdapter):
    """All LoRAs, or all of an image classifier, averaged every round."""

    universal: ClassVar[bool] = True

    by_examples = True

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        for _ in range(self.steps(client)):
            self.iterate(client)
        return client.read(GENERALIST) | self.size(client.data)

    def local_round_together(self, cohort: Cohort, theta: Mapping[ClientId, Tensors]) -> Replies:
        """`local_round` of many clients at once."""
        cohort.load(theta)
        for _ in range(self.local_steps):
            cohort.step()
        return {i: theta_i | self.size(cohort.site.data[i]) for i, theta_i in cohort.read().items()}
