"""CoMiGS whose generalists stand alone, whose specialists learn what these leave, and whose clients
choose by validation how much of each they use: beyond the papers.

A global and a local model that each client mixes are those of APFL (Deng et al., "Adaptive
Personalized Federated Learning", 2020); here experts' outputs are mixed, and the share is chosen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged
from coterie.models.adapter import Layout

OFF = 100.0  # a logit that leaves no weight to the other experts: exp(-100) is 0 beside 1 in fp32
Weight = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class CoMiGSResidual(Averaged):
    """FedAvg of the generalists; specialists of one's own descend on the mixture of both, with
    weight 1 - a of the generalists and a of the specialists.

    With generalists alone, a = 0, a client is exactly one of FedAvg, whose part does not depend on
    the specialists: nobody fares worse for what others choose. After the last round each client
    takes of K candidates - its weights a, the base without adapters, its choice once more with the
    last mean of the generalists - the one with the least loss on m validation windows. Of losses in
    [0, M] and independent windows, it is within 2 M sqrt(log(2 K / delta) / (2 m)) of the best
    candidate with probability 1 - delta, by Hoeffding's inequality and a union bound.

    The share is a constant that each router adds to its logits, whose weights are 0: no token is
    routed, and no router is trained. Two gradients per iteration are 1.5 times the work of 1G1S
    with its router steps, less what `start` saves.

    Args:
        generalists: g, shared experts per MLP.
        specialists: s, local experts per MLP.
        start: The share of the rounds after which specialists learn; until then a = 0.
        weights: The values of a that are tried; specialists train at the (upper) middle one.
        windows: m.
        own_loss: Whether generalists descend on their own loss; otherwise one gradient of the
            mixture's trains both, as in CoMiGS.
        fallback: Whether the base without adapters is a candidate.
        synchronise: Whether the last mean of the generalists is one.
    """

    stateful: ClassVar[bool] = True

    generalists: Annotated[int, Field(ge=1, description="g, shared experts per MLP block")] = 2
    specialists: Annotated[int, Field(ge=1, description="s, local experts per MLP block")] = 2
    start: Annotated[
        float, Field(ge=0, le=1, description="share of the rounds after which specialists learn")
    ] = 0.3
    weights: Annotated[
        tuple[Weight, ...],
        Field(min_length=1, description="weights of the specialists that validation chooses from"),
    ] = (0.0, 0.25, 0.5, 0.75)
    windows: Annotated[
        int, Field(ge=1, description="validation windows on which a client chooses")
    ] = 32
    own_loss: Annotated[
        bool, Field(description="generalists descend on the loss of generalists alone")
    ] = True
    fallback: Annotated[bool, Field(description="the base without adapters is a candidate")] = True
    synchronise: Annotated[
        bool, Field(description="the last mean of the generalists is a candidate")
    ] = True

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(
            base,
            generalists=self.generalists,
            specialists=self.specialists,
            top_k=self.generalists + self.specialists,
            biased=True,
            balance="none",
        )

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        share = self.trained_weight if self.specialists_learn(client) else 0.0
        client.load(theta_g | self.mixing(client, share))
        self.local_iterations(client)
        return client.read(GENERALIST) | self.sample_count(client)

    def iterate(self, client: Client) -> None:
        """Do one step of the generalists on the loss of generalists alone, and one of the
        specialists on that of the mixture: of the same batch, at the same point.
        """
        batch, learns = client.draw(client.train), self.specialists_learn(client)
        if not self.own_loss:
            return client.step_on(batch, GENERALIST, *([SPECIALIST] if learns else []))
        residual = client.gradients(batch, SPECIALIST) if learns else {}
        with client.borrowing(self.mixing(client, 0.0)):
            client.step_on(batch, GENERALIST)
        if learns:
            client.descend(SPECIALIST, torch.cat([t.flatten() for t in residual.values()]))
        return None

    def specialists_learn(self, client: Client) -> bool:
        return client.round >= self.start * self.rounds

    @property
    def trained_weight(self) -> float:
        return sorted(self.weights)[len(self.weights) // 2]

    def mixing(self, client: Client, share: float) -> Tensors:
        """Return routers that give each of g generalists (1 - a) / g and each of s specialists
        a / s.
        """
        g, s = self.generalists, self.specialists
        logit = OFF if share == 1 else math.log(share * g / (1 - share) / s) if share else -OFF
        bias = torch.tensor([0.0] * g + [logit] * s)
        return {
            name: bias if name.endswith("bias") else torch.zeros_like(t)
            for name, t in client.read(ROUTER).items()
        }

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        yield Ask(self.choose, self.download(state, clients), empty_reply)
        return state

    @task(Sends.NOTHING)
    def choose(self, client: Client, theta_g: Tensors) -> Tensors:
        """Make the candidate with the least validation loss the client's model."""
        candidates = [self.mixing(client, share) for share in self.weights]
        losses = [self.loss(client, candidate) for candidate in candidates]
        best = candidates[losses.index(min(losses))]
        if self.synchronise:
            candidates.append(best | theta_g)
        if self.fallback:
            own = client.read(GENERALIST, SPECIALIST)
            candidates.append({name: torch.zeros_like(t) for name, t in own.items()})
        losses += [self.loss(client, candidate) for candidate in candidates[len(losses) :]]
        client.load(candidates[losses.index(min(losses))])
        return {}

    def loss(self, client: Client, candidate: Tensors) -> float:
        with client.borrowing(candidate):
            nll, predictions, *_ = client.score_part(client.valid, self.windows).tolist()
        return float(nll / predictions)
