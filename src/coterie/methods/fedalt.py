"""FedALT: every client's own LoRA trains on beside a frozen mean of all others'.

Bian et al., "FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World
LoRA", AAAI 2026 (arXiv:2503.11880), Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.aggregation import uniform_mean
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import BACKBONE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensor_names import by_client, of_client
from coterie.core.tensors import Named, Tensors, prefixed, under
from coterie.methods.templates import Routed
from coterie.models.layout import Layout

MEANS, SENDERS, KEPT = "means", "senders", "fedalt"


@dataclass(frozen=True)
class FedALT(Routed):
    """A client's specialist and router train on its training data beside a frozen generalist, the
    mean of the other clients' specialists. Attention LoRAs are averaged.

    The server sends the mean of all, under the generalist's names, its number, and that of its
    senders n; a client that is among them takes out its own, (n mean - own) / (n - 1). As a reply
    may be lost, it keeps its own of the mean that it trained beside, with the number (`fedalt/`).
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
        mean[MEANS] = state[MEANS]
        return {i: mean | {SENDERS: state[SENDERS] * bool(among[i])} for i in clients}

    def loadable(self, client: Any, download: Tensors) -> Tensors:
        """Return the attention LoRAs and the generalist: the mean without the client's own."""
        mean = {name: t for name, t in download.items() if name not in (MEANS, SENDERS)}
        if not (senders := int(download.get(SENDERS, 0))):
            return mean
        mine = in_mean(client, download[MEANS])
        if senders == 1:  # there are no others
            return {name: t for name, t in mean.items() if name not in mine}
        rest = {n: (senders * mean[n] - t.to(mean[n])) / (senders - 1) for n, t in mine.items()}
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
        return {name: t for name, t in sent.items() if name not in (MEANS, SENDERS)}

    @task(Sends.UPDATE)
    def local_round(self, client: Client, received: Tensors) -> Tensors:
        client.state |= prefixed(KEPT, in_mean(client, received[MEANS]) | {MEANS: received[MEANS]})
        client.load(self.loadable(client, received))
        self.local_iterations(client)
        return client.read(GENERALIST) | as_generalist(client)

    def iterate(self, client: Client) -> None:
        client.step(GENERALIST, SPECIALIST, ROUTER, on=client.train)


def in_mean(client: Client, number: Tensor) -> Tensors:
    """Return what a client has put into the mean of a number, if anything."""
    kept = under(KEPT, client.state)
    return kept if int(kept.pop(MEANS, -1)) == int(number) else as_generalist(client)


def as_generalist(client: Client) -> Tensors:
    """Return the client's own expert under the generalist's names."""
    return dict(zip(client.read(BACKBONE), client.read(SPECIALIST).values(), strict=True))
