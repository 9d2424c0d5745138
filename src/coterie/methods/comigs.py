"""CoMiGS: Collaborative learning with a Mixture of Generalists and Specialists.

"On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists", Algorithm 1 (papers/comigs).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation import Mean, agreement, ascend_simplex, deal, midpoints, mixtures
from coterie.client import NUMBERS, Client, Training
from coterie.data.splits import Split
from coterie.errors import RecipeError
from coterie.methods.method import Aggregating, Comparing, Reader, Routed
from coterie.models.adapter import Layout
from coterie.models.language import LanguageModel
from coterie.protocol import Adaptation, Ask, ClientId, Replies, Round, Sends, State, task
from coterie.roles import EXPERT, GATE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.tensors import Tensors

Count = Annotated[int, Field(ge=0)]
CHOSEN = "chosen/"  # what the names of the clients' choices among a pool begin with
SCORES = "scores"  # how much a client's text wants each member of the pool


@dataclass(frozen=True)
class CoMiGS(Routed, Comparing, Aggregating):
    """Generalists and attention LoRAs are averaged; specialists and token-level routers never leave their client.

    A bilevel problem by alternating first-order steps: experts descend on training data (eq. 3), routers on validation data (eq. 4).

    Args:
        generalists: g, shared experts per MLP block; or "pool", not in the paper: the server has M of them, and each client gets those K
            that a gate chooses by its text (DDOME). The gate is averaged over all clients, each generalist over those that have it. Beside
            what routers learn, the gate learns to choose by itself what was dealt (as in self-labelling, Asano et al. 2020), so that it
            can choose freely for clients that come later.
        specialists: s_i, local experts per MLP block: one number, or one per client in the order of the federation.
        router_every: tau, local iterations between updates of the router, counted over the whole run.
        router_steps: s, optimiser steps per update of the router, each on a fresh batch.
        router_data: Where those batches come from; "train" draws fresh training batches (the rows "-tr").
        aggregate: "mean": theta^G <- 1/N sum_i theta_i^G, or what another `aggregation` makes of them. "cobo", not in the paper:
            theta_i^G <- sum_j w_ij theta_j^G, where each row of W learns on the simplex, from 1/N, by how well gradients agree halfway
            between two clients' generalists (CoBo, Remark 1), so that unlike groups of users need not share one generalist.
        gamma: Step size of W.
        pool: M, generalists at the server.
        chosen: K, of them at a client.
        load: How many clients a generalist of the pool may have while they train, see `deal`.

    The server's state is theta^G by its names; with "cobo" it is `<client>/generalist`, (d,) each, and `weights`, (N, N), in the order of
    the clients' ids. With a pool theta^G is the attention LoRAs, beside `expert/<number>`, (d,), one of the pool in all blocks; `gate`,
    (d_g,); and `chosen/<client>`, (K,).
    """

    per_client: ClassVar[tuple[str, ...]] = ("specialists",)
    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, EXPERT, GATE)
    universal: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    generalists: Annotated[
        Count | Literal["pool"], Field(description="g, shared experts per MLP block; pool: a gate chooses them among more")
    ] = 1
    specialists: Annotated[
        Count | tuple[Count, ...], Field(description="s_i, local experts per MLP block, one number or one per client")
    ] = 1
    router_every: Annotated[int, Field(ge=1, description="tau, local iterations between router updates")] = 30
    router_steps: Annotated[int, Field(ge=0, description="s, optimiser steps per router update")] = 10
    router_data: Annotated[Literal["valid", "train"], Field(description="data of the upper level")] = "valid"
    aggregate: Annotated[
        Literal["mean", "cobo"], Field(description="generalists: one mean for all, or each client's own by collaboration weights")
    ] = "mean"
    gamma: Annotated[float, Field(ge=0, description="step size of the collaboration weights, with aggregate cobo")] = 0.05
    pool: Annotated[int, Field(ge=1, description="M, generalists at the server, with generalists: pool")] = 4
    chosen: Annotated[int, Field(ge=1, description="K, of them at a client")] = 2
    load: Annotated[
        float | None, Field(ge=1, description="the most clients of a generalist of the pool, in fair shares; null: as many as want it")
    ] = 1

    @property
    def pooling(self) -> bool:
        """Whether a gate chooses the generalists of each client."""
        return self.generalists == "pool"

    @property
    def lower(self) -> tuple[Role, ...]:
        """What training data train."""
        return (GENERALIST, EXPERT, SPECIALIST) if self.pooling else (GENERALIST, SPECIALIST)

    @property
    def upper(self) -> tuple[Role, ...]:
        """What validation data train."""
        return (ROUTER, GATE) if self.pooling else (ROUTER,)

    @property
    def sums(self) -> bool:
        return self.aggregate == "mean" and not self.pooling and self.aggregation.sums

    @property
    def by_examples(self) -> bool:
        return self.aggregate == "mean" and not self.pooling  # a pool's gate learns of whole texts, midpoint gradients have no noise

    def layout(self, position: int, base: Layout) -> Layout:
        specialists = self.specialists if isinstance(self.specialists, int) else self.specialists[position]
        if self.generalists == "pool":
            return replace(self.mixture(base, self.chosen, specialists), members=self.pool)
        return self.mixture(base, self.generalists, specialists)

    def check(self, model: Reader, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        if self.aggregate == "cobo" and self.aggregation != Mean():
            mistake = "method.aggregation: with aggregate: cobo each client's generalists have weights of their own; use aggregate: mean"
            raise RecipeError("method", [mistake])
        if self.pooling and self.aggregate == "cobo":
            mistake = "method.aggregate: cobo gives each client generalists of its own, and a pool has those of all; use mean"
            raise RecipeError("method", [mistake])

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        if self.pooling:
            pool = {f"{EXPERT}/{m}": model.flat(EXPERT, m) for m in range(self.pool)}
            return model.read(GENERALIST) | pool | {GATE: model.flat(GATE)} | {f"{CHOSEN}{i}": torch.arange(self.chosen) for i in clients}
        if self.aggregate == "mean":
            return model.read(GENERALIST)
        n = len(clients)
        return {f"{i}/{GENERALIST}": model.flat(GENERALIST) for i in sorted(clients)} | {"weights": torch.full((n, n), 1 / n).double()}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        if self.pooling:
            common = {name: t for name, t in state.items() if not name.startswith((CHOSEN, f"{EXPERT}/"))}
            chosen = {i: [f"{EXPERT}/{m}" for m in state[f"{CHOSEN}{i}"].tolist()] for i in clients}
            return {i: common | {name: state[name] for name in own} for i, own in chosen.items()}
        if self.aggregate == "mean":
            return dict.fromkeys(clients, state)
        return {i: {GENERALIST: state[f"{i}/{GENERALIST}"]} for i in clients}

    def adapt(self, state: State, clients: Sequence[ClientId]) -> Adaptation:
        if self.aggregate == "cobo":  # to all of them a new client is as near
            theta = [t for name, t in state.items() if name.endswith(f"/{GENERALIST}")]
            return {i: {GENERALIST: torch.stack(theta).mean(dim=0)} for i in clients}
        if self.pooling:
            scores = yield self.scoring(state, clients)
            state, clients = state | self.choices(scores, None), tuple(scores)
        return self.download(state, clients)

    def scoring(self, state: State, clients: Sequence[ClientId]) -> Ask:
        """With a pool: the question how much each client wants each of it."""
        form = {SCORES: torch.empty(self.pool, dtype=torch.float64, device="meta")}
        return Ask(self.score_generalists, {i: {GATE: state[GATE]} for i in clients}, lambda sent: form)

    def choices(self, scores: Replies, load: float | None) -> State:
        """`chosen/<client>` of those that sent their scores."""
        order = sorted(scores)
        found = deal(torch.stack([scores[i][SCORES] for i in order]), self.chosen, load) if order else ()
        return {f"{CHOSEN}{i}": own for i, own in zip(order, found, strict=True)}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        if self.pooling:
            scores = yield self.scoring(state, clients)
            state, clients = state | self.choices(scores, self.load), tuple(scores)
        replies = yield Ask(self.local_round, self.download(state, clients), self.back)
        if self.aggregate == "mean":
            return state | self.combine(replies, state)  # theta^G <- 1/N sum_i theta_i^G
        theta, order = {i: replies[i][GENERALIST] for i in sorted(replies)}, _known(state)
        compared = yield Ask(self.midpoint_gradients, midpoints(theta, combinations(theta, 2)))
        weights = ascend_simplex(state["weights"], agreement(order, compared), self.gamma)
        here = torch.tensor([order.index(i) for i in theta], dtype=torch.int64)  # whoever took no part is left out, as of a mean
        shares = weights[here][:, here] + 1e-12 * torch.eye(len(here), dtype=torch.float64)
        mixed = mixtures(list(theta.values()), shares / shares.sum(dim=1, keepdim=True)) if theta else ()
        return state | {f"{i}/{GENERALIST}": own for i, own in zip(theta, mixed, strict=True)} | {"weights": weights}

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor | None:
        if self.aggregate == "mean":
            return None
        places = torch.tensor([_known(state).index(i) for i in clients])
        return state["weights"][places][:, places]

    def towards(self, client: Client) -> Callable[[], Tensors] | None:
        """With a pool: what the gate learns besides, as the gate of an anchor does in DDOME."""
        return client.model.towards if self.pooling and isinstance(client.model, LanguageModel) else None

    @task(Sends.SCORES)
    def score_generalists(self, client: Client, gate: Tensors) -> Tensors:
        """How much the client's own text wants each of the pool, (M,): all that the server learns of it before it sends generalists."""
        with client.borrowing(gate), torch.no_grad():
            assert isinstance(client.model, LanguageModel)
            return {SCORES: client.model.affinity(client.embeddings(client.data.train)).double().cpu()}

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        held = client.state.get(NUMBERS, torch.empty(0)).tolist()
        client.load(theta_g)
        if self.pooling and client.state[NUMBERS].tolist() != held:
            client.forget(EXPERT)
        self.local_iterations(client)
        if self.aggregate == "cobo":
            return {GENERALIST: client.flat(GENERALIST)}
        pool = client.experts() | {GATE: client.flat(GATE)} if self.pooling else {}
        return client.read(GENERALIST) | pool | self.size(client.data)  # specialists and router never leave

    def local_iterations(self, client: Client) -> None:
        """The L local iterations of a round."""
        for _ in range(self.steps(client)):
            self.lower_step(client)
            if client.iteration % self.router_every == 0:
                for _ in range(self.router_steps):
                    self.upper_step(client, client.valid if self.router_data == "valid" else client.train)

    def lower_step(self, client: Client) -> None:
        """Experts and attention descend on training data, eq. 3."""
        client.step(*self.lower, on=client.train)

    def upper_step(self, client: Client, on: Split) -> None:
        """Routers descend on validation data, eq. 4."""
        client.step(*self.upper, on=on, extra=self.towards(client))


def _known(state: State) -> list[ClientId]:
    """The clients that have generalists of their own, in the order of the weights."""
    return sorted(name.removesuffix(f"/{GENERALIST}") for name in state if name.endswith(f"/{GENERALIST}"))
