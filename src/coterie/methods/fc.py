"""FC, Federated Clustering: each client steps along the gradients at its own model that lie near
its own gradient.

Werner et al., "Provably Personalized and Robust Federated Learning", TMLR 2023,
Federated-Clustering with Threshold-Clustering.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.clustering import threshold_centre
from coterie.client.blueprint import AnyClient, Blueprint
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, Round, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import by_client, clients_with, of_client
from coterie.core.tensors import Tensors, parts_within
from coterie.methods.templates import OneAdapter, unknown_clusters, value_of, weight_rows

Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class FC(OneAdapter):
    """Every client j evaluates its gradient at every x_i; x_i <- x_i - eta v_i, where v_i is the
    centre that Threshold-Clustering finds.

    v_i starts at client i's own gradient. In each round of the clustering the gradients within a
    radius of v_i count, every other one is replaced by v_i itself, and their mean is the next v_i.
    The radius is a quantile: it lets in as many as are in client i's cluster. Each of the
    `local_steps` iterations of a round takes n^2 gradients, n being the clients that take part.

    The server's state holds `<client>/generalist`, (d,), every x_i; `<client>/size`; and
    `<client>/weights`, (n,), how much of v_i was whose gradient, over all clients in the order of
    their ids.
    """

    per_client: ClassVar[tuple[str, ...]] = ("cluster_size",)

    # L, iterations per round, each with its own exchange of gradients
    local_steps: Annotated[int, Field(ge=1)] = 1
    # number of gradients that the radius lets in, a client's own among them; one number or one per
    # client; null: the size of its true cluster
    cluster_size: Size | tuple[Size, ...] | None = None
    clustering_rounds: Annotated[int, Field(ge=1)] = 10  # M, rounds of the clustering of gradients
    # megabytes of models and gradients in flight at once
    exchange_mb: Annotated[float, Field(gt=0)] = 1024.0

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        if self.local_epochs is not None:
            mistake = "method.local_epochs: an iteration of fc is an exchange; use local_steps"
            raise RecipeError("method", [mistake])
        if self.cluster_size is None and model.clusters is None:
            mistake = "method.cluster_size: null means the size of each client's true cluster"
            raise unknown_clusters(mistake, "give a number, or one per client")

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        x_0, order, sizes = model.flat(GENERALIST), sorted(clients), self.sizes(model, clients)
        alone = torch.eye(len(order), dtype=torch.float64)
        return (
            by_client({i: x_0.clone() for i in order})
            | by_client({i: torch.tensor(sizes[i]) for i in order}, "size")
            | by_client(dict(zip(order, alone, strict=True)), "weights")
        )

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        # each model needs one gradient of everybody
        bytes_each = 4 * state[of_client(clients[0])].numel() * (len(clients) + 1)
        for _ in range(self.local_steps):
            for part in parts_within(self.exchange_mb, sorted(clients), bytes_each):
                x = {i: state[of_client(i)] for i in part}
                gradients = yield Ask(self.gradients, dict.fromkeys(clients, x))
                state = yield from self.step_along(gradients, part, state)
        return state

    def step_along(self, gradients: Replies, part: Sequence[ClientId], state: State) -> Round:
        """Have these clients descend along their centres v_i; return the state with their x_i."""
        centres = {i: self.centre(i, gradients, state) for i in part if i in gradients}
        to = {i: {"direction": v} for i, (v, _) in centres.items()}
        replies = yield Ask(self.descend, to, lambda sent: {GENERALIST: sent["direction"]})
        x = {i: reply[GENERALIST] for i, reply in replies.items()}
        return state | by_client(x) | by_client({i: centres[i][1] for i in replies}, "weights")

    def centre(self, i: ClientId, gradients: Replies, state: State) -> tuple[Tensor, Tensor]:
        """Return v_i, (d,), and its weights over all clients, 0 without a gradient at x_i."""
        members = clients_with(state, "size")
        points = {j: gradients[j][i] for j in members if j in gradients}
        # Of a cluster as many take part as of all.
        share = round(int(state[of_client(i, "size")]) * len(points) / len(members))
        v, weights = threshold_centre(points, i, max(1, share), self.clustering_rounds)
        return v, torch.tensor([weights.get(j, 0.0) for j in members], dtype=torch.float64)

    @task(batched=True)
    def gradients(self, client: AnyClient, models: Tensors) -> Tensors:
        """Return grad f_j(x_i) at each received x_i, on fresh batches; at its own on its training
        batch.
        """
        return client.gradients_at(models, "others")

    @task(batched=True)
    def descend(self, client: AnyClient, v: Tensors) -> Tensors:
        """x_i <- x_i - eta v_i."""
        client.descend(GENERALIST, v["direction"], client.advance())
        return {GENERALIST: client.flat(into=v["direction"])}  # the direction's memory is free now

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        return weight_rows(state, clients)

    def sizes(self, model: Blueprint, clients: Sequence[ClientId]) -> dict[ClientId, int]:
        """Return how many gradients count for each client."""
        if self.cluster_size is None:
            clusters = model.clusters or {}
            return {i: list(clusters.values()).count(clusters[i]) for i in clients}
        return {i: value_of(self.cluster_size, k) for k, i in enumerate(clients)}
