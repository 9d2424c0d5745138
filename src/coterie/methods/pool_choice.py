"""A pool of which the server chooses K experts for each client, or each client for itself. Then the
server needs only the mean of all updates, as secure aggregation and the privacy of whole clients
ask: beyond DDOME's paper.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from coterie.aggregation.clustering import first_largest
from coterie.aggregation.means import uniform_mean
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Adaptation, Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GATE
from coterie.core.tensor_names import numbers_of_experts, of_expert
from coterie.core.tensors import Tensors
from coterie.methods.pools import SCORES, Pooling, ask_scores, chosen_experts, own_scores

ANCHOR = "anchor"  # tells a client that it is the anchor of the one expert that it gets
TRAINED = "trained"  # tells a client to be served by its training data
HELD = "held"  # what a client trained, (M + 1,): `WEIGHT` for each of its experts, and the gate
# Larger ones leave updates less of the clipping norm; with smaller ones noise drowns the counts.
WEIGHT = 0.2


@dataclass(frozen=True)
class ChosenPool(Pooling):
    """A pool of which each client gets K experts, or an anchor its own.

    With `choice: device` every client gets the whole pool, chooses, trains, and returns the whole
    pool, in which what it did not choose is unchanged. The server divides an expert's mean change
    by the mean of `held`, the share of clients that had it, which makes it the mean over these; and
    the gate's likewise, whose share is less than 1 only where updates are clipped. It sees neither
    scores nor who had which expert.
    """

    beyond_mean: ClassVar[str] = (
        "has a server that sees scores, and who has which expert; method.choice: device with "
        "method.aggregation.weighting: uniform has not"
    )

    top_k: Annotated[int, Field(ge=1)] = 2  # K, experts that each client gets
    # who chooses the K experts; server: by the scores that a client sends; device: the client, from
    # the whole pool, so that the server needs only the mean of all updates
    choice: Literal["server", "device"] = "server"
    # share of scores that a new client's experts have; null: K
    coverage: Annotated[float | None, Field(gt=0, le=1)] = None

    @property
    def needs_only_mean(self) -> bool:
        return self.choice == "device" and self.aggregation.needs_only_mean

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        if self.choice == "device" and not self.aggregation.needs_only_mean:
            mistake = "method.choice: device needs the uniform mean of all updates"
            remedy = "use method.aggregation.rule mean and method.aggregation.weighting uniform"
            raise RecipeError("method", [f"{mistake}; {remedy}"])

    def mean_round(self, state: State, clients: Sequence[ClientId]) -> Round:
        """Do a round of clients that choose for themselves; return the next state."""
        names = [*map(of_expert, range(self.size_of_pool)), GATE]
        sent = self.whole(state) | {HELD: torch.zeros(len(names), dtype=torch.float64)}
        replies = yield Ask(self.choose_and_train, dict.fromkeys(clients, sent))
        if not replies:
            return state
        mean = uniform_mean(replies)
        # An expert that nobody had has not changed. Noise may leave less than one client's share.
        shares = (mean[HELD] / WEIGHT).clamp(min=1 / len(replies)).tolist()
        moved: Tensors = {}
        for name, share in zip(names, shares, strict=True):
            before = state[name].to(mean[name].device)
            moved[name] = before + (mean[name] - before) / share
        return state | moved

    def whole(self, state: State) -> Tensors:
        """Return the state as each client gets it: masks carry floating-point numbers only."""
        return {n: t if t.is_floating_point() else t.double() for n, t in state.items()}

    def adapt(self, state: State, clients: Sequence[ClientId], trained: bool = False) -> Adaptation:
        """See `Method.adapt`. Clients that `trained` are served by their training data."""
        if self.choice == "device":
            mark = {TRAINED: torch.tensor(True)} if trained else {}
            return dict.fromkeys(clients, self.whole(state) | mark)
        question = self.score_experts if trained else self.score_experts_unlabelled
        scores = yield ask_scores(question, state, clients, self.size_of_pool)
        chosen = chosen_experts(scores, self.top_k, coverage=self.coverage)
        return {s: self.download_for(state, e_s) for s, e_s in chosen.items()}

    def loadable(self, client: Client, download: Tensors) -> Tensors:
        """Return the gate and K experts; of a whole pool, those for the data that serve it."""
        if self.choice == "server" or not numbers_of_experts(download):
            return download
        question = self.score_experts if TRAINED in download else self.score_experts_unlabelled
        scores = {client.id: question(client, {GATE: download[GATE]})}
        chosen = chosen_experts(scores, self.top_k, coverage=self.coverage)
        return self.download_for(download, chosen[client.id])

    @task(Sends.SCORES)
    def score_experts(self, client: Client, gate: Tensors) -> Tensors:
        """Return sum_i softmax g(x_i), (M,), over the training data: all that the server learns."""
        return own_scores(client, gate, client.train)

    @task(Sends.SCORES)
    def score_experts_unlabelled(self, client: Client, gate: Tensors) -> Tensors:
        """Return the same over the data that a new client wants to classify."""
        return own_scores(client, gate, client.test)

    @task(Sends.UPDATE)
    def choose_and_train(self, client: Client, pool: Tensors) -> Tensors:
        """Do `train` of an anchor's expert or of K chosen ones; return the whole pool and `held`,
        so that no reply tells by its form what was chosen.
        """
        tied = pool.get(f"{ANCHOR}/{client.id}")
        scores = self.score_experts(client, {GATE: pool[GATE]})[SCORES]
        chosen = first_largest(scores, self.top_k) if tied is None else [int(tied)]
        sign = {} if tied is None else {ANCHOR: torch.tensor(True)}
        trained = self.train(client, self.download_for(pool, chosen) | sign)
        held = torch.zeros_like(pool[HELD])
        held[[*chosen, -1]] = WEIGHT
        return {**pool, **trained, HELD: held}

    @abstractmethod
    def train(self, client: Client, received: Tensors) -> Tensors:
        """Train the received experts and gate. A @task that returns `trained`."""
