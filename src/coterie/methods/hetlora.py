"""HetLoRA: LoRAs of different ranks, padded, weighted by their norms, truncated, and pruned by
their owners.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP
2024, Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from coterie.aggregation.lowrank import (
    factors,
    modules,
    own_factors,
    product_norm,
    ranks,
    read_factors,
    resized,
    truncated,
)
from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Named, Tensors, prefixed, under, weighted_sum
from coterie.methods.base import Reader
from coterie.methods.templates import Ranked
from coterie.models.lora import LoRA

Kept = Mapping[str, int]  # the ranks that a client has left, by module


@dataclass(frozen=True)
class HetLoRA(Ranked):
    """Rank self-pruning on the client, norm-weighted aggregation of zero-padded factors, truncation
    for each client.

    The server's state holds the factors of the largest rank (their form: `aggregation.lowrank`),
    and `ranks/<client>`, (modules,), the ranks that each client has left.

    Args:
        prune: gamma, the share of its ranks that a client keeps when it prunes; those beyond are
            its tail.
        regularisation: lambda of the penalty ||B_tail|| ||A_tail||, summed over modules.
    """

    prune: Annotated[
        float,
        Field(
            gt=0, le=1, description="gamma, the share of ranks kept by a pruning; 1: never prune"
        ),
    ] = 0.99
    regularisation: Annotated[
        float, Field(ge=0, description="lambda, weight of the penalty on the tail ranks")
    ] = 5e-3

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return read_factors(model.loras()) | prefixed(
            "ranks", {i: torch.tensor(model.ranks[i]) for i in clients}
        )

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Truncate: each client gets the first of the server's ranks, as many as it has left."""
        left = under("ranks", state)
        theta = {name: tensor for name, tensor in state.items() if not name.startswith("ranks/")}
        return {i: truncated(theta, left[i].tolist()) for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), smaller=True)
        replies = {i: reply for i, reply in replies.items() if whole(reply, state)}
        left = {i: torch.tensor(ranks(reply)) for i, reply in replies.items()}
        return state | norm_weighted_mean(replies, state) | prefixed("ranks", left)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        loras, kept = client.loras, dict(zip(modules(theta), ranks(theta), strict=True))
        fewer = {module: max(int(self.prune * rank), 1) for module, rank in kept.items()}
        client.load(own_factors(loras, theta))
        before = tail_norm(loras, fewer)
        for _ in range(self.steps(client)):
            client.step(
                GENERALIST, on=client.train, extra=lambda: self.penalty_gradient(loras, fewer)
            )
            cut(
                loras, kept
            )  # pruned ranks stay zero, whatever the old moments of the optimiser say
        if tail_norm(loras, fewer) < before:
            kept = fewer
            cut(loras, kept)
        return truncated(read_factors(loras), kept.values())

    def penalty_gradient(self, loras: Mapping[str, LoRA], fewer: Kept) -> Tensors:
        """Return the gradient of lambda sum ||B_tail||_F ||A_tail||_F."""
        found: Tensors = {}
        for module, lora in loras.items():
            A, B = (torch.zeros_like(matrix.data) for matrix in (lora.A, lora.B))
            A_tail, B_tail = lora.A.data[:, fewer[module] :], lora.B.data[..., fewer[module] :]
            a, b = A_tail.norm(), B_tail.norm()
            A[:, fewer[module] :] = A_tail * (self.regularisation * b / a.clamp(min=1e-12))
            B[..., fewer[module] :] = B_tail * (self.regularisation * a / b.clamp(min=1e-12))
            found |= {f"{module}.A": A, f"{module}.B": B}
        return found


def whole(reply: Named, state: Named) -> bool:
    """Whether both factors of each pair have one rank, and the server's sizes but for it: a
    truncated reply may have any smaller ones.
    """
    pairs = [(*factors(module, reply), *factors(module, state)) for module in modules(reply)]
    return all(
        A.shape[1] == B.shape[2] and A.shape[::2] == S.shape[::2] and B.shape[:2] == T.shape[:2]
        for A, B, S, T in pairs
    )


def norm_weighted_mean(replies: Replies, state: Named) -> Tensors:
    """Return, module by module, sum_i p_i theta_i of the factors padded to the server's rank, p_i =
    ||B_i A_i||_F / sum_j ||B_j A_j||_F.

    Updates that are all zero count alike.
    """
    found: Tensors = {}
    order = sorted(replies)
    for module in modules(replies[order[0]]) if order else ():
        rank = state[f"{module}/A"].shape[1]
        norms = [product_norm(*factors(module, replies[i])) for i in order]
        total = sum(norms)
        shares = [norm / total if total > 0 else 1 / len(order) for norm in norms]
        padded = [
            {"A": resized(A, rank, 1), "B": resized(B, rank, 2)}
            for A, B in (factors(module, replies[i]) for i in order)
        ]
        mean = weighted_sum(zip(shares, padded, strict=True))
        found |= {f"{module}/A": mean["A"], f"{module}/B": mean["B"]}
    return found


def tail_norm(loras: Mapping[str, LoRA], fewer: Kept) -> float:
    """Sum over modules of ||B_tail||_F ||A_tail||_F, what the penalty weighs."""
    return sum(
        float(lora.A.data[:, fewer[m] :].norm() * lora.B.data[..., fewer[m] :].norm())
        for m, lora in loras.items()
    )


def cut(loras: Mapping[str, LoRA], kept: Kept) -> None:
    """Make all ranks beyond `kept` zero, in place."""
    for module, lora in loras.items():
        lora.A.data[:, kept[module] :] = 0
        lora.B.data[..., kept[module] :] = 0
