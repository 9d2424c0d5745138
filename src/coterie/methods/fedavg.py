"""FedAvg: every tensor is shared and averaged.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from dataclasses import dataclass

from coterie.client import Client
from coterie.methods.method import Averaged, OneAdapter
from coterie.protocol import task
from coterie.roles import GENERALIST
from coterie.tensors import Tensors


@dataclass(frozen=True)
class FedAvg(Averaged, OneAdapter):
    """All LoRAs averaged uniformly every round."""

    @task
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        for _ in range(self.local_steps):
            client.step(GENERALIST, on=client.train)
        return client.read(GENERALIST)
