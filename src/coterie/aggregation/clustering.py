"""Clusters of clients, and the members of a server's pool that each gets, by the scores of a gate.

Threshold-Clustering finds the centre of vectors of which some are far off (FC: Werner et al.,
"Provably Personalized and Robust Federated Learning", TMLR 2023). Agglomerative clustering joins
the nearest clusters (FedLEASE: Wang et al., "Adaptive LoRA Experts Allocation and Selection for
Federated Fine-Tuning", NeurIPS 2025). Experts choose clients by embeddings of both (FedAMoLE: Zhang
et al., "Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
Architectures").
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from coterie.core import devices
from coterie.core.protocol import ClientId

_CHUNK = 1 << 16  # columns at a time


def threshold_centre(
    points: Mapping[ClientId, Tensor], start: ClientId, size: int, rounds: int
) -> tuple[Tensor, dict[ClientId, float]]:
    """Return the centre v, (d,), and the clients' weights in it; see `threshold_clustering`."""
    order, vectors = list(points), list(points.values())
    weights = threshold_clustering(vectors, order.index(start), size, rounds).tolist()
    v = torch.zeros_like(vectors[0])
    for weight, vector in zip(weights, vectors, strict=True):
        if weight:
            v.add_(vector, alpha=weight)
    return v, dict(zip(order, weights, strict=True))


def threshold_clustering(points: Sequence[Tensor], start: int, size: int, rounds: int) -> Tensor:
    """Return a centre v of Threshold-Clustering, as the weights of the points, (n,) float64, sum 1.

    It uses only inner products of points relative to the first centre, so that a round takes hardly
    any time beside computing the n^2 products.

    Args:
        points: n vectors, (d,).
        start: The index of the point that is the first centre.
        size: How many points are within the radius: the nearest to the centre; at most all.
        rounds: How often to set v <- 1/n sum_j (z_j if within the radius of v, otherwise v).
    """
    products = torch.zeros(len(points), len(points), dtype=torch.float64)
    for parts in zip(*(torch.split(z, _CHUNK) for z in points), strict=True):
        relative = devices.exact(torch.stack(list(parts)) - parts[start])
        products += (relative @ relative.T).cpu()
    weights = torch.zeros(len(points), dtype=torch.float64)
    weights[start] = 1.0
    for _ in range(rounds):
        squared = products.diagonal() - 2 * products @ weights + weights @ products @ weights
        inside = squared.argsort(stable=True)[:size]
        weights *= 1 - len(inside) / len(points)
        weights[inside] += 1 / len(points)
    return weights


def layer_distances(clients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return 1 - cosine of each two clients' matrices, the mean over layers, (n, n) float64. A
    matrix of zeros has the cosine 0 with all.
    """
    layers = [
        torch.stack([m.flatten().cpu().double() for m in layer])
        for layer in zip(*clients, strict=True)
    ]
    units = [torch.nn.functional.normalize(layer, dim=1) for layer in layers]
    return 1 - torch.stack([u @ u.T for u in units]).mean(dim=0)


def cluster(distances: Tensor, most: int) -> Tensor:
    """Return each client's cluster, (n,) int64 in the order of first appearance: average linkage,
    and the number of clusters, from 2 to `most`, of the largest silhouette.

    Args:
        distances: (n, n) float64, symmetric.
        most: The largest number of clusters.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage

    n = len(distances)
    if n < 3:  # a silhouette needs fewer clusters than clients
        return torch.arange(n)
    rows, columns = torch.triu_indices(n, n, 1)
    tree = linkage(distances[rows, columns].numpy(), "average")
    cuts = [
        torch.from_numpy(cut_tree(tree, k)[:, 0]).long() for k in range(2, min(most, n - 1) + 1)
    ]
    best = max(cuts, key=lambda labels: float(silhouette(distances, labels)))
    numbers = {int(label): k for k, label in enumerate(dict.fromkeys(best.tolist()))}
    return torch.tensor([numbers[label] for label in best.tolist()])


def silhouette(distances: Tensor, labels: Tensor) -> Tensor:
    """Return the mean silhouette (Rousseeuw 1987) of labels (n,), 0, 1, ...; 0 of one alone."""
    member = torch.nn.functional.one_hot(labels).double()
    sums, sizes = distances.clone().fill_diagonal_(0) @ member, member.sum(dim=0)
    inside = (sums * member).sum(dim=1) / (sizes[labels] - 1).clamp(min=1)
    nearest = (sums / sizes).masked_fill(member.bool(), torch.inf).min(dim=1).values
    widths = (nearest - inside) / torch.maximum(nearest, inside)
    return torch.where(sizes[labels] > 1, widths.nan_to_num(), 0).mean()


def together(labels: Tensor) -> Tensor:
    """Return equal weights within clusters, (n, n) float64 rows that sum to 1; zeros for a client
    whose label, (n,), is negative: it has no cluster.
    """
    same = (labels[:, None] == labels) & (labels >= 0)
    return same / same.sum(dim=1, keepdim=True).clamp(min=1).double()


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
    n, m = scores.shape
    return largest(best_choices(scores, count, math.ceil(load * n * count / m)), count)


def best_choices(scores: Tensor, count: int, most: int, least: int = 0) -> Tensor:
    """Return the entries of (n, m) scores with the largest sum, (n, m) float64 of 0 and 1: `count`
    of each row, or as many as there is room for, and between `least` and `most` of each column.
    """
    from scipy.optimize import linprog

    n, m = scores.shape
    # which of the n m variables count for which column and row
    columns, rows = np.tile(np.eye(m), n), np.repeat(np.eye(n), m, axis=1)
    exact = (rows, [count] * n) if n * count <= m * most else ()
    matrices, limits = [columns], [most] * m
    if least:
        matrices, limits = [*matrices, -columns], [*limits, *[-least] * m]
    if not exact:
        matrices, limits = [*matrices, rows], [*limits, *[count] * n]
    costs, upper = -scores.flatten().numpy(), np.concatenate(matrices)
    solution = linprog(costs, upper, limits, *exact, bounds=(0, 1), method="highs-ds")
    # corners of this programme are whole: 0 or 1 each
    return torch.from_numpy(solution.x).view(n, m).round()


def affinities(held: Sequence[Tensor], embeddings: Sequence[Tensor]) -> Tensor:
    """Return <e_m, t_i> / sqrt(r), (B, M, N) float64, of expert m and client i in each of B blocks,
    where e_m is the mean embedding of the expert over the clients that hold it; always finite.

    Args:
        held: Whether each of N clients holds an expert, (M, B) bool each.
        embeddings: Clients' means, (B, 1 + S, r) float64 each: first t_i, of their tokens, then of
            the experts that they hold.
    """
    total = torch.zeros(*held[0].T.shape, embeddings[0].shape[-1], dtype=torch.float64)
    for mask, means in zip(held, embeddings, strict=True):
        present = torch.arange(means.shape[1] - 1) < mask.sum(dim=0)[:, None]
        total[mask.T] += means[:, 1:][present]
    holders = torch.stack([*held]).sum(dim=0).T.clamp(min=1)
    tokens = torch.stack([means[:, 0] for means in embeddings], dim=-1)  # (B, r, N)
    return (total / holders[..., None] @ tokens / math.sqrt(tokens.shape[1])).nan_to_num()
