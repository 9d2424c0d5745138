"""The bound on epsilon from one run: against the formula, and never above the truth more often
than it says.
"""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from coterie.audit.canaries import audited, lower_bound, p_value

RUNS, COINS = 300, 200


def test_without_delta_it_is_the_binomial_tail() -> None:
    assert p_value(70, 100, 100, 0.5, 0.0) == pytest.approx(
        binom.sf(69, 100, 1 / (1 + math.exp(-0.5)))
    )
    assert p_value(0, 10, 10, 0.0, 0.0) == 1


def test_delta_costs_what_the_theorem_says() -> None:
    """Theorem 5.2 by the letter, one i after the other."""
    v, r, m, epsilon, delta = 60, 80, 120, 0.7, 1e-3
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = sum(binom.pmf(k, r, chance) for k in range(v, r + 1))
    alpha = max(sum(binom.pmf(k, r, chance) for k in range(v - i, v)) / i for i in range(1, v + 1))
    assert p_value(v, r, m, epsilon, delta) == pytest.approx(tail + 2 * m * delta * alpha)


def test_all_right_refutes_what_a_coin_of_that_bias_would_seldom_do() -> None:
    chance = 0.05 ** (1 / 64)
    assert lower_bound(64, 64, 64, 0.0) == pytest.approx(math.log(chance / (1 - chance)), abs=1e-6)
    assert lower_bound(32, 64, 64, 0.0) == 0
    assert lower_bound(64, 64, 64, 0.3) == 0  # such a delta promises nothing


def test_more_coins_show_more() -> None:
    bounds = [lower_bound(n, n, n, 1e-5) for n in (8, 32, 128)]
    assert bounds == sorted(bounds)


def test_impossible_counts_are_refused() -> None:
    for counts in ((3, 2, 5), (1, 6, 5), (-1, 2, 5)):
        with pytest.raises(ValueError, match="right of"):
            p_value(*counts, epsilon=1.0, delta=0.0)


@pytest.mark.parametrize("epsilon", [0.5, 1.5, 3.0])
def test_of_randomised_response_it_is_rarely_above_the_truth(epsilon: float) -> None:
    rng, keep = np.random.default_rng(int(10 * epsilon)), 1 / (1 + math.exp(-epsilon))
    found = []
    for _ in range(RUNS):
        coins = rng.random(COINS) < 0.5
        seen = np.where(rng.random(COINS) < keep, coins, ~coins)
        found.append(audited(seen + 1e-6 * rng.random(COINS), coins, 0.0).at_least)
    assert sum(bound > epsilon for bound in found) <= binom.ppf(0.999, RUNS, 0.05)
    assert np.median(found) > 0.3 * epsilon  # it shows something


@pytest.mark.parametrize("sigma", [0.6, 1.0, 2.0])
def test_of_gaussian_noise_it_is_rarely_above_the_truth(sigma: float) -> None:
    """Each coin is released as 0 or 1 with noise: epsilon is that of the Gaussian mechanism
    (Balle and Wang, 2018).
    """
    delta, mu = 1e-3, 1 / sigma
    truth = brentq(
        lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta,
        0,
        50,
    )
    rng, found = np.random.default_rng(3), []
    for _ in range(RUNS):
        coins = rng.random(COINS) < 0.5
        found.append(audited(coins + sigma * rng.normal(size=COINS), coins, delta).at_least)
    assert sum(bound > truth for bound in found) <= binom.ppf(0.999, RUNS, 0.05)
    assert max(found) > 0


def test_scores_that_know_nothing_refute_nothing_at_least_as_often_as_promised() -> None:
    rng = np.random.default_rng(4)
    found = [audited(rng.normal(size=64), rng.random(64) < 0.5, 1e-5).at_least for _ in range(RUNS)]
    assert sum(bound > 0 for bound in found) <= binom.ppf(0.999, RUNS, 0.05)


def test_the_surest_guesses_are_what_is_counted() -> None:
    """Only a quarter of the coins leave a trace: guessing these alone shows more than guessing
    all.
    """
    coins = np.arange(80) % 2 == 0
    scores = np.where(
        np.arange(80) < 20, np.where(coins, 5.0, -5.0), 0.01 * np.sin(np.arange(80.0))
    )
    found = audited(scores, coins, 0.0)
    assert (found.guesses, found.right, found.coins) == (20, 20, 80)
    assert 0 < found.at_least <= found.most
