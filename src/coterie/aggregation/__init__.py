"""What a method composes to make one set of tensors of many."""

from coterie.aggregation.collaboration import (
    agreement,
    ascend_box,
    ascend_simplex,
    midpoints,
    mixtures,
    pulls,
    rearranged,
    start_weights,
    weights_error,
)
from coterie.aggregation.dealing import deal
from coterie.aggregation.means import SAMPLES, holders_mean, sample_mean, uniform_mean, weighted_mean

__all__ = [
    "SAMPLES",
    "agreement",
    "ascend_box",
    "ascend_simplex",
    "deal",
    "holders_mean",
    "midpoints",
    "mixtures",
    "pulls",
    "rearranged",
    "sample_mean",
    "start_weights",
    "uniform_mean",
    "weighted_mean",
    "weights_error",
]
