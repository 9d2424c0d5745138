"""FedAvg-MoE: two experts and a router, all of them averaged (CoMiGS, Table 5)."""

from dataclasses import dataclass
from typing import ClassVar

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST, ROUTER, Role
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged, TwoExperts


@dataclass(frozen=True)
class FedAvgMoE(Averaged, TwoExperts):
    """Experts, attention LoRAs and routers are averaged uniformly every round."""

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, ROUTER)
    joinable: ClassVar[bool] = True

    @property
    def by_examples(self) -> bool:
        return self.updates == "simultaneous"  # alternating, routers take steps of their own

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        for _ in range(self.steps(client)):
            self.iterate(client)
        return client.read(*self.shared) | self.sample_count(client)
