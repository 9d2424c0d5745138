"""FedRep: a shared representation, trained through each client's own head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.protocol import ClientId
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.methods.fedper import FedPer
from coterie.methods.templates import check_two_phases, first_phase


@dataclass(frozen=True)
class FedRep(FedPer):
    """In each round a client first trains its head on the received body, then the body under that
    head; bodies are averaged.
    """

    # share of a round's local iterations that train the head
    head_share: Annotated[float, Field(ge=0, le=1)] = 0.5

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        check_two_phases(self, self.head_share)

    def local_iterations(self, client: Client) -> None:
        steps = self.steps(client)
        first = first_phase(self.head_share, steps)
        for step in range(steps):
            client.step(SPECIALIST if step < first else GENERALIST, on=client.train)
