"""Low-rank updates whose clients prune their ranks: norms and gradients of what is pruned, and the
mean weighted by norms (HetLoRA).

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP
2024. The tail of an update is its ranks beyond those that its client would keep.
"""

from collections.abc import Mapping

import torch

from coterie.aggregation.lowrank import factors, modules, product_norm, resized
from coterie.core.protocol import Replies
from coterie.core.tensors import Named, Tensors, weighted_sum
from coterie.models.lora import LoRA

Ranks = Mapping[str, int]  # of each module


def same_sizes(reply: Named, state: Named) -> bool:
    """Return whether both factors of each pair have one rank, and the server's sizes but for it: a
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
    averaged: Tensors = {}
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
        averaged |= {f"{module}/A": mean["A"], f"{module}/B": mean["B"]}
    return averaged


def tail_norm(loras: Mapping[str, LoRA], fewer: Ranks) -> float:
    """Return the sum over modules of ||B_tail||_F ||A_tail||_F, what the penalty weighs."""
    return sum(
        float(lora.A.data[:, fewer[m] :].norm() * lora.B.data[..., fewer[m] :].norm())
        for m, lora in loras.items()
    )


def tail_gradient(loras: Mapping[str, LoRA], fewer: Ranks, weight: float) -> Tensors:
    """Return the gradient of `weight` times `tail_norm`, by the parameters' names."""
    gradient: Tensors = {}
    for module, lora in loras.items():
        A, B = (torch.zeros_like(matrix.data) for matrix in (lora.A, lora.B))
        A_tail, B_tail = lora.A.data[:, fewer[module] :], lora.B.data[..., fewer[module] :]
        a, b = A_tail.norm(), B_tail.norm()
        A[:, fewer[module] :] = A_tail * (weight * b / a.clamp(min=1e-12))
        B[..., fewer[module] :] = B_tail * (weight * a / b.clamp(min=1e-12))
        gradient |= {f"{module}.A": A, f"{module}.B": B}
    return gradient


def zero_beyond(loras: Mapping[str, LoRA], kept: Ranks) -> None:
    """Make all ranks beyond `kept` zero, in place."""
    for module, lora in loras.items():
        lora.A.data[:, kept[module] :] = 0
        lora.B.data[..., kept[module] :] = 0
