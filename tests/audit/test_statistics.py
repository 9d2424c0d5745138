"""Intervals and areas against cases with known answers."""

import math

import numpy as np
import pytest

from coterie.audit.statistics import auc, bootstrapped, proportion, tpr_at


def test_the_area_of_separated_equal_and_reversed_scores() -> None:
    low, high = np.arange(10.0), np.arange(10.0) + 20
    assert auc(high, low) == 1
    assert auc(low, high) == 0
    assert auc(np.zeros(7), np.zeros(5)) == 0.5
    assert (
        auc(np.array([1.0, 3.0]), np.array([2.0, 1.0])) == (0.5 + 2 + 0) / 4
    )  # by hand: a tie, a loss, two wins


def test_of_two_normal_distributions_it_is_what_theory_says() -> None:
    rng = np.random.default_rng(0)
    found = auc(rng.normal(1, 1, 20_000), rng.normal(0, 1, 20_000))
    assert found == pytest.approx(0.5 * (1 + math.erf(1 / 2)), abs=0.01)  # Phi(1 / sqrt 2)


def test_members_found_at_a_rate_of_false_alarms() -> None:
    others = np.arange(100.0)
    assert tpr_at(0.01, np.array([98.0, 98.5, 99.5]), others) == pytest.approx(
        2 / 3
    )  # one of a hundred may be above
    assert tpr_at(0.01, np.array([98.0, 98.5, 99.5]), others[:50]) == 1
    assert tpr_at(0.01, np.array([48.5, 49.5]), others[:50]) == 0.5  # of fifty none may be
    assert tpr_at(0.01, np.zeros(5), np.zeros(5)) == 0


def test_the_exact_interval_is_clopper_and_pearsons() -> None:
    none, all_, half = proportion(0, 20), proportion(20, 20), proportion(5, 10)
    assert (none.low, none.high) == (0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert (all_.low, all_.high) == (pytest.approx(0.025 ** (1 / 20)), 1)
    assert (half.low, half.high) == (
        pytest.approx(0.1871, abs=1e-4),
        pytest.approx(0.8129, abs=1e-4),
    )
    with pytest.raises(ValueError, match=r"\(3\) must not be greater than n \(2\)"):
        proportion(3, 2)


def test_the_bootstrap_covers_a_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.normal(3, 2, 60) for _ in range(60)]
    found = [
        bootstrapped([sample], lambda groups: float(groups[0].mean()), seed, "draws")
        for seed, sample in enumerate(samples)
    ]
    assert sum(e.low <= 3 <= e.high for e in found) >= 50
    assert all(e.low < e.value < e.high for e in found)
