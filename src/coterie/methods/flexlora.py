"""FlexLoRA: full products of LoRAs of different ranks are averaged, then redistributed by an SVD.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024, Section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie.aggregation import lowrank
from coterie.aggregation.means import MOST_SAMPLES
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Named, Tensors
from coterie.methods.templates import Ranked

TOKENS = "tokens"  # how much a client counts, in its reply


@dataclass(frozen=True)
class FlexLoRA(Ranked):
    """The server averages gamma_i B_i A_i weighted by the clients' data; client i gets the r_i
    largest singular directions.

    The server's state holds the factors of the largest rank, singular directions in order (their
    form: `aggregation.lowrank`), and `ranks/<client>`, (modules,). A client's basis changes each
    round, so that its optimiser starts anew.
    """

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        return state | redistribute(replies, state)

    def reply_spec(self, sent: Named) -> Named:
        """Return the specification of a client's factors and number of tokens."""
        return {**sent, TOKENS: torch.tensor(MOST_SAMPLES)}

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(lowrank.own_factors(client.loras, theta))
        client.reset_optimizer(GENERALIST)
        self.local_iterations(client)
        return lowrank.read_factors(client.loras) | {TOKENS: torch.tensor(len(client.train))}


def redistribute(replies: Replies, state: Named) -> Tensors:
    """Return the SVD of sum_i n_i gamma_i B_i A_i / sum_i n_i, module by module, with n_i tokens of
    client i, or equal n_i if all are zero.
    """
    redistributed: Tensors = {}
    order = sorted(replies)
    tokens = [float(replies[i][TOKENS]) for i in order]
    total = sum(tokens)
    shares = [n / total if total > 0 else 1 / len(order) for n in tokens]
    for module in lowrank.modules(replies[order[0]]) if order else ():
        terms = [
            (share, lowrank.factors(module, replies[i]))
            for share, i in zip(shares, order, strict=True)
        ]
        A, B = lowrank.svd_of_sum(terms, state[f"{module}/A"].shape[1])
        redistributed |= {f"{module}/A": A, f"{module}/B": B}
    return redistributed
