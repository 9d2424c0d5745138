"""FC, Federated Clustering: each client steps along the gradients at its own model that lie near
its own gradient.

Werner et al., "Provably Personalized and Robust Federated Learning", TMLR 2023,
Federated-Clustering with Threshold-Clustering.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.interfaces import AnyClient
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, Round, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import clients_with, of_client
from coterie.core.tensors import Tensors
from coterie.methods.base import Reader
from coterie.methods.templates import OneAdapter

Size = Annotated[int, Field(ge=1)]
_CHUNK = 1 << 16  # columns at a time


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

    Args:
        cluster_size: How many gradients the radius lets in, client i's own among them: one number,
            or one per client in the order of the federation; None for the true size of each
            client's cluster.
        clustering_rounds: M, rounds of Threshold-Clustering (the authors of CoBo: 10).
        exchange_mb: Most megabytes of models and gradients in flight at once: more models are
            evaluated in several exchanges.
    """

    per_client: ClassVar[tuple[str, ...]] = ("cluster_size",)

    local_steps: Annotated[
        int,
        Field(ge=1, description="L, iterations per round, each with its own exchange of gradients"),
    ] = 1
    cluster_size: Annotated[
        Size | tuple[Size, ...] | None,
        Field(
            description="gradients that count for a client, one number or one per client; null: "
            "the size of its true cluster"
        ),
    ] = None
    clustering_rounds: Annotated[
        int, Field(ge=1, description="M, rounds of the clustering of gradients")
    ] = 10
    exchange_mb: Annotated[
        float, Field(gt=0, description="megabytes of models and gradients in flight at once")
    ] = 1024.0

    def check(self, model: Reader, clients: Sequence[ClientId], training: Training) -> None:
        if self.cluster_size is None and model.clusters is None:
            mistake = (
                "method.cluster_size: null stands for the size of each client's true cluster, "
                "which these data do not tell"
            )
            raise RecipeError("method", [f"{mistake}; give a number, or one per client"])

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        x_0, order, sizes, state = (
            model.flat(GENERALIST),
            sorted(clients),
            self._sizes(model, clients),
            State(),
        )
        for i, alone in zip(order, torch.eye(len(order), dtype=torch.float64), strict=True):
            state |= {
                of_client(i): x_0.clone(),
                of_client(i, "size"): torch.tensor(sizes[i]),
                of_client(i, "weights"): alone,
            }
        return state

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        known = clients_with(state, "size")
        for _ in range(self.local_steps):
            for part in self._exchanges(sorted(clients), state):
                models = {i: state[of_client(i)] for i in part}
                gradients = yield Ask(self.gradients, dict.fromkeys(clients, models))
                found = {
                    i: self._centre(i, state, gradients, known) for i in part if i in gradients
                }
                replies = yield Ask(
                    self.descend,
                    {i: {"direction": v} for i, (v, _) in found.items()},
                    lambda sent: {GENERALIST: sent["direction"]},
                )
                state = state | {of_client(i): replies[i][GENERALIST] for i in replies}
                state |= {of_client(i, "weights"): found[i][1] for i in replies}
        return state

    @task(batched=True)
    def gradients(self, client: AnyClient, models: Tensors) -> Tensors:
        """Grad f_j(x_i) at each model x_i that came, on fresh batches; at client j's own one on
        the batch that trains it.
        """
        return client.gradients_at(models, "others")

    @task(batched=True)
    def descend(self, client: AnyClient, v: Tensors) -> Tensors:
        """x_i <- x_i - eta v_i."""
        client.descend(GENERALIST, v["direction"], client.advance())
        return {GENERALIST: client.flat(into=v["direction"])}  # the direction's memory is free now

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        return torch.stack([state[of_client(i, "weights")] for i in clients])[
            :, [sorted(clients).index(i) for i in clients]
        ]

    def _sizes(self, model: Reader, clients: Sequence[ClientId]) -> dict[ClientId, int]:
        """How many gradients count for each client."""
        if self.cluster_size is None:
            clusters = model.clusters or {}
            return {i: list(clusters.values()).count(clusters[i]) for i in clients}
        given = (
            self.cluster_size
            if isinstance(self.cluster_size, tuple)
            else (self.cluster_size,) * len(clients)
        )
        return dict(zip(clients, given, strict=True))

    def _exchanges(self, order: Sequence[ClientId], state: State) -> Iterator[Sequence[ClientId]]:
        """Return the clients whose models are evaluated together, in as few parts as memory allows:
        each needs one gradient of everybody.
        """
        bytes_each = 4 * state[of_client(order[0])].numel() * (len(order) + 1)
        size = max(1, math.floor(self.exchange_mb * 1e6 / bytes_each))
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _centre(
        self, i: ClientId, state: State, gradients: Replies, order: Sequence[ClientId]
    ) -> tuple[Tensor, Tensor]:
        """v_i, (d,), and the weights over all clients that make it of their gradients, 0 for
        those that did not arrive.
        """
        here = [j for j in order if j in gradients]
        points = [gradients[j][i] for j in here]
        size = max(
            1, round(int(state[of_client(i, "size")]) * len(here) / len(order))
        )  # of a cluster as many take part as of all
        found = threshold_clustering(points, here.index(i), size, self.clustering_rounds)
        row = torch.zeros(len(order), dtype=torch.float64)
        row[[order.index(j) for j in here]] = found
        v = torch.zeros_like(points[0])
        for weight, point in zip(found.tolist(), points, strict=True):
            if weight:
                v.add_(point, alpha=weight)
        return v, row


def threshold_clustering(points: Sequence[Tensor], start: int, size: int, rounds: int) -> Tensor:
    """One centre v of Threshold-Clustering, as the weights with which the points make it.

    All is done with inner products of points relative to the first centre, so that a round takes no
    time beside the n^2 products.

    Args:
        points: n vectors, (d,).
        start: The point that is the first centre.
        size: How many points the radius lets in, the nearest to the centre; at most all.
        rounds: v <- 1/n sum_j (z_j if it is within the radius of v, otherwise v), so often.

    Returns:
        (n,) float64, the sum of which is 1.
    """
    products = torch.zeros(len(points), len(points), dtype=torch.float64)
    for parts in zip(*(torch.split(z, _CHUNK) for z in points), strict=True):
        relative = (torch.stack(list(parts)) - parts[start]).double()
        products += (relative @ relative.T).cpu()
    weights = torch.zeros(len(points), dtype=torch.float64)
    weights[start] = 1.0
    for _ in range(rounds):
        distances = (
            products.diagonal() - 2 * products @ weights + weights @ products @ weights
        )  # squared
        inside = distances.argsort(stable=True)[:size]
        weights *= 1 - len(inside) / len(points)
        weights[inside] += 1 / len(points)
    return weights
