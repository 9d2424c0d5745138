"""FedSA-LoRA: federated share-A LoRA.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", 2024
(arXiv:2410.01463), Section 3.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from coterie.client.client import Client
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.methods.templates import Averaged, OneAdapter
from coterie.models.layout import Layout


@dataclass(frozen=True)
class FedSALoRA(Averaged, OneAdapter):
    """Both matrices are trained; only the As, which learn the general part, are averaged."""

    joinable: ClassVar[bool] = True

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(super().layout(position, base), local_b=True)

    def iterate(self, client: Client) -> None:
        client.step(GENERALIST, SPECIALIST, on=client.train)
