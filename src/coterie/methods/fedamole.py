"""FedAMoLE: experts of each layer choose the clients that hold them, by embeddings of both.

Zhang et al., "Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
Architectures" (arXiv:2411.19128).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.clustering import affinities, best_choices
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import EXPERT, GENERALIST, ROUTER, Role
from coterie.core.tensor_names import by_client, of_client, of_expert
from coterie.core.tensors import Tensors
from coterie.methods.templates import Aggregating, Routed
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

HELD, EMBEDDINGS = "held", "embeddings"


@dataclass(frozen=True)
class FedAMoLE(Routed, Aggregating):
    """A client trains a shared expert, a router and, in each of B blocks, some of M experts, which
    are averaged over their holders. Then experts choose clients anew.

    The server's state is `generalist` and `router`, (d,); `expert/<m B + b>`, (d,), expert m of
    block b; `embeddings`, the form of a client's, see `affinities`; `<client>/held`, (M, B) bool.
    """

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, ROUTER, EXPERT)
    packages: ClassVar[tuple[str, ...]] = ("scipy",)
    dynamic_membership: ClassVar[bool] = True
    server_steps: ClassVar[bool] = True  # a client's experts change

    experts: Annotated[int, Field(ge=1)] = 12  # M, experts of each block, beside the shared one
    choices: Annotated[int, Field(ge=1)] = 2  # clients that each expert chooses
    most_experts: Annotated[int, Field(ge=1)] = 8  # most experts of a client in a block
    embedded: Annotated[int, Field(ge=1)] = 32  # training windows that clients are chosen by

    def layout(self, position: int, base: Layout) -> Layout:
        layout = self.mixture(base, 1, min(self.most_experts, self.experts))
        return replace(layout, top_k=self.top_k + 1, projected=True)  # with the shared expert

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        each, n = min(self.choices, len(clients)), len(clients)
        if self.experts < (least := ceil(n * min(self.top_k, self.most_experts) / each)):
            mistake = f"{self.experts} that choose {each} of {n} clients leave some with too few"
            remedy = f"use at least {least}, or more method.choices"
            raise RecipeError("method", [f"method.experts: {mistake}; {remedy}"])

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        routers = [*model.read(ROUTER).values()]
        form = torch.zeros(len(routers), self.layout(0, Layout()).experts, len(routers[0]))
        state = {EMBEDDINGS: form.double()} | {r: model.flat(r) for r in (GENERALIST, ROUTER)}
        flat = torch.stack([model.flat(EXPERT, m) for m in range(self.experts)])
        blocks = flat.view(self.experts * len(routers), -1)
        state |= {of_expert(n): block.clone() for n, block in enumerate(blocks)}
        return self.members(state, clients)

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        nothing = torch.zeros(self.experts, len(state[EMBEDDINGS]), dtype=torch.bool)
        return by_client({i: nothing.clone() for i in clients}, HELD) | state

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        shared = {role: state[role] for role in (GENERALIST, ROUTER)}
        held = {i: state[of_client(i, HELD)].flatten().nonzero()[:, 0].tolist() for i in clients}
        return {i: shared | {of_expert(n): state[of_expert(n)] for n in held[i]} for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        held = {i: state[of_client(i, HELD)] for i in sorted(clients)}
        if new := [i for i, mask in held.items() if not mask.any()]:
            size = len(state[EMBEDDINGS]), self.experts, len(new)
            held |= self.chosen(torch.rand(size, generator=rng), new)
        down = self.download(state | by_client(held, HELD), clients)
        replies = yield Ask(self.local_round, down, self.reply_spec)
        if not replies:
            return state
        state = state | self.combine(replies, state)
        state |= by_client({i: held[i] for i in replies}, HELD)
        form = {EMBEDDINGS: state[EMBEDDINGS]}
        sent = yield Ask(self.embed, dict.fromkeys(replies, Tensors()), lambda _: form)
        if not (order := sorted(sent)):
            return state
        scores = affinities([held[i] for i in order], [sent[i][EMBEDDINGS] for i in order])
        return state | by_client(self.chosen(scores, order), HELD)

    def chosen(self, scores: Tensor, order: Sequence[ClientId]) -> dict[ClientId, Tensor]:
        """Return which experts each client holds, (M, B) bool, by scores, (B, M, N)."""
        each = min(self.choices, len(order))
        least = min(self.top_k, self.most_experts, self.experts * each // len(order))
        blocks = [best_choices(p, each, self.most_experts, least) for p in scores.softmax(dim=-1)]
        held = torch.stack(blocks).bool()
        return {i: held[..., k].T.contiguous() for k, i in enumerate(order)}

    @task(Sends.UPDATE)
    def local_round(self, client: Client, received: Tensors) -> Tensors:
        client.load(received)
        client.reset_optimizer(EXPERT)  # of experts that it may no longer hold
        self.local_iterations(client)
        shared = {role: client.flat(role) for role in (GENERALIST, ROUTER)}
        return shared | client.experts() | self.sample_count(client)

    def iterate(self, client: Client) -> None:
        client.step(GENERALIST, EXPERT, ROUTER, on=client.train)

    @task()
    def embed(self, client: Client, empty: Tensors) -> Tensors:
        assert isinstance(client.model, LanguageModel)
        batches = client.batches(client.train, self.embedded)
        return {EMBEDDINGS: client.model.embeddings(batches)}
