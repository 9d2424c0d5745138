"""FedProx: FedAvg whose clients are held near the model that they received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged, OneAdapter, pull


@dataclass(frozen=True)
class FedProx(Averaged, OneAdapter):
    """Each client minimises f_i(w) + mu/2 |w - w_t|^2 from w_t; the mean of the results is w_{t+1}.

    DDOME prints the norm without its square. Running statistics are averaged, but not held. For mu
    the authors take the best of 0.001, 0.01, 0.1 and 1 on each data set.
    """

    serves_unseen_clients: ClassVar[bool] = True

    # mu, strength of the penalty that keeps a client near the model that it received; 0: fedavg
    mu: Annotated[float, Field(ge=0)] = 0.01

    by_examples = True

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        received = client.read(GENERALIST)
        for _ in range(self.steps(client)):
            # the gradient of the proximal term of eq. 2
            client.step(GENERALIST, on=client.train, extra=lambda: pull(self.mu, client, received))
        return client.read(GENERALIST) | self.sample_count(client)
