"""CoMiGS whose generalists are averaged with CoBo's learned weights: beyond both papers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.collaboration import ascend_simplex, mixtures
from coterie.aggregation.means import Mean
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import by_client, clients_with, of_client
from coterie.core.tensors import Tensors
from coterie.methods.comigs import CoMiGS
from coterie.methods.pairwise import SamplingPairs, rejoined

# keeps a row of weights from summing to 0 where none of its collaborators took part
EPSILON = 1e-12


@dataclass(frozen=True)
class CoMiGSCoBo(CoMiGS, SamplingPairs):
    """theta_i^G <- sum_j w_ij theta_j^G, so that unlike groups of clients need not share one
    generalist.

    Each row of W learns on the simplex, from 1/N, by how well the gradients of two clients agree
    halfway between their generalists (CoBo, Remark 1). CoBo's weights pull, and have no w_ii; here
    a client counts itself as its best collaborator, so that two who agree share one mean.

    The server's state is `<client>/generalist`, (d,) each, `weights`, (N, N), in the order of the
    clients' ids, and `round`.
    """

    needs_only_mean = False

    gamma: Annotated[
        float,
        Field(ge=0, description="step size of the collaboration weights; 0: plain means"),
    ] = 0.05
    pairs: Annotated[
        Literal["all", "constant", "time", "mixed"],
        Field(
            description="which pairs a round compares; all: a client computes N - 1 gradients in "
            "every round; time: most of its few in the first rounds"
        ),
    ] = "all"

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        SamplingPairs.check(self, model, clients, training)
        if self.aggregation != Mean():
            mistake = (
                "method.aggregation: comigs-cobo weighs the generalists for each client by "
                "itself; leave the rule out"
            )
            raise RecipeError("method", [mistake])

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        generalists = {of_client(i): model.flat(GENERALIST) for i in sorted(clients)}
        return generalists | {"weights": even(len(clients)), "round": torch.tensor(0)}

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        return rejoined(state, clients, even(len(clients)), row_stochastic=True)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        if all(of_client(i) in state for i in clients):
            return {i: {GENERALIST: state[of_client(i)]} for i in clients}
        mean = torch.stack([state[of_client(i)] for i in clients_with(state)]).mean(dim=0)
        return {i: {GENERALIST: state.get(of_client(i), mean)} for i in clients}  # near to all

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        theta, order = {i: replies[i][GENERALIST] for i in sorted(replies)}, clients_with(state)
        t, weights = int(state["round"]), state["weights"]
        if self.gamma:
            scores = yield from self.compared(theta, order, self.sample(t, list(theta), rng))
            weights = ascend_simplex(weights, with_own(scores), self.gamma)
        mixed = self.average(theta, weights, order)
        return state | by_client(mixed) | {"weights": weights, "round": torch.tensor(t + 1)}

    def average(
        self, theta: Mapping[ClientId, Tensor], weights: Tensor, order: Sequence[ClientId]
    ) -> dict[ClientId, Tensor]:
        """Return each client's sum_j w_ij theta_j^G, over those that took part."""
        if not theta:
            return {}
        rows = torch.tensor([order.index(i) for i in theta])
        shares = weights[rows][:, rows] + EPSILON * torch.eye(len(rows), dtype=torch.float64)
        mixed = mixtures(list(theta.values()), shares / shares.sum(dim=1, keepdim=True))
        return dict(zip(theta, mixed, strict=True))

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        client.load(theta_g)
        self.local_iterations(client)
        return {GENERALIST: client.flat(GENERALIST)}


def with_own(scores: Tensor) -> Tensor:
    """Return scores of pairs, (n, n), with a diagonal: the best collaborator's score, or 0 if all
    disagree. Otherwise two clients that agree would take each other's model and drop their own.
    """
    others = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), 0.0)
    return others + torch.diag(others.max(dim=1).values)


def even(n: int) -> Tensor:
    """(n, n): W with which all clients get the mean."""
    return torch.full((n, n), 1 / n).double()
