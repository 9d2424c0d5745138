"""DDOME: a pool of experts at the server; a gate picks a few for each client, also for new ones.

Farhat et al., "Learning to Specialize: Joint Gating-Expert Training for Adaptive MoEs in
Decentralized Settings", Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from pydantic import Field

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.client.state import EXPERT_IDS
from coterie.core.errors import RecipeError
from coterie.core.importing import require
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import Named, Tensors
from coterie.data.examples import Examples
from coterie.methods.pool_choice import ANCHOR, ChosenPool
from coterie.methods.pools import ask_scores, chosen_experts
from coterie.models.layout import GateTarget, Layout, PoolLayout

WARMUP = "warmup"  # tells a client to leave the gate to anchors; at the server, rounds left of that


@dataclass(frozen=True)
class DDOME(ChosenPool):
    """In each round the active clients get the gate; an anchor its own expert, a normal client the
    K experts that its data score highest.

    An anchor trains its expert on its labels, and the gate to send its data there, by two
    independent losses. A normal client trains its K experts and the gate by one joint loss of their
    mixture. A new client, with or without labels, gets the gate, sends its data's scores of each
    expert, and gets K of them; each of its samples is classified by the one with the highest score.
    Neither data nor embeddings ever leave a client.

    The server's state is that of `ChosenPool`, `anchor/<client>`, the number of the expert that an
    anchor is tied to, and `warmup`, if any, rounds left of it. In the joint loss the paper
    multiplies outputs by the gate's scores over all M experts, which collapsed the gate in a trial;
    so logits are mixed with scores renormalised over the K.
    """

    pool: Annotated[int, Field(ge=1)] = 5  # M, experts at the server
    anchors: bool = True  # whether each anchor is tied to one expert
    # what the joint loss mixes, with weights renormalised over the K experts: logits or
    # probabilities; scores: as in the paper, without renormalisation
    mixture: Literal["logits", "probabilities", "scores"] = "logits"
    # which experts classify a sample: the best of the K, or all
    answer: Literal["best", "mixture"] = "best"
    # first rounds, in which anchors alone train the gate; null: none
    warmup: Annotated[int | None, Field(ge=1)] = None
    # most clients per expert, in multiples of a fair share; null: any
    load: Annotated[float | None, Field(ge=1)] = None

    @property
    def size_of_pool(self) -> int:
        return self.pool

    def layout(self, position: int, base: Layout) -> PoolLayout:
        return PoolLayout(
            pool=self.pool,
            chosen=self.top_k,
            slots=self.top_k if self.coverage is None else self.pool,
            mixture=self.mixture,
            answer=self.answer,
            start=self.initial,
        )

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        if self.anchors:
            self.check_anchors(len(model.anchors))
        if self.warmup and not (self.anchors and model.anchors):
            raise RecipeError("method", ["method.warmup: needs anchors (data.anchors)"])
        if self.choice == "device" and (self.load or self.warmup):
            field = "load" if self.load else "warmup"
            mistake = f"method.{field}: needs a server that sees who has which expert"
            raise RecipeError("method", [f"{mistake}; use null, or method.choice: server"])
        if self.load is not None:
            require("method.load", "scipy", "scipy")

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        anchors = model.anchors if self.anchors else ()
        tied = {f"{ANCHOR}/{q}": torch.tensor(m) for m, q in enumerate(anchors)}  # I_q
        warmup = {WARMUP: torch.tensor(self.warmup)} if self.warmup else {}
        return super().init(model, clients) | tied | warmup

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        if self.choice == "device":
            return (yield from self.mean_round(state, clients))
        anchored = {q: int(state[f"{ANCHOR}/{q}"]) for q in clients if f"{ANCHOR}/{q}" in state}
        normal = [s for s in clients if s not in anchored]
        scores = yield ask_scores(self.score_experts, state, normal, self.pool)
        sign = {ANCHOR: torch.tensor(True)}
        requests = {q: self.download_for(state, [m]) | sign for q, m in anchored.items()}
        warmup = {WARMUP: state[WARMUP] - 1} if state.get(WARMUP) else {}
        chosen = chosen_experts(scores, self.top_k, self.load)  # e_s = TopK(sum_i softmax g(x_i))
        requests |= {s: self.download_for(state, e_s) | warmup for s, e_s in chosen.items()}
        replies = yield Ask(self.train, requests, self.reply_spec)
        return state | warmup | self.combine(replies, state)  # experts without a client stay

    def reply_spec(self, sent: Named) -> Named:
        """Return the specification of a pool, without marks, nor a gate that was not trained."""
        unsent = {ANCHOR, WARMUP} | ({GATE} if WARMUP in sent else set())
        return super().reply_spec({name: t for name, t in sent.items() if name not in unsent})

    @task(Sends.UPDATE)
    def train(self, client: Client, received: Tensors) -> Tensors:
        """Do an anchor's or a normal client's local iterations; return the trained tensors."""
        step = self.anchor_step if ANCHOR in received else self.normal_step
        client.frozen = frozenset({GATE} if WARMUP in received else ())
        client.load({name: t for name, t in received.items() if name not in (ANCHOR, WARMUP)})
        for _ in range(self.steps(client)):
            step(client, cast(Examples, client.draw(client.train)))
        return self.trained(client)

    def anchor_step(self, client: Client, batch: Examples) -> None:
        """Step on two independent losses: the gate's towards I_q, the expert's on labels."""
        assert batch.embedding is not None
        client.step_on(GateTarget(batch.embedding, int(client.state[EXPERT_IDS][0])), GATE)
        client.step_on(replace(batch, embedding=None), EXPERT)

    def normal_step(self, client: Client, batch: Examples) -> None:
        """Step on the joint loss of the K experts' mixture."""
        client.step_on(batch, GATE, EXPERT)
