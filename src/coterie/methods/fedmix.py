"""FedMix: a mixture of a few experts, all of which every client gets.

Reisser et al., "Federated Mixture of Experts", 2021, as Farhat et al. compare with it: its gate
sees the same embeddings as DDOME's.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import Tensors
from coterie.methods.pools import WholePool
from coterie.models.layout import Layout, PoolLayout


@dataclass(frozen=True)
class FedMix(WholePool):
    """M = K: every client trains all experts and the gate by one joint loss, without anchors."""

    experts: Annotated[int, Field(ge=1)] = 2  # M = K, experts that every client gets
    # which experts classify a sample: the best one, or all, as in its paper
    answer: Literal["best", "mixture"] = "mixture"

    @property
    def size_of_pool(self) -> int:
        return self.experts

    def layout(self, position: int, base: Layout) -> PoolLayout:
        return PoolLayout(
            pool=self.experts, chosen=self.experts, answer=self.answer, start=self.initial
        )

    @task(Sends.UPDATE)
    def train(self, client: Client, received: Tensors) -> Tensors:
        """Do a client's local iterations, from all experts and the gate."""
        client.load(received)
        for _ in range(self.steps(client)):
            client.step(GATE, EXPERT, on=client.train)
        return self.trained(client)
