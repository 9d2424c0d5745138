"""pFedMoE: a shared and a local expert with a local gate, trained together.

Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous
Personalized Federated Learning", 2024 (arXiv:2402.01350), Algorithm 1; its feature extractors are
the two LoRA experts of every MLP here, as CoMiGS, Table 2, compares it.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.client.client import Client
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.methods.templates import Averaged, Routed
from coterie.models.layout import Layout


@dataclass(frozen=True)
class PFedMoE(Averaged, Routed):
    """The shared expert is averaged, local expert and router stay; one step on the training loss
    updates all three (their eq. 5 to 7).
    """

    joinable: ClassVar[bool] = True
    by_examples = True

    def layout(self, position: int, base: Layout) -> Layout:
        return self.mixture(base, generalists=1, specialists=1)

    def iterate(self, client: Client) -> None:
        client.step(GENERALIST, SPECIALIST, ROUTER, on=client.train)
