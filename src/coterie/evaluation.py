"""Figures from sums: perplexity per client, means over clients, mean and deviation over seeds."""

import math
import statistics
from collections.abc import Iterable

from torch import Tensor


def perplexity(score: Tensor) -> float:
    """exp(mean token NLL) of a client's score, (2,): total NLL in nats and the number of tokens. Infinite beyond float range."""
    nll, tokens = score.tolist()
    mean = nll / tokens
    return math.exp(mean) if mean < 700 else math.inf


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def deviation(values: list[float]) -> float:
    """The sample standard deviation over seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
