"""FedLEASE: one expert a cluster of clients, and a router that chooses how many of them to use.

Wang et al., "Adaptive LoRA Experts Allocation and Selection for Federated Fine-Tuning", NeurIPS
2025 (arXiv:2509.15087), Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.clustering import cluster, layer_distances, together
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, empty_reply, task
from coterie.core.roles import EXPERT, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensor_names import by_client, clients_with, of_client, of_expert
from coterie.core.tensors import Tensors
from coterie.methods.templates import Aggregating, portion
from coterie.models.layout import Layout

CLUSTER, NEW, ALONE = "cluster", -2, -1  # what the server knows of a client without a cluster
TRAINED = (GENERALIST, SPECIALIST, ROUTER)


@dataclass(frozen=True)
class FedLEASE(Aggregating):
    """Clients train alone first, and are clustered by the B of their experts. Then each trains its
    cluster's expert and router, which are averaged in the cluster, beside the other clusters'
    experts. Attention LoRAs are averaged.

    The server's state is `generalist`, `expert/<cluster>` and `router/<cluster>`, (d,);
    `specialist` and `router`, from which clients start; `sizes` of an expert's matrices;
    `<client>/cluster`; and `round`.
    """

    shared: ClassVar[tuple[Role, ...]] = (*TRAINED, EXPERT)
    packages: ClassVar[tuple[str, ...]] = ("scipy",)
    dynamic_membership: ClassVar[bool] = True

    experts: Annotated[int, Field(ge=2)] = 4  # most clusters, each with an expert
    # share of the rounds in which clients train alone
    alone: Annotated[float, Field(ge=0, le=1)] = 0.2

    def layout(self, position: int, base: Layout) -> Layout:
        others = self.experts - 1
        form = replace(base, generalists=others, specialists=1, repeated=True)
        return replace(form, top_k=self.experts, balance="none")

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        sizes = [tensor.numel() for tensor in model.read(SPECIALIST).values()]
        state: State = {"sizes": torch.tensor(sizes), "round": torch.tensor(0)}
        state |= {role: model.flat(role) for role in TRAINED}
        for c in range(self.experts):
            state |= {of_expert(c): model.flat(SPECIALIST), f"{ROUTER}/{c}": model.flat(ROUTER)}
        return self.members(state, clients)

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        return by_client({i: torch.tensor(NEW) for i in clients}, CLUSTER) | state

    def clusters(self, state: State, clients: Sequence[ClientId]) -> dict[ClientId, int]:
        return {i: int(state.get(of_client(i, CLUSTER), NEW)) for i in clients}

    def number(self, state: State) -> int:
        """Return M, the number of clusters; 0 before there are any."""
        return 1 + max([ALONE, *self.clusters(state, clients_with(state, CLUSTER)).values()])

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        experts = {of_expert(c): state[of_expert(c)] for c in range(self.number(state))}
        downloads: dict[ClientId, Tensors] = {}
        for i, c in self.clusters(state, clients).items():
            sent = started(state) if c != ALONE else {}
            if c >= 0:
                sent |= experts | {SPECIALIST: state[of_expert(c)], ROUTER: state[f"{ROUTER}/{c}"]}
                del sent[of_expert(c)]
            downloads[i] = sent
        return downloads

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        t, clusters = int(state["round"]) + 1, self.clusters(state, clients)
        down, form = self.download(state, clients), started(state)
        state = state | {"round": torch.tensor(t)}
        placed = {i: down[i] for i, c in clusters.items() if c >= 0}
        if placed:
            replies = yield Ask(self.local_round, placed, lambda sent: self.reply_spec(form))
            state |= self.merged(replies, state)
        if not (apart := {i: down[i] for i in clients if i not in placed}):
            return state
        trained = yield Ask(self.train_alone, apart, empty_reply)
        state |= by_client({i: torch.tensor(ALONE) for i in trained}, CLUSTER)
        if t < portion(self.alone, self.rounds) or not trained:
            return state
        sent = yield Ask(self.upload, {i: {} for i in trained}, lambda sent: self.reply_spec(form))
        following = state | self.place(sent, state)
        return following if self.number(state) else following | self.merged(sent, following)

    def merged(self, replies: Replies, state: State) -> State:
        """Return the means of clients' attention LoRAs, and of experts and routers by cluster."""
        named: dict[ClientId, Tensors] = {}
        for i, c in self.clusters(state, tuple(replies)).items():
            names: dict[str, str] = {SPECIALIST: of_expert(c), ROUTER: f"{ROUTER}/{c}"}
            named[i] = {names.get(name, name): t for name, t in replies[i].items()}
        return self.combine(named, state)

    def place(self, replies: Replies, state: State) -> State:
        """Return the clusters of clients that trained alone: new ones, or the nearest."""
        order, known = sorted(replies), self.number(state)
        experts = [state[of_expert(c)] for c in range(known)]
        experts += [replies[i][SPECIALIST] for i in order]
        sizes = state["sizes"].tolist()  # of A and B in turn
        distances = layer_distances([torch.split(e, sizes)[1::2] for e in experts])
        nearest = distances[known:, :known].argmin(dim=1) if known else None
        labels = cluster(distances, self.experts) if nearest is None else nearest
        return by_client(dict(zip(order, labels, strict=True)), CLUSTER)

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        return together(torch.tensor([*self.clusters(state, clients).values()]))

    @task(Sends.NOTHING)
    def train_alone(self, client: Client, start: Tensors) -> Tensors:
        client.load(start)
        for _ in range(self.steps(client)):
            client.step(GENERALIST, SPECIALIST, on=client.train)
        return {}

    @task()
    def upload(self, client: Client, empty: Tensors) -> Tensors:
        return {role: client.flat(role) for role in TRAINED} | self.sample_count(client)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, received: Tensors) -> Tensors:
        client.load(received)
        for _ in range(self.steps(client)):
            client.step(*TRAINED, on=client.train)
        return self.upload(client, {})


def started(state: State) -> Tensors:
    """Return what a client starts from."""
    return {role: state[role] for role in TRAINED}
