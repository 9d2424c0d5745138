"""APFL: each client's model is a mixture of a local and the global one, with a learned weight.

Deng et al., "Adaptive Personalized Federated Learning", 2020 (arXiv:2003.13461), Algorithm 1.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import BesidePersonal

LOCAL, ALPHA = "apfl/local", "apfl/alpha"  # v_i and alpha_i, which a client keeps


@dataclass(frozen=True)
class APFL(BesidePersonal):
    """w is FedAvg's; a client's model is alpha_i v_i + (1 - alpha_i) w_i, by whose gradient on the
    same batch v_i and alpha_i descend.

    The server's state holds `generalist`, (d,), w. v_i and alpha_i never leave.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5  # alpha, the local model's weight at the start
    adaptive: bool = True  # learn alpha (their eq. 10), else keep it

    by_examples = True

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
            g, share = client.gradient(batch), float(alpha)  # at the mixture: v_i's share of it
            if self.adaptive:
                alpha.sub_(eta * float((v - w_i) @ g)).clamp_(0, 1)
            client.advance()
            experts.step(v, share * g, eta, client.state, "apfl/v")
            experts.step(w_i, at_w, eta, client.state, "apfl/w")
        client.load({GENERALIST: torch.lerp(w_i, v, float(alpha))})
        return {GENERALIST: w_i} | self.sample_count(client)
