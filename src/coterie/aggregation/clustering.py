"""Threshold-Clustering: the centre of vectors of which some are far off (FC).

Werner et al., "Provably Personalized and Robust Federated Learning", TMLR 2023.
"""

from collections.abc import Mapping, Sequence

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
