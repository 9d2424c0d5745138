"""FedALA: each client mixes the global model into its own, value by value, before it trains.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023,
Algorithm 1.
"""

from dataclasses import dataclass
from math import ceil
from statistics import pstdev
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Named, Tensors, prefixed, under
from coterie.methods.templates import Averaged, OneAdapter, portion

WEIGHTS = "ala"  # W, which a client keeps
LOSSES, LEAST = 10, 0.1  # W has converged once as many losses deviate by less than this
MOST_EPOCHS = 100


@dataclass(frozen=True)
class FedALA(Averaged, OneAdapter):
    """theta_i <- theta_i + (theta - theta_i) W_i in the last p layers, and theta in the others,
    where W_i in [0, 1] descends on a share of the client's training data: for one epoch a round,
    the first time until its loss no longer changes. Then the client trains, and all is averaged.
    """

    joinable: ClassVar[bool] = True

    layers: Annotated[int, Field(ge=1)] = 1  # p, the last layers that are mixed
    # s, share of the training data that W learns on
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    weights_lr: Annotated[float, Field(gt=0)] = 1.0  # eta, W's learning rate

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        before = client.read(GENERALIST)
        client.load(theta)
        if client.iteration:  # at first both are the same
            self.blend(client, before, theta)
        self.local_iterations(client)
        return client.read(GENERALIST) | self.sample_count(client)

    def blend(self, client: Client, before: Tensors, theta: Tensors) -> None:
        """Learn W, and load the mixture that it makes of the client's model before and theta."""
        names = last(client.model.parameters_by_role[GENERALIST], self.layers)
        away = {name: theta[name].to(before[name]) - before[name] for name in names}
        kept = under(WEIGHTS, client.state)
        w = kept or {name: torch.ones_like(before[name]) for name in names}
        losses: list[float] = []
        data = client.independent_stream("ala")
        batches = ceil(portion(self.share, data.windows) / client.training.batch_size)
        for _ in range(1 if kept else MOST_EPOCHS):
            for _ in range(batches):
                client.load({name: before[name] + away[name] * w[name] for name in names})
                batch = client.draw(data)
                gradients = client.gradients(batch, GENERALIST)
                for name in names:
                    w[name].sub_(self.weights_lr * gradients[name] * away[name]).clamp_(0, 1)
            losses.append(client.loss(batch))
            if len(losses) > LOSSES and pstdev(losses[-LOSSES:]) < LEAST:
                break
        client.load({name: before[name] + away[name] * w[name] for name in names})
        client.state |= prefixed(WEIGHTS, w)


def last(named: Named, layers: int) -> list[str]:
    """Return the names of the parameters of the last modules that have any."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in named))[-layers:]
    return [name for name in named if name.rpartition(".")[0] in owners]
