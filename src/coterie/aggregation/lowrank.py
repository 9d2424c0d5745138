"""Low-rank updates of different ranks: their common form, padding, truncation and products; and the
server's outer step and the fusion of personal and global ones (FDLoRA).

In messages and in the server's state an update gamma B A is the pair `<module>/A` (count, r, in)
and `<module>/B` (count, out, r), with B multiplied by gamma, which depends on the rank and so
differs between clients (rank-stabilised LoRA). A frozen sum, (out, in), is `<module>/W`.

Where clients prune their ranks (Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of
On-Device Foundation Models", EMNLP 2024), the tail of an update is the ranks that its client would
prune.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.core import devices
from coterie.core.protocol import ClientId, Replies
from coterie.core.tensors import Named, Tensors, weighted_sum
from coterie.models.mixture import LoRA

TOKENS = "tokens"  # how much a client counts, in its reply
Ranks = Mapping[str, int]  # of each module
Factors = tuple[Tensor, Tensor]  # A (count, r, in) and gamma B (count, out, r)


def read_factors(loras: Mapping[str, LoRA]) -> Tensors:
    """Return copies of all updates in the common form."""
    pairs: Tensors = {}
    for module, lora in loras.items():
        pairs[f"{module}/A"] = lora.A.detach().clone()
        pairs[f"{module}/B"] = lora.B.detach() * lora.gamma
    return pairs


def own_factors(loras: Mapping[str, LoRA], tensors: Named) -> Tensors:
    """Return the parameters by name, the inverse of `read_factors`; missing ranks are zero."""
    parameters: Tensors = {}
    for module, lora in loras.items():
        A, B = factors(module, tensors)
        parameters[f"{module}.A"] = resized(A, lora.A.shape[1], 1)
        parameters[f"{module}.B"] = resized(B, lora.B.shape[2], 2) / lora.gamma
        if (W := tensors.get(f"{module}/W")) is not None:
            parameters[f"{module}.W"] = W
    return parameters


def frozen_sums(tensors: Named) -> Tensors:
    """Return the frozen sums of a message or state."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith("/W")}


def modules(tensors: Named) -> list[str]:
    """Return the modules of a message, sorted: messages may arrive in another order."""
    return sorted({name.rpartition("/")[0] for name in tensors if "/" in name})


def factors(module: str, tensors: Named) -> Factors:
    """Return the pair of one module."""
    return tensors[f"{module}/A"], tensors[f"{module}/B"]


def resized(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """Return the tensor with `rank` entries along `dim`: truncated, or padded with zeros."""
    missing = rank - tensor.shape[dim]
    if missing <= 0:
        return tensor.narrow(dim, 0, rank)
    return pad(tensor.transpose(dim, -1), (0, missing)).transpose(dim, -1).contiguous()


def ranks(tensors: Named) -> list[int]:
    """Return the rank of each module of a message."""
    return [factors(module, tensors)[0].shape[1] for module in modules(tensors)]


def truncated(tensors: Named, ranks: Iterable[int]) -> Tensors:
    """Return the first ranks of each pair, as many as `ranks` says, and all frozen sums."""
    pairs = frozen_sums(tensors)
    for module, rank in zip(modules(tensors), ranks, strict=True):
        A, B = factors(module, tensors)
        pairs |= {f"{module}/A": A[:, :rank].clone(), f"{module}/B": B[..., :rank].clone()}
    return pairs


def with_tails(tensors: Named, longer: Named) -> Tensors:
    """Return the pairs, each followed by the ranks that the pair in `longer` has beyond its own."""
    pairs: Tensors = {}
    for module in modules(tensors):
        (A, B), (C, D) = factors(module, tensors), factors(module, longer)
        rank = A.shape[1]
        pairs[f"{module}/A"] = torch.cat([A, C[:, rank:].to(A)], 1)
        pairs[f"{module}/B"] = torch.cat([B, D[..., rank:].to(B)], 2)
    return pairs


def product_norm(A: Tensor, B: Tensor) -> float:
    """||B A||_F over all updates of a stack, from the small Gram matrices: tr((B^T B)(A A^T))."""
    A, B = devices.exact(A), devices.exact(B)
    left, right = B.mT @ B, A @ A.mT
    return float((left * right.mT).sum().clamp(min=0).sqrt())


def svd_of_sum(terms: Iterable[tuple[float, Factors]], rank: int) -> Factors:
    """Return the best factors of a rank of sum_i w_i B_i A_i: B = U S and A = V^T, truncated.

    The factors of the sum are the stacked B_i and A_i, so that after a QR decomposition of each
    only a small matrix is decomposed. Computed in float64, returned in the dtype of the terms. Of
    the two signs that a pair of singular vectors may have, the largest entry of the left one is
    positive: libraries and devices choose differently.
    """
    exact = [(weight, devices.exact(A), devices.exact(B), A[:0]) for weight, (A, B) in terms]
    left = torch.cat([weight * B for weight, _, B, _ in exact], dim=2)
    right = torch.cat([A for _, A, _, _ in exact], dim=1)
    Q1, R1 = torch.linalg.qr(left)
    Q2, R2 = torch.linalg.qr(right.mT)
    U, S, Vh = torch.linalg.svd(R1 @ R2.mT, full_matrices=False)
    directions = Q1 @ U
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))  # (count, 1, k)
    signs = torch.where(largest < 0, -1.0, 1.0).to(largest)
    A, B = signs.mT * (Vh @ Q2.mT), directions * (signs * S[:, None, :])
    like = exact[0][3]
    return resized(A, rank, 1).to(like), resized(B, rank, 2).to(like)


def shares_of(replies: Replies) -> dict[ClientId, float]:
    """Return each client's share of all tokens, or equal ones if nobody has any."""
    tokens = {i: float(replies[i][TOKENS]) for i in sorted(replies)}
    total = sum(tokens.values())
    return {i: n / total if total > 0 else 1 / len(tokens) for i, n in tokens.items()}


def added(replies: Replies, state: Named, shares: Mapping[ClientId, float]) -> Tensors:
    """Return the frozen sums with sum_i share_i gamma_i B_i A_i."""
    sums = frozen_sums(state)
    for module in modules(sums):
        for i, share in shares.items():
            A, B = factors(module, replies[i])
            sums[f"{module}/W"] = sums[f"{module}/W"].to(B.device) + share * (B[0] @ A[0])
    return sums


def same_sizes(reply: Named, state: Named) -> bool:
    """Return whether both factors of each pair have one rank and otherwise the server's sizes."""
    pairs = [(*factors(module, reply), *factors(module, state)) for module in modules(reply)]
    return all(
        A.shape[1] == B.shape[2] and A.shape[::2] == S.shape[::2] and B.shape[:2] == T.shape[:2]
        for A, B, S, T in pairs
    )


def norm_weighted_mean(replies: Replies, state: Named) -> Tensors:
    """Return sum_i p_i theta_i by module, of the factors padded to the server's rank, with p_i =
    ||B_i A_i||_F / sum_j ||B_j A_j||_F, or equal p_i if all updates are zero.
    """
    averaged: Tensors = {}
    order = sorted(replies)
    for module in modules(replies[order[0]]) if order else ():
        rank = state[f"{module}/A"].shape[1]
        pairs = [factors(module, replies[i]) for i in order]
        norms = [product_norm(A, B) for A, B in pairs]
        total = sum(norms)
        shares = [norm / total if total > 0 else 1 / len(order) for norm in norms]
        padded = (
            {f"{module}/A": resized(A, rank, 1), f"{module}/B": resized(B, rank, 2)}
            for A, B in pairs
        )
        averaged |= weighted_sum(zip(shares, padded, strict=True))
    return averaged


def tail_norm(loras: Mapping[str, LoRA], fewer: Ranks) -> float:
    """Return the penalty's sum over modules of ||B_tail||_F ||A_tail||_F."""
    return sum(
        float(lora.A.data[:, fewer[m] :].norm() * lora.B.data[..., fewer[m] :].norm())
        for m, lora in loras.items()
    )


def tail_gradient(loras: Mapping[str, LoRA], fewer: Ranks, weight: float) -> Tensors:
    """Return the gradient of `weight` times `tail_norm`, by parameter name."""
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
    """Set all ranks beyond `kept` to zero, in place."""
    for module, lora in loras.items():
        lora.A.data[:, kept[module] :] = 0
        lora.B.data[..., kept[module] :] = 0


def nesterov(
    theta: Named, momentum: Named, gradient: Named, lr: float, decay: float
) -> tuple[Tensors, Tensors]:
    """Return parameters and momentum after a gradient step with Nesterov momentum."""
    momentum = weighted_sum([(decay, momentum), (1.0, gradient)])
    return weighted_sum([(1.0, theta), (-lr, gradient), (-lr * decay, momentum)]), momentum


def fused(weights: Sequence[float], theta_p: Named, theta_s: Named) -> Tensors:
    """Return w_1 theta_p + w_2 theta_s, A and B separately, so that the update is (w_1 B_p + w_2
    B_s)(w_1 A_p + w_2 A_s).
    """
    return weighted_sum([(float(weights[0]), theta_p), (float(weights[1]), theta_s)])


def fusion_weights(
    objective: Callable[[Sequence[float]], float], steps: int
) -> tuple[float, float]:
    """Return the (w_1, w_2) of least objective that Nelder and Mead's method evaluates, starting
    from the personal model, the global one, and their sum.
    """
    from scipy.optimize import minimize

    start = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    options = {"initial_simplex": start, "maxfev": steps, "xatol": 1e-2, "fatol": 1e-4}
    minimum = minimize(objective, start[0], method="Nelder-Mead", options=options)
    return float(minimum.x[0]), float(minimum.x[1])
