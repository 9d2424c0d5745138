"""The assignment of a server pool's members to clients, by the scores of a gate."""

import math

import numpy as np
import torch
from torch import Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """(N, M) -> (N, count): the indices of each row's largest scores, in rising order."""
    return scores.topk(count).indices.sort().values


def first_largest(scores: Tensor, count: int) -> list[int]:
    """Return the indices of the largest scores, (M,), in rising order; of equal ones the first."""
    falling = sorted(range(len(scores)), key=lambda m: -float(scores[m]))
    return sorted(falling[:count])


def assign_experts(scores: Tensor, count: int, load: float | None) -> Tensor:
    """As `largest`, of (N, M) scores of N clients, with the largest total score such that no member
    has more clients than `load` times its fair share N K / M; None: unlimited.

    At the beginning scores are similar, and everybody would get the same few members for good.
    Where members are scarce, small differences between clients decide, and similar clients get the
    same ones, as tokens do in BASE layers (Lewis et al. 2021).
    """
    if load is None:
        return largest(scores, count)
    from scipy.optimize import linprog

    n, m = scores.shape
    # which of the N M variables count for whom
    members, clients = np.tile(np.eye(m), n), np.repeat(np.eye(n), m, axis=1)
    limit = math.ceil(load * n * count / m)
    solution = linprog(
        -scores.flatten().numpy(),
        members,
        [limit] * m,
        clients,
        [count] * n,
        bounds=(0, 1),
        method="highs-ds",
    )
    # corners of this programme are whole: 0 or 1 each
    return largest(torch.from_numpy(solution.x).view(n, m), count)
