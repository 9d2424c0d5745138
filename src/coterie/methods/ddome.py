"""DDOME: a pool of experts at the server, of which a gate picks the few that a client needs, also
for clients never seen before.

Farhat et al., "Learning to Specialize: Joint Gating-Expert Training for Adaptive MoEs in
Decentralized Settings", Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.client.state import EXPERT_IDS
from coterie.core.errors import RecipeError
from coterie.core.protocol import (
    Adaptation,
    Ask,
    ClientId,
    Replies,
    Round,
    Sends,
    State,
    Task,
    task,
)
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import Named, Tensors
from coterie.data.examples import Examples
from coterie.data.splits import Split
from coterie.methods.base import Reader
from coterie.methods.pools import Pooling
from coterie.models.layout import Layout
from coterie.models.pool import PoolClassifier, PoolLayout, Towards

ANCHOR = "anchor"  # tells a client that it is the anchor of the one expert that it gets
SCORES = "scores"  # how much a client's data want each expert of the pool


@dataclass(frozen=True)
class DDOME(Pooling):
    """In each round the active clients get the gate; an anchor its own expert, a normal client
    those K that its data score highest.

    An anchor trains its expert on its labels, and the gate to send its data there: two independent
    losses. A normal client trains its K experts and the gate by one joint loss of their mixture. A
    new client, labels or not, gets the gate, says how much its data want each expert, and gets K of
    them; each of its samples is then classified by the one with the highest score. Neither data nor
    embeddings ever leave a client.

    The server's state holds what `Pooling` says, and `anchor/<client>`, the number of the expert
    that an anchor is tied to.

    Args:
        pool: M, experts at the server.
        top_k: K, experts that a client gets, at most M.
        anchors: Whether the data's anchors act as such; otherwise they are clients like any other.
        mixture: Of the K experts' outputs in the joint loss. The paper multiplies outputs by scores
            as the gate gives them over all M ("scores"), which in a trial collapsed the gate; by
            default logits are mixed with scores renormalised over the K.
        answer: How a sample is classified: by the best expert of the K, as in the paper, or by
            their mixture.
    """

    pool: Annotated[int, Field(ge=1, description="M, experts at the server")] = 5
    top_k: Annotated[int, Field(ge=1, description="K, experts that a client gets")] = 2
    anchors: Annotated[
        bool, Field(description="whether the data's anchor clients are tied to an expert each")
    ] = True
    mixture: Annotated[
        Literal["logits", "probabilities", "scores"],
        Field(
            description="in the joint loss, with weights renormalised over the K: of logits or "
            "probabilities; scores: as printed, without"
        ),
    ] = "logits"
    answer: Annotated[
        Literal["best", "mixture"],
        Field(description="who classifies a sample: the best of the K experts, or all"),
    ] = "best"

    @property
    def size_of_pool(self) -> int:
        return self.pool

    def layout(self, position: int, base: Layout) -> PoolLayout:
        return PoolLayout(
            pool=self.pool,
            chosen=self.top_k,
            mixture=self.mixture,
            answer=self.answer,
            start=self.initial,
        )

    def check(self, model: Reader, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        if self.anchors and len(model.anchors) > self.pool:
            mistake = (
                f"method.pool: {self.pool} experts for {len(model.anchors)} anchors "
                f"(data.anchors), each of which has one of its own"
            )
            raise RecipeError("method", [f"{mistake}; use as many, or method.anchors: false"])

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        anchors = model.anchors if self.anchors else ()
        return super().init(model, clients) | {
            f"{ANCHOR}/{q}": torch.tensor(m) for m, q in enumerate(anchors)
        }

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        own = {q: int(state[f"{ANCHOR}/{q}"]) for q in clients if f"{ANCHOR}/{q}" in state}
        normal = [s for s in clients if s not in own]
        scores = yield self.scoring(self.score_experts, state, normal)
        anchors = {
            q: self.download_for(state, [m]) | {ANCHOR: torch.tensor(True)} for q, m in own.items()
        }
        replies = yield Ask(
            self.train, anchors | self.downloads_for(state, scores), self.reply_spec
        )
        return state | self.combine(replies, state)  # what nobody had stays as it is

    def adapt(self, state: State, clients: Sequence[ClientId]) -> Adaptation:
        scores = yield self.scoring(self.score_experts_unlabelled, state, clients)
        return self.downloads_for(state, scores)

    def scoring(self, question: Task, state: State, clients: Sequence[ClientId]) -> Ask:
        """Return the question how much each client's data want each expert."""
        form = {SCORES: torch.empty(self.pool, dtype=torch.float64, device="meta")}
        return Ask(question, {i: {GATE: state[GATE]} for i in clients}, lambda sent: form)

    def reply_spec(self, sent: Named) -> Named:
        """As any pool's; an anchor does not repeat that it is one."""
        return super().reply_spec({name: tensor for name, tensor in sent.items() if name != ANCHOR})

    def downloads_for(self, state: State, scores: Replies) -> dict[ClientId, Tensors]:
        """Return the gate, and e_s = TopK(sum_i softmax g(x_i)) of each client."""
        return {
            s: self.download_for(state, largest(reply[SCORES], self.top_k))
            for s, reply in scores.items()
        }

    @task(Sends.SCORES)
    def score_experts(self, client: Client, gate: Tensors) -> Tensors:
        """sum_i softmax g(x_i), (M,), over the client's training data: all that the server
        learns of them before it sends experts.
        """
        return _scores(client, gate, client.train)

    @task(Sends.SCORES)
    def score_experts_unlabelled(self, client: Client, gate: Tensors) -> Tensors:
        """Return the same over the data that a new client wants classified."""
        return _scores(client, gate, client.test)

    @task(Sends.UPDATE)
    def train(self, client: Client, received: Tensors) -> Tensors:
        """Return the local iterations of an anchor, on two independent losses, or of a normal
        client, on one.
        """
        anchor = ANCHOR in received
        client.load({name: tensor for name, tensor in received.items() if name != ANCHOR})
        for _ in range(self.steps(client)):
            batch = cast(Examples, client.draw(client.train))
            if anchor:
                assert batch.embedding is not None
                client.step_on(Towards(batch.embedding, int(client.state[EXPERT_IDS][0])), GATE)
                client.step_on(replace(batch, embedding=None), EXPERT)
            else:
                client.step_on(batch, GATE, EXPERT)
        return self.trained(client)


def largest(scores: Tensor, k: int) -> list[int]:
    """Return the numbers of the k largest scores, (M,), in ascending order; of equal ones the
    first.
    """
    return sorted(sorted(range(len(scores)), key=lambda m: -float(scores[m]))[:k])


def _scores(client: Client, gate: Tensors, data: Split) -> Tensors:
    with client.borrowing(gate):
        assert isinstance(client.model, PoolClassifier)
        return {SCORES: client.model.affinity(client.embeddings(data))}
