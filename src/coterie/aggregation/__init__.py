"""What a method composes to make one set of tensors of many."""

from coterie.aggregation.means import uniform_mean, weighted_mean

__all__ = ["uniform_mean", "weighted_mean"]
