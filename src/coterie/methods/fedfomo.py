"""FedFomo: each client takes those of the others' models that lower its own validation loss.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import by_client, clients_with, of_client
from coterie.core.tensors import Named, Tensors, prefixed
from coterie.methods.templates import OneAdapter, weight_rows

BEFORE = "fomo/before"  # theta_i before the last local training
GAINS = "gains"  # the weights w_n before negative ones are 0 and they are normalised
SENT = "sent"


@dataclass(frozen=True)
class FedFomo(OneAdapter):
    """theta_i <- theta_i + sum_n w_n (theta_n - theta_i), w_n in proportion to
    max(0, (L_i(theta_i) - L_i(theta_n)) / |theta_n - theta_i|), where theta_i is the client's model
    before its last local training, n the models that it received, its trained one among them, and
    L_i its validation loss. Then it trains.

    The server's state holds `<client>/generalist`, (d,), every trained model, and `<client>/gains`
    and `<client>/sent`, (n,), the sums of a client's w_n and the last of them, over all clients in
    the order of their ids.
    """

    beyond_mean: ClassVar[str] = "sends clients the models of others, one by one"

    # M, models that a client receives, its own among them
    received: Annotated[int, Field(ge=1)] = 5
    # epsilon, chance that a model is drawn by chance in a round
    explore: Annotated[float, Field(ge=0, le=1)] = 0.3

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        x_0, order = model.flat(GENERALIST), sorted(clients)
        alone = torch.eye(len(order), dtype=torch.float64)
        rows = dict(zip(order, alone, strict=True))
        return (
            by_client({i: x_0.clone() for i in order})
            | by_client(rows, GAINS)
            | by_client({i: row.clone() for i, row in rows.items()}, SENT)
        )

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        order = clients_with(state)
        chosen = {i: self.choose(i, order, state[of_client(i, GAINS)], rng) for i in clients}
        sent = {i: {j: state[of_client(j)] for j in chosen[i]} for i in clients}
        replies = yield Ask(self.local_round, sent, self.reply_spec)
        new = dict(state)
        for i, reply in replies.items():
            gains = torch.tensor(
                [float(reply.get(f"{GAINS}/{j}", torch.tensor(0.0))) for j in order],
                dtype=torch.float64,
            )
            new[of_client(i)] = reply[GENERALIST]
            new[of_client(i, GAINS)] = state[of_client(i, GAINS)] + gains
            new[of_client(i, SENT)] = gains
        return new

    def choose(
        self, i: ClientId, order: Sequence[ClientId], gains: Tensor, rng: torch.Generator
    ) -> list[ClientId]:
        """Return whose models client i receives: its own, and those of the largest sums of gains,
        each with a chance of epsilon replaced by one drawn from the rest.
        """
        ranked = sorted((j for j in order if j != i), key=lambda j: -float(gains[order.index(j)]))
        chosen: list[ClientId] = []
        for _ in range(min(self.received, len(order)) - 1):
            rest = [j for j in ranked if j not in chosen]
            drawn = float(torch.rand((), generator=rng)) < self.explore
            place = int(torch.randint(len(rest), (), generator=rng)) if drawn else 0
            chosen.append(rest[place])
        return sorted([i, *chosen])

    def reply_spec(self, sent: Named) -> Named:
        gains = {j: torch.empty((), dtype=torch.float64) for j in sent}
        return {GENERALIST: next(iter(sent.values()))} | prefixed(GAINS, gains)

    @task()
    def local_round(self, client: Client, models: Tensors) -> Tensors:
        gains = dict.fromkeys(models, 0.0)
        if BEFORE in client.state:
            theta = client.state[BEFORE]
            loss = self.validation_loss(client, theta)
            for j, other in sorted(models.items()):
                away = float((other.to(theta) - theta).norm())
                gain = loss - self.validation_loss(client, other)
                gains[j] = gain / away if away else 0.0
            helpful = {j: gain for j, gain in sorted(gains.items()) if gain > 0}
            for j, gain in helpful.items():
                share = gain / sum(helpful.values())
                theta = theta + share * (models[j].to(theta) - client.state[BEFORE])
            client.load({GENERALIST: theta})
        client.state[BEFORE] = client.flat()
        self.local_iterations(client)
        weights = {j: torch.tensor(gain, dtype=torch.float64) for j, gain in gains.items()}
        return {GENERALIST: client.flat()} | prefixed(GAINS, weights)

    def validation_loss(self, client: Client, values: Tensor) -> float:
        """Return L_i at other values, in nats per prediction."""
        with client.borrowing({GENERALIST: values}):
            nll, predictions, *_ = client.score(client.valid).tolist()
        return float(nll / predictions)

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        rows = weight_rows(state, clients, SENT).clamp_min(0)
        total = rows.sum(dim=1, keepdim=True)
        alone = torch.eye(len(clients), dtype=torch.float64)  # where nothing was better
        return torch.where(total > 0, rows / total.clamp_min(1e-300), alone)
