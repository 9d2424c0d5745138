"""One set of tensors from many: means, robust rules, collaboration weights, privacy, secure
aggregation, simulated attacks.
"""

from coterie.aggregation.assignment import assign_experts
from coterie.aggregation.collaboration import (
    agreement,
    ascend_box,
    ascend_simplex,
    midpoints,
    mixtures,
    rearranged,
    start_weights,
    weighted_differences,
    weighted_differences_on,
    weights_error,
)
from coterie.aggregation.means import (
    MOST_SAMPLES,
    SAMPLES,
    Combining,
    Mean,
    by_holders,
    uniform_mean,
    weighted_mean,
)
from coterie.aggregation.robust import (
    ClippedMean,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
)

__all__ = [
    "MOST_SAMPLES",
    "SAMPLES",
    "ClippedMean",
    "Combining",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "Rule",
    "TrimmedMean",
    "agreement",
    "ascend_box",
    "ascend_simplex",
    "assign_experts",
    "by_holders",
    "midpoints",
    "mixtures",
    "rearranged",
    "start_weights",
    "uniform_mean",
    "weighted_differences",
    "weighted_differences_on",
    "weighted_mean",
    "weights_error",
]
