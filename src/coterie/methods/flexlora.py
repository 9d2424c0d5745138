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
        return state | (self.merge(replies, state) if replies else {})

    def merge(self, replies: Replies, state: State) -> Tensors:
        """Return what the server's factors become."""
        return redistribute(replies, state)

    def begin(self, client: Client) -> None:
        """Prepare a client that has loaded what it received."""
        client.reset_optimizer(GENERALIST)

    def reply_spec(self, sent: Named) -> Named:
        """Return the specification of a client's factors and number of tokens."""
        frozen = lowrank.frozen_sums(sent)
        factors = {name: tensor for name, tensor in sent.items() if name not in frozen}
        return factors | {lowrank.TOKENS: torch.tensor(MOST_SAMPLES)}

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(self.loadable(client, theta))
        self.begin(client)
        self.local_iterations(client)
        trained = lowrank.truncated(lowrank.read_factors(client.loras), lowrank.ranks(theta))
        return trained | {lowrank.TOKENS: torch.tensor(len(client.train))}


def redistribute(replies: Replies, state: Named) -> Tensors:
    """Return the SVD of sum_i n_i gamma_i B_i A_i / sum_i n_i, module by module, with n_i tokens of
    client i, see `lowrank.shares_of`.
    """
    redistributed: Tensors = {}
    shares = lowrank.shares_of(replies)
    for module in lowrank.modules(replies[next(iter(shares))]):
        terms = [(share, lowrank.factors(module, replies[i])) for i, share in shares.items()]
        A, B = lowrank.svd_of_sum(terms, state[f"{module}/A"].shape[1])
        redistributed |= {f"{module}/A": A, f"{module}/B": B}
    return redistributed
