"""Methods on three tiny clients with texts, run round by round, and steps of their models by
autograd.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import SGD, AdamW, Training
from coterie.client.site import Site
from coterie.core.protocol import ClientId, drive
from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.engines.inprocess import InProcess
from coterie.methods import Method
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

TRAINING = Training(batch_size=4, experts=AdamW(lr=5e-3), routers=AdamW(lr=5e-3))
NAMES = ("ann", "ben", "cleo")
LR, ROWS = 0.1, 4
PLAIN = Training(
    batch_size=ROWS,
    experts=SGD(optimiser="sgd", lr=LR, momentum=0.0),
    routers=SGD(optimiser="sgd", lr=LR, momentum=0.0),
)


class Small:
    """A method on three tiny clients, in one process."""

    def __init__(
        self,
        method: Method,
        backbone: Backbone,
        federation: Federation,
        training: Training = TRAINING,
    ) -> None:
        self.method = method
        layouts = {i: method.layout(k, Layout(rank=2)) for k, i in enumerate(federation.clients)}
        self.site = Site(
            partial(LanguageModel, backbone),
            layouts,
            federation.clients,
            training,
            seed=5,
            total_iterations=method.total_iterations,
        )
        self.engine = InProcess(self.site, method)
        self.blueprint = Blueprint(partial(Adapter, backbone.architecture), layouts, 5)
        self.server, self.done = method.init(self.blueprint, NAMES), 0

    def round(self, clients: Sequence[ClientId] = NAMES) -> Tensors:
        generator = self.method.round(self.server, clients, torch.Generator())
        self.server = drive(generator, lambda ask, phase: self.engine.answer(ask, self.done, phase))
        if self.done + 1 == self.method.rounds:
            self.server = drive(
                self.method.finish(self.server, NAMES),
                lambda ask, phase: self.engine.answer(ask, self.done, phase),
            )
        self.done += 1
        return self.server

    def client(self, i: str) -> Client:
        return self.site.client(i, dict(self.engine.states().get(i, {})))

    def count(self, i: str, key: str) -> int:
        return int(self.engine.states()[i].get(key, torch.zeros(())))


class Naive:
    """A client with a model of its own, which plain gradient steps train on the data as given."""

    def __init__(self, run: Small, i: ClientId) -> None:
        self.data, self.drawn = run.site.data[i], 0
        start = run.site.client(i, {})
        assert isinstance(start.model, LanguageModel)
        self.model = LanguageModel(start.model.backbone, start.model.layout)
        self.parameters = dict(self.model.adapter.named_parameters())
        for name, tensor in start.model.adapter.named_parameters():
            self.parameters[name].data = tensor.detach().clone()

    def named(self, part: str) -> Tensors:
        """Copies of the tensors whose names contain `part`."""
        return {n: p.detach().clone() for n, p in self.parameters.items() if part in n}

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self.parameters[name].data = tensor.clone()

    def steps(self, count: int, names: Sequence[str]) -> None:
        """Take plain gradient steps of the cross-entropy, of tensors with one of these in their
        names.
        """
        trained = [p for n, p in self.parameters.items() if any(part in n for part in names)]
        for _ in range(count):
            batch = self.data.train.batch(self.drawn, ROWS)
            self.drawn += ROWS
            gradients = torch.autograd.grad(cross_entropy(*self.model.predicted(batch)), trained)
            for p, gradient in zip(trained, gradients, strict=True):
                p.data = p.data - LR * gradient
