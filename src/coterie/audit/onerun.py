"""A lower bound on epsilon from one training run.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2:
whatever is (epsilon, delta)-private with respect to each of m independent fair coins can be used to
guess r of them right no better than W ~ Binomial(r, e^epsilon / (1 + e^epsilon)) does, up to delta:

    P[at least v right] <= P[W >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= W < v] / i
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from coterie.audit.statistics import LEVEL, Values

SHARES = (
    1.0,
    0.5,
    0.25,
)  # of the coins that are guessed, the surest first; the others are left open
LARGEST = 50.0  # largest epsilon that is tested


@dataclass(frozen=True)
class Bound:
    """The lower bound on epsilon that the guesses show.

    Args:
        epsilon: Smaller ones are refuted, at the confidence asked for; 0: none is.
        guesses: Coins guessed, of the share that refuted most.
        right: Of them.
        coins: m.
        most: The epsilon that as many coins could have shown, had all guesses been right.
    """

    epsilon: float
    guesses: int
    right: int
    coins: int
    most: float


def p_value(right: int, guesses: int, coins: int, epsilon: float, delta: float) -> float:
    """Return how likely so many right guesses are at most, if the guarantee holds.

    Args:
        right: v.
        guesses: r.
        coins: m, those left open too.
        epsilon: Of the guarantee.
        delta: Of the guarantee.

    Raises:
        ValueError: 0 <= v <= r <= m does not hold.
    """
    from scipy.stats import binom

    if not 0 <= right <= guesses <= coins:
        raise ValueError(f"{right} right of {guesses} guesses of {coins} coins")
    chance = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return min(beta, 1.0)
    below = np.cumsum(
        binom.pmf(np.arange(right - 1, -1, -1), guesses, chance)
    )  # P[v - i <= W < v] for i = 1 ... v
    return min(beta + 2 * coins * delta * float((below / np.arange(1, right + 1)).max()), 1.0)


@cache  # the same counts come again: whoever audits many releases asks for few bounds
def lower_bound(
    right: int, guesses: int, coins: int, delta: float, error: float = 1 - LEVEL
) -> float:
    """Return the largest epsilon that is refuted: its p-value is below `error`, as are those of
    all smaller ones; 0 if none is.
    """
    low, high = 0.0, LARGEST
    if p_value(right, guesses, coins, low, delta) >= error:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if p_value(right, guesses, coins, middle, delta) < error
            else (low, middle)
        )
    return low


def audited(
    scores: Values, planted: npt.NDArray[np.bool_], delta: float, shares: Sequence[float] = SHARES
) -> Bound:
    """Guess each coin by a score, and bound epsilon by how many guesses are right.

    Half of the guesses are that the highest scores were planted, half that the lowest were not.
    Several shares of the coins are tried, each at its part of the error, so that the best of them
    may be reported.

    Args:
        scores: (m,) the higher, the likelier planted. They must not depend on the coins but through
            what the observer saw.
        planted: (m,) the coins.
        delta: Of the guarantee that is tested.
        shares: Of the coins that are guessed.
    """
    coins, error = len(scores), (1 - LEVEL) / len(shares)
    order = np.argsort(-scores, kind="stable")
    tried = []
    for share in shares:
        half = min(max(int(share * coins / 2), 1), coins // 2)
        right = int(planted[order[:half]].sum() + (~planted[order[coins - half :]]).sum())
        bound = lower_bound(right, 2 * half, coins, delta, error)
        tried.append(
            Bound(
                bound, 2 * half, right, coins, lower_bound(2 * half, 2 * half, coins, delta, error)
            )
        )
    best = max(tried, key=lambda bound: (bound.epsilon, bound.right / max(bound.guesses, 1)))
    return Bound(best.epsilon, best.guesses, best.right, coins, max(bound.most for bound in tried))
