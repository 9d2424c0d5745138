"""FedProto: clients share the mean features of each class, and nothing else.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
Algorithm 1.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged
from coterie.models.generalising import PrototypeClassifier, PrototypeLayout
from coterie.models.layout import Layout


@dataclass(frozen=True)
class FedProto(Averaged):
    """Every client trains a network of its own on the error plus lambda times the distance of
    features to the prototype of their class, and sends the sum of its features by class and the
    numbers of examples, of whose means a prototype is the ratio.

    See `PrototypeClassifier` for the model. Predictions are those of the client's own head; the
    authors also report the class of the nearest prototype.
    """

    # lambda, weight of the distance to the prototypes
    strength: Annotated[float, Field(ge=0)] = 1.0

    def layout(self, position: int, base: Layout) -> Layout:
        return PrototypeLayout(strength=self.strength)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, prototypes: Tensors) -> Tensors:
        client.load(prototypes)
        for _ in range(self.steps(client)):
            client.step(SPECIALIST, on=client.train)
        assert isinstance(client.model, PrototypeClassifier)
        client.load(client.model.class_sums(client.batches(client.train)))
        return client.read(GENERALIST) | self.sample_count(client)
