"""Ditto: a personal model of each client, held near the global one.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Alg. 1.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import BesidePersonal, pull


@dataclass(frozen=True)
class Ditto(BesidePersonal):
    """The global w is FedAvg's; each client's own v_i minimises f_i(v_i) + lambda/2 |v_i - w|^2 on
    the same batches.

    v_i is the client's model: it never leaves, and it is what is scored. The server's state holds
    `generalist`, (d,), w; a client's own copy of it lives for one round, and of its optimiser the
    memory stays under `ditto/`.
    """

    # lambda, strength of the penalty that keeps a personal model near the global one
    prox: Annotated[float, Field(ge=0)] = 1.0

    by_examples = True

    @task(Sends.UPDATE)
    def local_round(self, client: Client, w: Tensors) -> Tensors:
        """w_i <- w_i - eta grad f_i(w_i), v_i <- v_i - eta (grad f_i(v_i) + lambda (v_i - w)),
        where w is the received one.
        """
        with client.borrowing(w):
            w_i, received = client.flat(), client.read(GENERALIST)
        for _ in range(self.steps(client)):
            batch, eta = client.draw(client.train), client.lr
            # grad f_i(w_i) on the batch that v_i steps on; w_i is no part of the client's model
            gradient = client.gradient_to_share(w_i, batch)
            client.step_on(batch, GENERALIST, extra=lambda: pull(self.prox, client, received))
            client.training.experts.step(w_i, gradient, eta, client.state, "ditto/optimiser")
        return {GENERALIST: w_i} | self.sample_count(client)
