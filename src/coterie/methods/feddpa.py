"""FedDPA: a global and a local adapter, weighed by how near a client's inputs are to its training
data.

Yang et al., "Dual-Personalizing Adapter for Federated Foundation Models", NeurIPS 2024
(arXiv:2403.19211).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch.nn.functional import normalize

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.protocol import ClientId, Sends, task
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.methods.finetunedfedavg import FinetunedFedAvg
from coterie.methods.templates import check_two_phases, first_phase
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

ALPHA = "feddpa/alpha"  # the local adapter's weight in use, which a client keeps
NONE = -1e4  # the logarithm of a weight that is 0


@dataclass(frozen=True)
class FedDPA(FinetunedFedAvg):
    """The generalist is trained by itself and averaged; the specialist beside it, which is frozen
    then: in every round (FedDPA-T), or in the last rounds (FedDPA-F).

    The state is that of fine-tuned FedAvg.
    """

    # share of the rounds after which each client trains alone
    start: Annotated[float, Field(ge=0, le=1)] = 0.8
    # share of a round's local iterations that train the local adapter before the global one
    local_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    # the local adapter's weight while it is trained
    local_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    # lambda, the local adapter's largest weight in use
    most_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    # S, training windows that validation data are compared with
    instances: Annotated[int, Field(ge=1)] = 5

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(base, generalists=1, specialists=1, biased=True, top_k=2, balance="none")

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        check_two_phases(self, self.local_share)

    def loadable(self, client: Client, download: Tensors) -> Tensors:
        """Return a download; where no local adapter is trained yet, the global one is alone."""
        return download if client.iteration else download | weights(client, 0.0)

    def iterate(self, client: Client) -> None:
        """Train the local adapter."""
        client.load(weights(client, self.local_weight))
        client.step(SPECIALIST, on=client.train)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:  # type: ignore[override]
        client.load(theta)
        steps = self.steps(client)
        local = first_phase(self.local_share, steps)
        for _ in range(local):
            self.iterate(client)
        client.load(weights(client, 0.0))
        for _ in range(steps - local):
            client.step(GENERALIST, on=client.train)
        client.load(weights(client, self.similarity(client) if local else 0.0))
        return client.read(GENERALIST) | self.sample_count(client)

    @task(Sends.NOTHING)
    def finetune(self, client: Client, mean: Tensors) -> Tensors:  # type: ignore[override]
        client.load(mean)
        self.local_iterations(client)
        client.load(weights(client, self.similarity(client)))
        return {}

    def similarity(self, client: Client) -> float:
        """Return alpha: lambda times the mean cosine of the base's embeddings of validation and of
        training windows, at least 0.
        """
        if ALPHA not in client.state:
            assert isinstance(client.model, LanguageModel)
            near, valid = client.batches(client.train, self.instances), client.batches(client.valid)
            means = [
                normalize(torch.cat([*map(client.model.embedding, batches)]), dim=1).mean(dim=0)
                for batches in (near, valid)
            ]
            client.state[ALPHA] = self.most_weight * (means[0] @ means[1]).clamp(min=0)
        return float(client.state[ALPHA])


def weights(client: Client, alpha: float) -> Tensors:
    """Return routers that give the local adapter alpha for all tokens, the global one the rest."""
    bias = torch.tensor([1 - alpha, alpha]).log().clamp(min=NONE)
    routers = client.read(ROUTER).items()
    return {name: torch.zeros_like(t) if t.dim() == 2 else bias for name, t in routers}
