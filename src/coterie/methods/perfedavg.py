"""Per-FedAvg: a global model from which one gradient step leads to a good personal one.

Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import ClientId, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors, axpy
from coterie.methods.templates import Averaged, OneAdapter


@dataclass(frozen=True)
class PerFedAvg(Averaged, OneAdapter):
    """Clients descend w along (I - alpha H_i(w)) grad f_i(w - alpha grad f_i(w)), each term on a
    batch of its own, and w is averaged. A client's model is w after `adapt_steps` gradient steps
    on its training data.

    "first-order" leaves H out (FO); "hessian-free" takes the product H v as
    (grad f(w + delta v) - grad f(w - delta v)) / 2 delta (HF).
    """

    joinable: ClassVar[bool] = True
    server_steps: ClassVar[bool] = True  # a client adapts what it loads

    variant: Literal["first-order", "hessian-free"] = "first-order"  # how H is treated
    inner_lr: Annotated[float | None, Field(gt=0)] = None  # alpha; null: the experts' learning rate
    delta: Annotated[float, Field(gt=0)] = 1e-3  # delta of the Hessian-free product
    adapt_steps: Annotated[int, Field(ge=0)] = 1  # gradient steps from w to a client's model

    def alpha(self, client: Client) -> float:
        return client.training.experts.lr if self.inner_lr is None else self.inner_lr

    @task(Sends.UPDATE)
    def local_round(self, client: Client, w: Tensors) -> Tensors:
        client.load(w)
        for _ in range(self.steps(client)):
            w_i, alpha = client.flat(), self.alpha(client)
            inner = client.gradients_at({client.id: w_i}, "meta")[client.id]
            outer = client.gradient_at(w_i - alpha * inner, client.draw(client.train))
            if self.variant == "hessian-free":
                batch, shift = client.draw(client.train), self.delta * outer
                above = client.gradient_at(w_i + shift, batch)
                below = client.gradient_at(w_i - shift, batch)
                outer = outer - alpha * (above - below) / (2 * self.delta)
            client.descend(GENERALIST, outer, client.advance())
        return client.read(GENERALIST) | self.sample_count(client)

    def personal(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return self.download(state, clients)

    def loadable(self, client: Client, download: Tensors) -> Tensors:
        """Return w after gradient steps on the client's first batches of training data."""
        rows, adapted = client.training.batch_size, download
        for step in range(self.adapt_steps if download else 0):
            with client.borrowing(adapted):
                gradients = client.gradients(client.train.batch(step * rows, rows), GENERALIST)
            adapted = adapted | axpy(
                -self.alpha(client), gradients, {name: adapted[name] for name in gradients}
            )
        return adapted
