"""APFL: each client's model is a mixture of a local and the global one, with a learned weight.

Deng et al., "Adaptive Personalized Federated Learning", 2020 (arXiv:2003.13461), Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Aggregating, OneAdapter

LOCAL, ALPHA = "apfl/local", "apfl/alpha"  # v_i and alpha_i, which a client keeps


@dataclass(frozen=True)
class APFL(OneAdapter, Aggregating):
    """w is FedAvg's; a client's model is alpha_i v_i + (1 - alpha_i) w_i, by whose gradient on the
    same batch v_i and alpha_i descend.

    The server's state holds `generalist`, (d,), w. v_i and alpha_i never leave.
    """

    dynamic_membership: ClassVar[bool] = True

    alpha: Annotated[
        float, Field(ge=0, le=1, description="alpha, the local model's weight at the start")
    ] = 0.5
    adaptive: Annotated[bool, Field(description="learn alpha (their eq. 10), else keep it")] = True

    @property
    def needs_only_mean(self) -> bool:
        return self.aggregation.needs_only_mean

    by_examples = True

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return {GENERALIST: model.flat(GENERALIST)}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, dict.fromkeys(clients, state), self.reply_spec)
        return state | self.combine(replies, state)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, w: Tensors) -> Tensors:
        with client.borrowing(w):
            w_i = client.flat()
        v = client.state.setdefault(LOCAL, w_i.clone())
        alpha = client.state.setdefault(ALPHA, torch.tensor(self.alpha, dtype=torch.float64))
        experts = client.training.experts
        for _ in range(self.steps(client)):
            batch, eta = client.draw(client.train), client.lr
            client.load({GENERALIST: torch.lerp(w_i, v, float(alpha))})
            at_w = client.gradient_to_share(w_i, batch)
            g = client.gradient(batch)  # at the mixture, of which v_i is a share of alpha
            if self.adaptive:
                alpha.sub_(eta * float((v - w_i) @ g)).clamp_(0, 1)
            client.advance()
            experts.step(v, float(alpha) * g, eta, client.state, "apfl/v")
            experts.step(w_i, at_w, eta, client.state, "apfl/w")
        client.load({GENERALIST: torch.lerp(w_i, v, float(alpha))})
        return {GENERALIST: w_i} | self.sample_count(client)
