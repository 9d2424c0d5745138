"""Collaboration weights from gradients, and the pull towards other models (CoBo).

Weights are an (n, n) float64 matrix W over clients in the order of their ids; w_ij is how much i
takes from j.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from coterie.core.protocol import ClientId, Replies
from coterie.core.tensors import Tensors

Pair = tuple[ClientId, ClientId]
# columns at a time: they stay in the cache, and a product of many large models needs nothing beside
# its result
CHUNK = 1 << 13


def project_simplex(rows: Tensor) -> Tensor:
    """Project each row, (..., n), onto the probability simplex (Held, Wolfe and Crowder 1974)."""
    descending = rows.sort(dim=-1, descending=True).values
    excess = descending.cumsum(dim=-1) - 1
    counts = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype)
    positive = (descending * counts > excess).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, positive - 1) / positive
    return (rows - threshold).clamp(min=0)


def ascend_box(weights: Tensor, scores: Tensor, gamma: float) -> Tensor:
    """W <- clip(W + gamma scores, 0, 1) with a zero diagonal (CoBo, eq. 4); keeps symmetry."""
    return (weights + gamma * scores).clamp(0, 1).fill_diagonal_(0)


def ascend_simplex(weights: Tensor, scores: Tensor, gamma: float) -> Tensor:
    """w_i. <- Proj_simplex(w_i. + gamma scores_i.) (CoBo, Remark 1). The diagonal is the weight of
    i itself. A row without scores is kept to the bit, without the rounding of the projection.
    """
    moved = project_simplex(weights + gamma * scores)
    return torch.where(scores.any(dim=1, keepdim=True), moved, weights)


def midpoints(models: Mapping[ClientId, Tensor], pairs: Iterable[Pair]) -> dict[ClientId, Tensors]:
    """Return for each client z_ij = (x_i + x_j) / 2 of all its pairs, under the name of j."""
    points: dict[ClientId, Tensors] = {}
    for i, j in pairs:
        z = torch.lerp(models[i], models[j], 0.5)
        points.setdefault(i, {})[j] = z
        points.setdefault(j, {})[i] = z
    return dict(sorted(points.items()))


def agreement(order: Sequence[ClientId], gradients: Replies) -> Tensor:
    """(n, n) symmetric scores <g_i, g_j> of the pairs that both sent a gradient at the midpoint; 0
    for others, and for products that are not finite: a client that diverged changes no weights of
    others.

    Args:
        order: The clients, as rows.
        gradients: The replies to `midpoints`: each client's gradients by the other's id.
    """
    scores = torch.zeros(len(order), len(order), dtype=torch.float64)
    for (a, i), (b, j) in combinations(enumerate(order), 2):
        if j in gradients.get(i, ()) and i in gradients.get(j, ()):
            product = float(torch.dot(gradients[i][j], gradients[j][i]))
            scores[a, b] = scores[b, a] = product if math.isfinite(product) else 0.0
    return scores


def weighted_differences(
    models: Sequence[Tensor], weights: Tensor, rows: Sequence[int] | None = None
) -> Tensor:
    """(m, d): row i is sum_k w_ik (x_i - x_k) of models, n of (d,), and weights, (n, n), for m of
    the rows or all, as L (X - mean X) with the Laplacian L = diag(W 1) - W. Rows of L sum to 0, so
    that centring changes nothing; without it L X loses digits in fp32 where models nearly agree.
    """
    laplacian = (weights.sum(dim=1).diag() - weights).to(models[0])
    if rows is not None and len(rows) < len(models):
        laplacian = laplacian[torch.tensor(rows, dtype=torch.int64)]
    if len(models[0]) <= CHUNK:
        return laplacian @ _centred(models)
    differences = models[0].new_empty(len(laplacian), len(models[0]))
    parts = zip(*(torch.split(x, CHUNK) for x in models), strict=True)
    for out, part in zip(torch.split(differences, CHUNK, dim=1), parts, strict=True):
        torch.mm(laplacian, _centred(part), out=out)
    return differences


def weighted_differences_on(
    models: Mapping[ClientId, Tensor], weights: Tensor, clients: Sequence[ClientId]
) -> dict[ClientId, Tensor]:
    """Return sum_k w_ik (x_i - x_k), (d,), of these clients; `models` are all models, in order."""
    order = list(models)
    differences = weighted_differences(
        list(models.values()), weights, [order.index(i) for i in clients]
    )
    return dict(zip(clients, differences, strict=True))


def _centred(rows: Sequence[Tensor]) -> Tensor:
    stack = torch.stack(list(rows))
    return stack.sub_(stack.mean(dim=0))


def mixtures(models: Sequence[Tensor], weights: Tensor) -> Tensor:
    """(n, d): row i is sum_j w_ij x_j; models (d,) and weights (n, n) with rows that sum to 1."""
    return torch.stack(list(models)) - weighted_differences(models, weights)


def rearranged(
    weights: Tensor, places: Sequence[int | None], start: Tensor, row_stochastic: bool
) -> Tensor:
    """W, (m, m), after clients joined and left, (n, n): new ones, with None among `places`, have
    their `start` weights, others keep their row's. Rows that have to sum to 1 still do.
    """
    before = torch.tensor([-1 if place is None else place for place in places])
    kept = (before[:, None] >= 0) & (before >= 0)
    carried = weights[before.clamp(min=0)][:, before.clamp(min=0)]
    if not row_stochastic:
        return torch.where(kept, carried, start)
    new = torch.where(kept, 0.0, start)
    held = torch.where(kept, carried, 0.0)
    total = held.sum(dim=1, keepdim=True)
    return torch.where(
        total > 0, held / total.clamp(min=1e-12) * (1 - new.sum(dim=1, keepdim=True)) + new, start
    )


def start_weights(n: int, row_stochastic: bool) -> Tensor:
    """(n, n): 1 between all clients, 0 on the diagonal."""
    ones = torch.ones(n, n, dtype=torch.float64).fill_diagonal_(0)
    return ones / max(n - 1, 1) if row_stochastic else ones


def weights_error(
    weights: Sequence[Sequence[float]], clusters: Sequence[int], row_stochastic: bool
) -> float:
    """Return the share of off-diagonal weights, (n, n), on the wrong side of a threshold: cluster
    mates' alone should be above it: 0.5, or of rows that sum to 1 half their largest.
    """
    wrong = []
    for i, row in enumerate(weights):
        others = {j: w for j, w in enumerate(row) if j != i}
        limit = max(others.values(), default=0.0) / 2 if row_stochastic else 0.5
        wrong += [(w > limit) != (clusters[i] == clusters[j]) for j, w in others.items()]
    return sum(wrong) / max(len(wrong), 1)
