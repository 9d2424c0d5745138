"""HetLoRA: LoRAs of different ranks, padded, weighted by norm, truncated, and pruned by clients.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP
2024, Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from coterie.aggregation import lowrank
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors, prefixed
from coterie.methods.templates import Ranked, portion


@dataclass(frozen=True)
class HetLoRA(Ranked):
    """Rank self-pruning on the client, norm-weighted aggregation of zero-padded factors, truncation
    for each client.

    The server's state holds the factors of the largest rank (their form: `aggregation.lowrank`),
    and `ranks/<client>`, (modules,), the ranks that each client has left. The tail of a client is
    its ranks beyond those that it would keep if it pruned; the penalty on it is
    lambda ||B_tail|| ||A_tail||, summed over modules.
    """

    # gamma, the share of ranks kept by a pruning; 1: never prune
    prune: Annotated[float, Field(gt=0, le=1)] = 0.99
    # lambda, weight of the penalty on the tail ranks
    regularisation: Annotated[float, Field(ge=0)] = 5e-3

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), smaller=True)
        replies = {i: reply for i, reply in replies.items() if lowrank.same_sizes(reply, state)}
        left = {i: torch.tensor(lowrank.ranks(reply)) for i, reply in replies.items()}
        return state | lowrank.norm_weighted_mean(replies, state) | prefixed("ranks", left)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        loras = client.loras
        current = dict(zip(lowrank.modules(theta), lowrank.ranks(theta), strict=True))
        fewer = {module: max(int(portion(self.prune, rank)), 1) for module, rank in current.items()}
        client.load(lowrank.own_factors(loras, theta))
        before = lowrank.tail_norm(loras, fewer)
        for _ in range(self.steps(client)):
            client.step(
                GENERALIST,
                on=client.train,
                extra=lambda: lowrank.tail_gradient(loras, fewer, self.regularisation),
            )
            # Pruned ranks stay zero, whatever the old moments of the optimiser say.
            lowrank.zero_beyond(loras, current)
        # self-pruning: a tail that shrank in this round is given up
        if lowrank.tail_norm(loras, fewer) < before:
            current = fewer
            lowrank.zero_beyond(loras, current)
        return lowrank.truncated(lowrank.read_factors(loras), current.values())
