"""FedSR: FedAvg of a network with a random representation that holds little but the label.

Nguyen, Torr and Lim, "FedSR: A Simple and Effective Domain Generalization Method for Federated
Learning", NeurIPS 2022.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from coterie.methods.fedavg import FedAvg
from coterie.models.generalising import StochasticLayout
from coterie.models.layout import Layout


@dataclass(frozen=True)
class FedSR(FedAvg):
    """FedAvg with the objective CE + alpha_L2R E|z|^2 + alpha_CMI KL(p(z|x) || r(z|y)) of a
    representation z ~ p(z|x).

    See `StochasticClassifier` for the model. The reference r is averaged with all else; in the
    authors' code it stays with the clients. The defaults are those of their command for PACS, where
    however |z| is not squared.
    """

    # alpha_L2R, weight of the squared norm of the representation
    l2: Annotated[float, Field(ge=0)] = 0.01
    # alpha_CMI, weight of the divergence from the class's reference distribution
    cmi: Annotated[float, Field(ge=0)] = 0.001

    def layout(self, position: int, base: Layout) -> Layout:
        return StochasticLayout(l2=self.l2, cmi=self.cmi)
