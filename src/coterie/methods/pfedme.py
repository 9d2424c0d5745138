"""pFedMe: personal models near a global one, which moves towards them.

Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors, weighted_sum
from coterie.methods.templates import BesidePersonal, pull


@dataclass(frozen=True)
class PFedMe(BesidePersonal):
    """theta_i takes K steps on f_i(theta) + lambda/2 |theta - w_i|^2 with one batch, then
    w_i <- w_i - eta lambda (w_i - theta_i); the server takes w <- (1 - beta) w + beta mean(w_i).

    A client's model is theta_i, which starts each round at w and never leaves. Of the L local
    iterations of a round each is one step of theta_i. The server's state holds `generalist`, (d,),
    w.
    """

    prox: Annotated[float, Field(gt=0)] = 15.0  # lambda, strength of the pull of theta_i to w_i
    # K, steps of theta_i for each step of w_i; at most a round's, or w_i would never move
    inner_steps: Annotated[int, Field(ge=1)] = 5
    # eta, w_i's learning rate; null: the experts'
    local_lr: Annotated[float | None, Field(gt=0)] = None
    server_lr: Annotated[float, Field(gt=0)] = 1.0  # beta, the server's step

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, dict.fromkeys(clients, state), self.reply_spec)
        # the server's state is on the CPU
        mean = {name: t.cpu() for name, t in (state | self.combine(replies, state)).items()}
        return weighted_sum([(1 - self.server_lr, state), (self.server_lr, mean)])

    @task(Sends.UPDATE)
    def local_round(self, client: Client, w: Tensors) -> Tensors:
        client.load(w)
        w_i, near = client.flat(), client.read(GENERALIST)  # the same, flat and name by name
        batch, steps = client.draw(client.train), self.steps(client)
        for step in range(1, steps + 1):
            eta = client.lr if self.local_lr is None else self.local_lr
            client.step_on(batch, GENERALIST, extra=partial(pull, self.prox, client, near))
            if step % min(self.inner_steps, steps) == 0:
                w_i += eta * self.prox * (client.flat() - w_i)
                with client.borrowing({GENERALIST: w_i}):
                    near = client.read(GENERALIST)
                batch = client.draw(client.train)
        return {GENERALIST: w_i} | self.sample_count(client)
