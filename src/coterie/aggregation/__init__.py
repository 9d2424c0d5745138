"""One set of tensors from many: means, robust rules, collaboration weights, privacy, secure
aggregation, simulated attacks.

What methods of one's own need is imported from here; all else from the files.
"""

from coterie.aggregation.collaboration import agreement, midpoints, mixtures
from coterie.aggregation.means import by_holders, uniform_mean, weighted_mean

__all__ = ["agreement", "by_holders", "midpoints", "mixtures", "uniform_mean", "weighted_mean"]
