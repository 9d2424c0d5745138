"""FedAvg: every tensor is shared and averaged.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, Algorithm 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.client.blueprint import AnyClient
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged, OneAdapter


@dataclass(frozen=True)
class FedAvg(Averaged, OneAdapter):
    """All LoRAs, or all of an image classifier, averaged every round."""

    serves_unseen_clients: ClassVar[bool] = True

    by_examples = True

    @task(Sends.UPDATE, batched=True)
    def local_round(self, client: AnyClient, theta: Tensors) -> Tensors:
        client.load(theta)
        for _ in range(self.steps(client)):
            client.step(GENERALIST, on=client.train)
        return client.read(GENERALIST) | self.sample_count(client)
