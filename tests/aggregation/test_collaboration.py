"""Projections, scores, weighted differences and mixtures against formulations with loops, and
what must hold for any weights.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.aggregation import collaboration
from coterie.aggregation.collaboration import (
    agreement,
    ascend_box,
    ascend_simplex,
    mixtures,
    project_simplex,
    rearranged,
    start_weights,
    weighted_differences,
    weights_error,
)

SEEDS = st.integers(0, 10_000)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEEDS, st.integers(1, 7))
def test_the_simplex_projection_is_the_nearest_point_of_the_simplex(seed: int, n: int) -> None:
    point = random(seed, n) * 2
    found = project_simplex(point)
    assert found.min() >= 0
    assert float(found.sum()) == pytest.approx(1)
    # Optimality (the variational inequality): no corner of the simplex lies on the point's side of
    # the projection.
    for corner in torch.eye(n, dtype=torch.float64):
        assert float((point - found) @ (corner - found)) <= 1e-9


def test_the_simplex_projection_of_known_points() -> None:
    points = torch.tensor(
        [[0.2, 0.3, 0.5], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, -9.0]], dtype=torch.float64
    )
    wanted = torch.tensor(
        [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(project_simplex(points), wanted)


@given(SEEDS, st.integers(2, 6), st.floats(0, 3))
def test_box_weights_stay_symmetric_within_their_bounds_and_never_count_oneself(
    seed: int, n: int, gamma: float
) -> None:
    scores = random(seed, n, n)
    found = ascend_box(start_weights(n, row_stochastic=False), scores + scores.T, gamma)
    assert torch.equal(found, found.T)
    assert found.min() >= 0
    assert found.max() <= 1
    assert not found.diagonal().any()


@given(SEEDS, st.integers(2, 6))
def test_weights_without_a_step_stay(seed: int, n: int) -> None:
    shares = project_simplex(random(seed, n, n))
    torch.testing.assert_close(ascend_simplex(shares, random(seed + 1, n, n), 0.0), shares)
    torch.testing.assert_close(
        ascend_simplex(shares, torch.zeros(n, n, dtype=torch.float64), 0.5), shares
    )


@given(SEEDS, st.integers(1, 9), st.integers(1, 20))
def test_a_pull_is_the_sum_over_all_others(seed: int, n: int, d: int) -> None:
    x, w = random(seed, n, d), random(seed + 1, n, n).abs()
    wanted = torch.stack(
        [
            sum((w[i, k] * (x[i] - x[k]) for k in range(n)), torch.zeros(d, dtype=torch.float64))
            for i in range(n)
        ]
    )
    torch.testing.assert_close(weighted_differences(list(x), w), wanted)


def test_pulls_are_exact_where_models_nearly_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 L X without centring has lost most of its digits here. Several chunks give the
    same.
    """
    monkeypatch.setattr(collaboration, "CHUNK", 100)
    n, d = 80, 250
    x = (100 + 1e-4 * random(0, n, d)).float()
    w = start_weights(n, row_stochastic=False)
    exact = n * x.double() - x.double().sum(dim=0)
    naive = (n * torch.eye(n) - torch.ones(n, n)) @ x
    error = [
        float((found.double() - exact).norm() / exact.norm())
        for found in (weighted_differences(list(x), w), naive)
    ]
    assert error[0] < 1e-5 < error[1]


@given(SEEDS, st.integers(1, 6))
def test_a_mixture_is_the_weighted_mean(seed: int, n: int) -> None:
    x, w = random(seed, n, 5), project_simplex(random(seed + 1, n, n))
    torch.testing.assert_close(mixtures(list(x), w), w @ x)


def test_scores_are_inner_products_and_what_is_not_finite_counts_as_nothing() -> None:
    a, b, broken = (
        torch.tensor([1.0, 2.0]),
        torch.tensor([3.0, -1.0]),
        torch.tensor([math.nan, 0.0]),
    )
    scores = agreement(
        ["x", "y", "z", "v"], {"x": {"y": a, "z": a}, "y": {"x": b}, "z": {"x": broken, "v": a}}
    )
    assert scores.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]


def test_who_joins_starts_as_all_did_and_who_stays_keeps_his_weights() -> None:
    box = torch.tensor([[0.0, 0.4], [0.4, 0.0]], dtype=torch.float64)
    assert rearranged(
        box, [1, None, 0], start_weights(3, False), row_stochastic=False
    ).tolist() == [
        [0, 1, 0.4],
        [1, 0, 1],
        [0.4, 1, 0],
    ]
    assert rearranged(box, [0], start_weights(1, False), row_stochastic=False).tolist() == [[0]]
    shares = torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    without_the_last = rearranged(shares, [0, 1], start_weights(2, True), row_stochastic=True)
    torch.testing.assert_close(
        without_the_last, torch.tensor([[0.2, 0.8], [1.0, 0.0]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        rearranged(shares, [0, 1, 2, None], start_weights(4, True), row_stochastic=True).sum(dim=1),
        torch.ones(4, dtype=torch.float64),
    )


def test_the_error_counts_weights_on_the_wrong_side() -> None:
    assert weights_error(
        [[0, 0.9, 0.6], [0.9, 0, 0.1], [0.6, 0.1, 0]], [0, 0, 1], row_stochastic=False
    ) == pytest.approx(2 / 6)
    assert (
        weights_error([[0, 0.3, 0.1], [0.3, 0, 0.1], [0.0, 0.0, 0]], [0, 0, 1], row_stochastic=True)
        == 0
    )
    assert weights_error([[0]], [0], row_stochastic=False) == 0
