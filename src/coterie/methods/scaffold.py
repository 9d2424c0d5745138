"""SCAFFOLD: FedAvg whose clients correct their steps for the difference of their gradients.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import SGD, Optimiser, Scheduled, Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Named, Tensors, axpy, prefixed, under, weighted_sum
from coterie.methods.templates import Averaged, OneAdapter

CONTROL = "control"  # c at the server, c_i at a client
CHANGE = "change"  # c_i^+ - c_i
CLIENTS = "clients"  # N


@dataclass(frozen=True)
class Scaffold(Averaged, OneAdapter):
    """Clients step along g_i(y_i) - c_i + c from x, with their own control variates c_i, which they
    keep, and c of the server.

    c_i becomes the mean gradient of the round, c_i - c + (x - y_i) / (K eta_l) (option II); the
    server takes x <- x + eta_g mean(y_i - x) and c <- c + |S|/N mean(c_i^+ - c_i). Messages are
    twice as large as FedAvg's, both ways.

    Steps are plain gradient descent at the recipe's learning rate, whatever its momentum. Classical
    momentum would make x - y_i 1 / (1 - beta) times what K eta_l says, and control variates too
    large by that blow up; momentum that averages gradients does no harm. Where other methods have
    classical momentum, SCAFFOLD's steps are shorter by that factor: it needs a learning rate of its
    own.

    The server's state holds the model by its names, `control/<name>`, c, and `clients`, N, the
    number of clients at the start. The authors' experiments use an eta_g of 1; beyond it, averaged
    running variances could become negative.
    """

    serves_unseen_clients: ClassVar[bool] = True
    # the server takes steps of its own, and clients also send control variates
    needs_only_mean = False

    server_lr: Annotated[float, Field(gt=0, le=1)] = 1.0  # eta_g, the server's learning rate
    # keep the recipe's momentum, although control variates assume plain SGD steps
    momentum: bool = False

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        if not isinstance(training.experts, SGD):
            problem = (
                f"training.experts.optimiser: {training.experts.optimiser}, but control variates "
                f"correct only steps of gradient descent"
            )
            remedy = "use optimiser: sgd with a learning rate for it"
            raise RecipeError("method", [f"{problem}; {remedy}"])

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        x = super().init(model, clients)
        zero = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
        return x | prefixed(CONTROL, zero) | {CLIENTS: torch.tensor(len(clients))}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        x = {name: state[name] for name in under(CONTROL, state)}
        return dict.fromkeys(clients, x)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        request = {name: tensor for name, tensor in state.items() if name != CLIENTS}
        replies = yield Ask(self.local_round, dict.fromkeys(clients, request), self.reply_spec)
        if not replies:
            return state
        # the server's state is on the CPU
        mean = {name: tensor.cpu() for name, tensor in self.combine(replies, request).items()}
        change = under(CHANGE, mean)
        # line 17: x moves by eta_g towards the mean of y_i, c by |S| / N times the mean change
        share = min(len(replies) / int(state[CLIENTS]), 1.0)
        control = {
            f"{CONTROL}/{name}": state[f"{CONTROL}/{name}"] + share * tensor
            for name, tensor in change.items()
        }
        y = {name: mean[name] for name in under(CONTROL, state)}
        x = {name: state[name] for name in y}
        return state | weighted_sum([(1 - self.server_lr, x), (self.server_lr, y)]) | control

    def reply_spec(self, sent: Named) -> Named:
        x = {name: sent[name] for name in under(CONTROL, sent)}
        return super().reply_spec(x | prefixed(CHANGE, x))

    @task(Sends.UPDATE)
    def local_round(self, client: Client, received: Tensors) -> Tensors:
        server, names = under(CONTROL, received), client.model.parameters_by_role[GENERALIST]
        client.load({name: received[name] for name in server})
        if not self.momentum:
            experts = {"experts": plain(client.training.experts)}
            client.training = client.training.model_copy(update=experts)
        # without running statistics, which have no gradients
        x = {name: tensor for name, tensor in client.read(GENERALIST).items() if name in names}
        control = under(CONTROL, client.state) or {n: torch.zeros_like(t) for n, t in x.items()}
        c, c_i = ({n: of[n].to(client.model.device) for n in x} for of in (server, control))
        correction, travelled = axpy(-1.0, c_i, c), 0.0
        for _ in range(self.steps(client)):
            travelled += client.lr  # K eta_l, under a schedule too
            client.step(GENERALIST, on=client.train, extra=lambda: correction)
        y = client.read(GENERALIST)
        # option II of line 12: c_i+ - c_i = (x - y_i) / (K eta_l) - c
        change = {name: (x[name] - y[name]) / travelled - c[name] for name in x}
        client.state |= prefixed(CONTROL, axpy(1.0, change, c_i))
        sent = {name: change.get(name, torch.zeros_like(tensor)) for name, tensor in y.items()}
        return y | prefixed(CHANGE, sent) | self.sample_count(client)


def plain(experts: Optimiser) -> SGD:
    """Return gradient descent without momentum."""
    return SGD(optimiser="sgd", **experts.model_dump(include=set(Scheduled.model_fields)))
