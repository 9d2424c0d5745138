"""FDLoRA: two LoRAs per client, personal and global, fused at the end by gradient-free weights.

Qi et al., "FDLoRA: Personalized Federated Learning of Large Language Model via Dual LoRA Tuning",
2024 (arXiv:2406.07925), Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.aggregation.lowrank import fused, fusion_weights, nesterov
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors, axpy, prefixed, under
from coterie.methods.templates import Aggregating, OneAdapter, portion


@dataclass(frozen=True)
class FDLoRA(OneAdapter, Aggregating):
    """A personal LoRA theta_p for every client and a global one theta_s, in three stages.

    1: Every client trains theta_p alone; the mean is the first theta_s. 2: Inner AdamW steps from
    theta_s on the clients, an outer Nesterov step on their mean pseudo-gradient on the server;
    every H rounds theta_p becomes the client's trained theta_s. 3, after the last round: each
    client fuses the two, w_1 theta_p + w_2 theta_s, by the loss on a few validation samples + an L1
    penalty, without gradients.

    A client has one adapter, of the budget of CoMiGS-1G1S, and keeps a copy of its personal values.
    The server's state holds the global LoRA by name, its momentum as `momentum/<tensor>`, and
    `round`. The weight of the penalty is LoraHub's 0.05 on the mean of |w_1| and |w_2|, which the
    paper's fusion follows.
    """

    packages: ClassVar[tuple[str, ...]] = ("scipy",)
    server_steps: ClassVar[bool] = True

    # share of the rounds in which clients train their personal LoRA alone
    alone: Annotated[float, Field(ge=0, le=1)] = 0.2
    outer_lr: Annotated[float, Field(gt=0)] = 0.7  # learning rate of the outer optimiser
    # Nesterov momentum of the outer optimiser
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    # H, rounds between synchronisations of the personal LoRA
    sync_every: Annotated[int, Field(ge=1)] = 5
    fusion_samples: Annotated[int, Field(ge=1)] = 32  # validation windows for the fusion
    fusion_steps: Annotated[int, Field(ge=3)] = 40  # most evaluations of the fusion's objective
    fusion_l1: Annotated[float, Field(ge=0)] = 0.025  # weight of |w_1| + |w_2| in the fusion

    @property
    def rounds_alone(self) -> int:
        return min(max(int(portion(self.alone, self.rounds)), 1), self.rounds)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        theta = model.read(GENERALIST)
        zero = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        return theta | prefixed("momentum", zero) | {"round": torch.tensor(0)}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        theta = {name: state[name] for name in under("momentum", state)}
        return dict.fromkeys(clients, theta)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        momentum, t = under("momentum", state), int(state["round"]) + 1
        theta = {name: state[name] for name in momentum}
        if t <= self.rounds_alone:
            theta = yield from self.first_stage(theta, clients, last=t == self.rounds_alone)
        else:
            sync = {"sync": torch.tensor((t - self.rounds_alone) % self.sync_every == 0)}
            sent = dict.fromkeys(clients, theta | sync)
            replies = yield Ask(self.federated_round, sent, lambda sent: self.reply_spec(theta))
            if replies:  # the outer step, on the mean of theta - theta_i
                gradient = axpy(-1.0, self.combine(replies, theta), theta)
                theta, momentum = nesterov(
                    theta, momentum, gradient, self.outer_lr, self.outer_momentum
                )
        return theta | prefixed("momentum", momentum) | {"round": torch.tensor(t)}

    def first_stage(self, theta: Tensors, clients: Sequence[ClientId], last: bool) -> Round:
        """Have every client train its theta_p alone; return theta_s, their mean, after the last
        such round.
        """
        requests = {i: {"send": torch.tensor(last)} for i in clients}
        spec = self.reply_spec(theta) if last else {}
        replies = yield Ask(self.local_round, requests, lambda sent: spec)
        return theta | self.combine({i: reply for i, reply in replies.items() if reply}, theta)

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        weights = {"fusion": torch.empty(2, dtype=torch.float64, device="meta")}
        yield Ask(self.fuse, self.download(state, clients), lambda sent: weights)
        return state

    @task()
    def local_round(self, client: Client, request: Tensors) -> Tensors:
        self.local_iterations(client)
        client.state |= prefixed("personal", client.read(GENERALIST))
        return client.read(GENERALIST) | self.sample_count(client) if request["send"] else {}

    @task(Sends.UPDATE)
    def federated_round(self, client: Client, request: Tensors) -> Tensors:
        client.load({name: tensor for name, tensor in request.items() if name != "sync"})
        self.local_iterations(client)
        if request["sync"]:
            client.state |= prefixed("personal", client.read(GENERALIST))
        return client.read(GENERALIST) | self.sample_count(client)

    @task(Sends.SCORES)
    def fuse(self, client: Client, theta_s: Tensors) -> Tensors:
        """Fuse personal and global LoRA into the client's model; return (w_1, w_2)."""
        theta_p = under("personal", client.state) or client.read(GENERALIST)
        samples = client.valid.batch(0, self.fusion_samples)

        def objective(w: Sequence[float]) -> float:
            with client.borrowing(fused(w, theta_p, theta_s)):
                return client.loss(samples) + self.fusion_l1 * float(abs(w[0]) + abs(w[1]))

        weights = fusion_weights(objective, self.fusion_steps)
        client.load(fused(weights, theta_p, theta_s))
        return {"fusion": torch.tensor(weights, dtype=torch.float64)}
