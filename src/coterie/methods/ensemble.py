"""Average ensembles: models trained by FedAvg with different seeds, whose probabilities are
averaged.

Lakshminarayanan et al., "Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles", NeurIPS 2017, as Farhat et al. compare with it (DDOME, Section 5).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import EXPERT
from coterie.core.tensors import Tensors
from coterie.methods.pools import WholePool
from coterie.models.layout import Layout, PoolLayout


@dataclass(frozen=True)
class Ensemble(WholePool):
    """Independent models: each has its own order of the data, and its own initial values unless
    they are pretrained.
    """

    models: Annotated[int, Field(ge=1)] = 2  # number of models
    # initial values of the models: random, from the common expert, or auto: from the common expert
    # where it fits
    initial: Literal["random", "common", "auto"] = "auto"

    @property
    def size_of_pool(self) -> int:
        return self.models

    def layout(self, position: int, base: Layout) -> PoolLayout:
        start = self.initial
        return PoolLayout(
            pool=self.models, chosen=self.models, mixture="mean", answer="mixture", start=start
        )

    @task(Sends.UPDATE)
    def train(self, client: Client, received: Tensors) -> Tensors:
        """Do a client's local iterations with each model, one after the other."""
        reply: Tensors = {}
        began = client.iteration
        for name in sorted(received):
            client.load({name: received[name]})
            client.reset_optimizer(EXPERT)
            # all models see the same learning rates
            client.state["iteration"] = torch.tensor(began)
            for _ in range(self.steps(client)):
                client.step(EXPERT, on=client.independent_stream(name))
            reply |= self.trained(client)
        return reply
