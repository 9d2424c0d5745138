"""Methods on digits, run round by round, and the network that they train, written out."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import SGD, Training
from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, drive
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.data.examples import Examples
from coterie.data.federation import ClientData, Federation
from coterie.engines.inprocess import InProcess
from coterie.methods import Method
from coterie.models.classifier import Classifier
from coterie.models.generalising import PrototypeClassifier, PrototypeLayout
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape

HIDDEN, ROWS, LR, SEED = 6, 4, 0.2, 3
MLP = NetworkShape("mlp", (1, 8, 8), 10, (HIDDEN,))
CNN = NetworkShape("cnn", (1, 8, 8), 10, width=2)


class Run:
    """A method on a federation of digits, round by round."""

    def __init__(
        self,
        method: Method,
        federation: Federation,
        momentum: float = 0.0,
        shape: NetworkShape = MLP,
        batch_size: int = ROWS,
    ) -> None:
        self.method, self.federation, self.ids = method, federation, tuple(federation.clients)
        layouts = {i: method.layout(k, Layout()) for k, i in enumerate(self.ids)}

        def build(layout: Layout) -> Classifier:
            if isinstance(layout, PrototypeLayout):
                return PrototypeClassifier(shape, layout)
            return Classifier(shape, local_part=layout.local_part)

        training = Training(
            batch_size=batch_size, experts=SGD(optimiser="sgd", lr=LR, momentum=momentum)
        )
        self.site = Site(
            build,
            layouts,
            federation.clients,
            training,
            SEED,
            method.total_iterations,
        )
        self.engine = InProcess(self.site, method)
        self.blueprint = Blueprint(build, layouts, SEED, federation.clusters)
        self.method.check(self.blueprint, self.ids, training)
        self.state = method.init(self.blueprint, self.ids)
        self.messages: list[tuple[str, Mapping[ClientId, Tensors], Replies]] = []

    def rounds(self, count: int = 1, clients: Sequence[ClientId] | None = None) -> "Run":
        for _ in range(count):
            self.state = drive(
                self.method.round(
                    self.state, clients or self.ids, torch.Generator().manual_seed(0)
                ),
                self._answer,
            )
        return self

    def _answer(self, ask: Ask, phase: int) -> Replies:
        replies = self.engine.answer(ask, 0, phase)
        self.messages.append((ask.name, ask.to, replies))
        return replies

    @property
    def models(self) -> dict[ClientId, Tensor]:
        return {i: self.engine.states()[i][f"parameters/{GENERALIST}"].clone() for i in self.ids}

    def client(self, i: ClientId) -> Client:
        return self.site.client(i, dict(self.engine.states()[i]))


# The naive side: the network, its gradient and its optimiser written out, on batches that the data
# give directly.


def loss(x: Tensor, batch: Examples) -> Tensor:
    """The mean cross-entropy of the network whose parameters, (d,), are x."""
    parts = torch.split(x, [HIDDEN * 64, HIDDEN, 10 * HIDDEN, 10])
    hidden = torch.relu(batch.x.flatten(1) @ parts[0].view(HIDDEN, 64).T + parts[1])
    return cross_entropy(hidden @ parts[2].view(10, HIDDEN).T + parts[3], batch.y)


def grad(x: Tensor, batch: Examples) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x, batch), x)[0]


class Batches:
    """The walk of a client over its training data, for some purpose."""

    def __init__(self, data: ClientData, purpose: str = "") -> None:
        self.split, self.start = (
            data.train.reordered(f"train-{purpose}") if purpose else data.train,
            0,
        )

    def next(self) -> Examples:
        self.start += ROWS
        batch: Examples = self.split.batch(self.start - ROWS, ROWS)
        return batch
