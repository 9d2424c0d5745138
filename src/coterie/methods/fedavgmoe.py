"""FedAvg-MoE: two experts and a router, all of them averaged (CoMiGS, Table 5)."""

from dataclasses import dataclass
from typing import ClassVar

from coterie.core.roles import GENERALIST, ROUTER, Role
from coterie.methods.templates import Averaged, TwoExperts


@dataclass(frozen=True)
class FedAvgMoE(Averaged, TwoExperts):
    """Experts, attention LoRAs and routers are averaged uniformly every round."""

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, ROUTER)
    joinable: ClassVar[bool] = True

    @property
    def by_examples(self) -> bool:
        return self.updates == "simultaneous"  # alternating, routers take steps of their own
