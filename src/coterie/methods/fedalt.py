"""FedALT: every client's own LoRA trains on beside a frozen mean of all others'.

Bian et al., "FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World
LoRA", AAAI 2026 (arXiv:2503.11880), Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from coterie.aggregation import uniform_mean
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import BACKBONE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensor_names import by_client, of_client
from coterie.core.tensors import Named, Tensors
from coterie.methods.templates import Routed
from coterie.models.layout import Layout

MEANS, SENDERS = "means", "senders"


@dataclass(frozen=True)
class FedALT(Routed):
    """A client's specialist and router train on its training data beside a frozen generalist, the
    mean of the other clients' specialists. Attention LoRAs are averaged.

    The server sends the mean of all, under the generalist's names, and the number of its senders n;
    a client that is among them takes out its own, (n mean - own) / (n - 1).
    The server's state is the mean by name; `senders`; `means`, the number of means so far; and
    `<client>/means`, that of the last one that the client is in.
    """

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, BACKBONE)
    dynamic_membership: ClassVar[bool] = True
    joinable: ClassVar[bool] = True
    server_steps: ClassVar[bool] = True
    needs_only_mean = True

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(self.mixture(base, 1, 1), frozen_generalists=True)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        counts = {SENDERS: torch.tensor(0), MEANS: torch.tensor(0)}
        return self.members(model.read(*self.shared) | counts, clients)

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        return by_client({i: torch.tensor(0) for i in clients}, MEANS) | state

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        mean = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        among = {i: state.get(of_client(i, MEANS)) == state[MEANS] for i in clients}
        return {i: mean | {SENDERS: state[SENDERS] * bool(among[i])} for i in clients}

    def loadable(self, client: Any, download: Tensors) -> Tensors:
        """Return the attention LoRAs and the generalist: the mean without the client's own."""
        mean = dict(download)
        if not (senders := int(mean.pop(SENDERS, 0))):
            return mean
        individual = as_generalist(client)
        if senders == 1:  # there are no others
            return {name: t for name, t in mean.items() if name not in individual}
        rest = {n: (senders * mean[n] - t) / (senders - 1) for n, t in individual.items()}
        return mean | rest

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        if not replies:
            return state
        means = state[MEANS] + 1
        counts = {SENDERS: torch.tensor(len(replies)), MEANS: means}
        among = by_client({i: means.clone() for i in replies}, MEANS)
        return state | uniform_mean(replies) | counts | among

    def reply_spec(self, sent: Named) -> Named:
        return {name: tensor for name, tensor in sent.items() if name != SENDERS}

    @task(Sends.UPDATE)
    def local_round(self, client: Client, received: Tensors) -> Tensors:
        client.load(self.loadable(client, received))
        self.local_iterations(client)
        return client.read(GENERALIST) | as_generalist(client)

    def iterate(self, client: Client) -> None:
        client.step(GENERALIST, SPECIALIST, ROUTER, on=client.train)


def as_generalist(client: Client) -> Tensors:
    """Return the client's own expert under the generalist's names."""
    return dict(zip(client.read(BACKBONE), client.read(SPECIALIST).values(), strict=True))
