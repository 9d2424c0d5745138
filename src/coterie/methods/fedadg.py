"""FedADG: FedAvg whose clients align their features to a distribution learned by a generator.

Zhang et al., "Federated Learning with Domain Generalization", 2021 (arXiv:2111.10487).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged, OneAdapter, portion
from coterie.models.generalising import AdversarialLayout
from coterie.models.layout import Layout

DISCRIMINATOR = "discriminator"  # a client's own, between rounds


@dataclass(frozen=True)
class FedADG(Averaged, OneAdapter):
    """The feature extractor, the classifier and the generator are averaged; the discriminator stays
    with its client, as in the paper.

    See `AdversarialClassifier` for the model and its losses. A round begins with classification
    alone. Reconstructed from the paper and the authors' code for PACS (their code for VLCS never
    trains the generator), without their smoothed labels, learning rates of each part and choice of
    the best epoch, so that the rows of a comparison share them; and all parts step at once, on the
    same batch. Their code trains classification alone for 3 of 10 epochs, and has hidden layers
    1,024 to 4,096 wide, for 4,096 features.
    """

    serves_unseen_clients: ClassVar[bool] = True

    # share of the adversarial loss in the feature extractor's
    align: Annotated[float, Field(ge=0, le=1)] = 0.15
    # share of a round's local iterations that use the classification loss alone
    alone: Annotated[float, Field(ge=0, le=1)] = 0.3
    # width of the noise, the projection and the adversaries' hidden layers
    hidden: Annotated[int, Field(ge=1)] = 128

    def layout(self, position: int, base: Layout) -> Layout:
        return AdversarialLayout(align=self.align, hidden=self.hidden)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        discriminator = (
            {SPECIALIST: client.state[DISCRIMINATOR]} if DISCRIMINATOR in client.state else {}
        )
        client.load(theta | discriminator)
        steps = self.steps(client)
        alone = int(portion(self.alone, steps))
        for step in range(steps):
            client.step(GENERALIST, *([SPECIALIST] if step >= alone else []), on=client.train)
        # kept under a name of its own, also by stateless clients
        client.state[DISCRIMINATOR] = client.flat(SPECIALIST)
        return client.read(GENERALIST) | self.sample_count(client)
