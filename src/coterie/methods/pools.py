"""Base classes of methods whose server holds a pool of whole models, of which clients train some or
all; and a gate's scores of its members on a client's data (DDOME, Section 4).
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from coterie.aggregation.clustering import assign_experts, first_largest
from coterie.aggregation.means import Mean
from coterie.aggregation.robust import Rule
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, Task, task
from coterie.core.roles import EXPERT, GATE, Role
from coterie.core.tensor_names import of_expert
from coterie.core.tensors import Tensors
from coterie.data.splits import Split
from coterie.methods.templates import Aggregating
from coterie.models.layout import Layout, PoolLayout
from coterie.models.pool import PoolClassifier

SCORES = "scores"


def ask_scores(question: Task, state: State, clients: Sequence[ClientId], size: int) -> Ask:
    """Ask each client for the gate's scores of the `size` members of the pool on its data."""
    form = {SCORES: torch.empty(size, dtype=torch.float64, device="meta")}
    return Ask(question, {i: {GATE: state[GATE]} for i in clients}, lambda sent: form)


def own_scores(client: Client, gate: Tensors, data: Split) -> Tensors:
    """Return sum_i softmax g(x_i), (M,) float64, over a client's embedded data."""
    with client.borrowing(gate), torch.no_grad():
        assert isinstance(client.model, PoolClassifier)
        return {SCORES: client.model.affinity(client.embeddings(data)).cpu().double()}


def chosen_experts(
    scores: Replies, count: int, load: float | None = None, coverage: float | None = None
) -> dict[ClientId, list[int]]:
    """Return each client's members, in rising order: those that score highest, see
    `assign_experts` for a limit of load; with a `coverage` as few as have this share of the scores.
    """
    totals = {i: reply[SCORES] for i, reply in scores.items()}
    if coverage is not None:
        sums = {i: row.sort(descending=True).values.cumsum(dim=0) for i, row in totals.items()}
        fewest = {i: 1 + int((mass < coverage * mass[-1]).sum()) for i, mass in sums.items()}
        return {i: first_largest(row, fewest[i]) for i, row in totals.items()}
    if load is None or not totals:
        return {i: first_largest(row, count) for i, row in totals.items()}
    assigned = assign_experts(torch.stack([*totals.values()]), count, load)
    return dict(zip(totals, assigned.tolist(), strict=True))


@dataclass(frozen=True)
class Pooling(Aggregating):
    """Clients keep nothing of the pool between rounds; each expert is averaged over its holders.

    The server's state holds `expert/<number>`, (d,) each, running statistics included, and `gate`,
    (d_g,), if there is one.
    """

    dynamic_membership: ClassVar[bool] = True
    serves_unseen_clients: ClassVar[bool] = True
    stateless: ClassVar[bool] = True
    shared: ClassVar[tuple[Role, ...]] = (EXPERT, GATE)

    # initial values of the experts: random (of texts: the pretrained base), from the common expert,
    # or auto: from the common expert where it fits
    initial: Literal["random", "common", "auto"] = "random"
    aggregation: Annotated[
        Rule,
        Field(
            description="as for fedavg, for each expert of the pool over the clients that had it; "
            "default: a mean weighted by samples"
        ),
    ] = Mean(weighting="samples")  # noqa: RUF009 - rules are frozen

    @property
    @abstractmethod
    def size_of_pool(self) -> int:
        """M, the number of members."""

    @abstractmethod
    def layout(self, position: int, base: Layout) -> PoolLayout: ...

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        experts = {of_expert(m): model.flat(EXPERT, m) for m in range(self.size_of_pool)}
        return experts | ({GATE: model.flat(GATE)} if self.layout(0, Layout()).gated else {})

    def download_for(self, state: State, experts: Iterable[int]) -> Tensors:
        """Return a client's download: the gate, and these experts."""
        gate = {GATE: state[GATE]} if GATE in state else {}
        return gate | {of_expert(m): state[of_expert(m)] for m in experts}

    def trained(self, client: Client) -> Tensors:
        """Return a client's reply: the gate unless frozen, its experts, and `sample_count`."""
        gated = f"parameters/{GATE}" in client.state and GATE not in client.frozen
        gate = {GATE: client.flat(GATE)} if gated else {}
        return client.experts() | gate | self.sample_count(client)

    @task(Sends.SCORES)
    def score(self, client: Client, tensors: Tensors) -> Tensors:
        """Return any method's score, and `choices` of the test set, see `PoolClassifier.judge`,
        unless the server needs only means.
        """
        with client.borrowing(self.loadable(client, tensors)):
            assert isinstance(client.model, PoolClassifier)
            test, choices = client.model.judge(client.batches(client.test))
            scores = {"valid": client.score(client.valid), "test": test}
        return scores if self.needs_only_mean else {**scores, "choices": choices}

    def score_spec(self, scores: Tensors) -> Tensors:
        return {n: t for n, t in scores.items() if n != "choices" or not self.needs_only_mean}

    def check_anchors(self, anchors: int) -> None:
        """Raise RecipeError if there are more anchors than experts."""
        if anchors > self.size_of_pool:
            number = self.size_of_pool
            mistake = f"method.pool: {number} experts for {anchors} anchors (data.anchors)"
            raise RecipeError("method", [f"{mistake}; use as many, or method.anchors: false"])


@dataclass(frozen=True)
class WholePool(Pooling):
    """Every client gets and trains the whole pool."""

    @property
    def needs_only_mean(self) -> bool:
        return self.aggregation.needs_only_mean

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.train, dict.fromkeys(clients, state), self.reply_spec)
        return state | self.combine(replies, state)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, state)

    @abstractmethod
    def train(self, client: Client, received: Tensors) -> Tensors:
        """Train locally from the whole pool. A @task that returns `trained`."""
