"""Statistics with confidence intervals, which an audit reports."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coterie.core.result.audit import Estimate

Values = npt.NDArray[np.float64]

LEVEL = 0.95  # of all intervals
RESAMPLES = 1000


def bootstrapped(
    groups: Sequence[Values], statistic: Callable[[Sequence[Values]], float], seed: int, what: str
) -> Estimate:
    """Estimate a statistic of samples by the percentile bootstrap (Efron, 1979). The rows of each
    group, (n, ...), are drawn separately, so that their numbers stay. `what` names the rows, for
    people.
    """
    rng = np.random.default_rng(seed)
    resampled = [
        statistic([group[rng.integers(0, len(group), len(group))] for group in groups])
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    interval = f"{LEVEL:.0%}, bootstrap over {what}"
    return Estimate(value=statistic(groups), low=float(low), high=float(high), interval=interval)


def proportion(successes: int, trials: int) -> Estimate:
    """Estimate a probability, by Clopper and Pearson (1934). Raises ValueError without trials."""
    from scipy.stats import binomtest

    ends = binomtest(successes, trials).proportion_ci(LEVEL, "exact")
    value, interval = successes / trials, f"{LEVEL:.0%}, exact binomial over {trials:,}"
    return Estimate(value=value, low=float(ends.low), high=float(ends.high), interval=interval)


def auc(members: Values, others: Values) -> float:
    """Return the area under the ROC curve: how likely a member scores higher (ties count half)."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    n, m = len(members), len(others)
    return float((ranks.sum() - n * (n + 1) / 2) / (n * m))


def auc_of_pairs(groups: Sequence[Values]) -> float:
    """Return the AUC of groups of members and of others, one after the other, all together."""
    return auc(np.concatenate(groups[::2]), np.concatenate(groups[1::2]))


def tpr_at(rate: float, members: Values, others: Values) -> float:
    """Return the share of members above the lowest threshold that at most a share `rate` of the
    others is above; none of fewer than 1 / rate others.
    """
    threshold = np.sort(others)[len(others) - 1 - math.floor(rate * len(others) + 1e-9)]
    return float((members > threshold).mean())
