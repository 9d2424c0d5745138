"""Oracle: FedAvg within the clients' true clusters, an upper bound for methods that find them.

Hashemi et al., "CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024, Section 4.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.client.blueprint import Blueprint
from coterie.client.settings import Training
from coterie.core.protocol import Ask, ClientId, Round, State
from coterie.core.tensors import Tensors, copy, prefixed, under
from coterie.methods.fedavg import FedAvg
from coterie.methods.templates import unknown_clusters


@dataclass(frozen=True)
class Oracle(FedAvg):
    """All tensors are averaged every round, inside each true cluster.

    The server's state holds `mean-<k>/<tensor>`, the mean of cluster k, and `cluster/<client>`,
    each client's cluster.
    """

    serves_unseen_clients: ClassVar[bool] = False
    by_examples = True
    needs_only_mean = False  # but one mean for each cluster

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        if model.clusters is None:
            mistake = "method.name: oracle needs the true cluster of each client"
            remedy = "use a data.partition with clusters, or a method that finds them, such as cobo"
            raise unknown_clusters(mistake, remedy)
        for members in Counter(model.clusters[i] for i in clients).values():
            self.aggregation.check(members if model.fewest is None else min(members, model.fewest))

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        theta, clusters = super().init(model, clients), model.clusters or {}
        state = {f"cluster/{i}": torch.tensor(k) for i, k in clusters.items()}
        for k in sorted(set(clusters.values())):
            state |= prefixed(f"mean-{k}", copy(theta))
        return state

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        means = {k: under(f"mean-{k}", state) for k in {_cluster(state, i) for i in clients}}
        return {i: means[_cluster(state, i)] for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        for k in sorted({_cluster(state, i) for i in replies}):
            members = {i: theta for i, theta in replies.items() if _cluster(state, i) == k}
            state = state | prefixed(f"mean-{k}", self.combine(members, under(f"mean-{k}", state)))
        return state


def _cluster(state: State, i: ClientId) -> int:
    return int(state[f"cluster/{i}"])
