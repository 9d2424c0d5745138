"""Statistics with confidence intervals, which an audit reports, and membership inference: whether
an observer can tell what a client trained on from other texts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from coterie.core.protocol import ClientId
from coterie.core.result.audit import Estimate, MembershipResult, TruePositiveRate
from coterie.data.chats import ChatBatch
from coterie.data.splits import Numbers, Split

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


RATE = 0.01  # of false alarms


@dataclass(frozen=True)
class MembershipScores:
    """Scores of one client's rows, the higher the likelier trained on."""

    members: Values  # (n,) of rows that it was trained on
    others: Values  # (m,) of its test split


def drawn(
    train: Split, cursor: int, without: Numbers, most: int, rng: np.random.Generator
) -> Numbers:
    """Return in rising order the numbers of at most `most` training rows among the first `cursor`
    that a client has drawn. Rows in `without` are left out: they hold canaries.
    """
    seen = np.setdiff1d(train.numbers(0, min(cursor, train.windows)), without)
    return np.sort(rng.permutation(seen)[:most])


def without_ends(rows: Tensor | ChatBatch, end: int) -> Tensor | ChatBatch:
    """Return rows without the end tokens of documents that are read one by one: these count in
    training alone, and would tell its rows from others.
    """
    if not isinstance(rows, ChatBatch):
        return rows
    counted = rows.counted & (rows.ids != end)
    return replace(rows, counted=counted).at(counted.any(dim=1))


def measured(clients: Mapping[ClientId, MembershipScores], seed: int) -> MembershipResult:
    """Return the AUC, and the share of members found at 1 % of false alarms by one threshold."""
    groups = list[Values]()
    for scores in clients.values():  # compared without knowing the members
        middle = float(np.median(np.concatenate([scores.members, scores.others])))
        groups += [scores.members - middle, scores.others - middle]

    def detected(groups: Sequence[Values]) -> float:
        return tpr_at(RATE, np.concatenate(groups[::2]), np.concatenate(groups[1::2]))

    return MembershipResult(
        auc=bootstrapped(groups, auc_of_pairs, seed, "rows"),
        tpr=TruePositiveRate(**vars(bootstrapped(groups, detected, seed, "rows")), fpr=RATE),
        clients={i: auc(scores.members, scores.others) for i, scores in clients.items()},
        members=sum(len(scores.members) for scores in clients.values()),
        others=sum(len(scores.others) for scores in clients.values()),
    )
