"""PCL: personalised collaborative learning by weights that validation data give.

Wagner, Fan and Jaggi, "Personalized Collaborative Fine-Tuning for On-Device Large Language Models",
COLM 2024, the strategy that compares validation performance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation import weighted_mean
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import clients_with
from coterie.core.tensors import Tensors, copy, prefixed, under
from coterie.methods.templates import OneAdapter, weight_rows

_WORST = torch.finfo(torch.float64).max  # the perplexity of a broken model: its weight is 0


@dataclass(frozen=True)
class PCL(OneAdapter):
    """Client i goes on from sum_j w_ij theta_j with w_i = softmax_j(-perplexity of model j on the
    validation data of client i).

    The server's state holds `<client>/<tensor>`, what each client goes on from, and
    `<client>/weights`, (N,), its w_i over all clients in the order of their ids. Who takes part in
    a round shares models with the others that do.
    """

    # validation batches on which a client scores all models; null: its whole validation set
    validation_batches: Annotated[int | None, Field(ge=1)] = None

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        theta, order = model.read(GENERALIST), sorted(clients)
        alone = torch.eye(len(order), dtype=torch.float64)
        return {
            k: v
            for i, w in zip(order, alone, strict=True)
            for k, v in prefixed(i, copy(theta) | {"weights": w}).items()
        }

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        return weight_rows(state, clients)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return {i: {n: t for n, t in under(i, state).items() if n != "weights"} for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        models = yield Ask(self.local_round, self.download(state, clients))
        everyone = {k: v for j in sorted(models) for k, v in prefixed(j, models[j]).items()}
        verdict = {j: torch.empty((), dtype=torch.float64, device="meta") for j in models}
        judged = yield Ask(self.judge, dict.fromkeys(models, everyone), lambda sent: verdict)
        members = clients_with(state, "weights")
        return state | self.collaborate(models, judged, members)

    def collaborate(self, models: Replies, judged: Replies, order: Sequence[ClientId]) -> State:
        """Return the next state of clients that judged; missing models have weight 0."""
        state: State = {}
        for i, verdict in judged.items():
            weights = collaboration_weights({j: float(verdict[j]) for j in sorted(models)})
            row = torch.tensor([weights.get(j, 0.0) for j in order], dtype=torch.float64)
            state |= prefixed(i, weighted_mean(models, weights) | {"weights": row})
        return state

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        self.local_iterations(client)
        return client.read(GENERALIST)

    @task(Sends.SCORES)
    def judge(self, client: Client, models: Tensors) -> Tensors:
        """Return each model's perplexity on this client's validation data, by its owner."""
        perplexities: Tensors = {}
        for j in dict.fromkeys(name.partition("/")[0] for name in models):
            with client.borrowing(under(j, models)):
                nll, predictions, *_ = client.score(client.valid, self.validation_batches)
            perplexities[j] = (nll / predictions).exp().nan_to_num(nan=_WORST, posinf=_WORST)
        return perplexities


def collaboration_weights(perplexities: Mapping[ClientId, float]) -> dict[ClientId, float]:
    """softmax_j(-perplexity_j)."""
    weights = torch.softmax(-torch.tensor(list(perplexities.values()), dtype=torch.float64), dim=0)
    return dict(zip(perplexities, weights.tolist(), strict=True))
