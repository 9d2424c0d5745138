"""Metrics that clients are scored by, and comparisons of scores."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.errors import TensorError
from coterie.core.result import Choices, MetricInfo


def perplexity(score: Tensor) -> float:
    """Return exp(mean NLL) of a score, (2,): total NLL in nats, tokens. It may be infinite."""
    nll, tokens = score.tolist()
    mean = nll / tokens
    return math.exp(mean) if mean < 700 else math.inf


def accuracy(score: Tensor) -> float:
    """Return the percentage correct of a score, (3,): total NLL, examples, correct ones."""
    _, examples, right = score.tolist()
    return float(100 * right / examples)


def loss(score: Tensor) -> float:
    """Return the mean negative log-likelihood in nats of a client's score, (2,) or (3,)."""
    nll, predictions = score.tolist()[:2]
    return float(nll / predictions)


@dataclass(frozen=True)
class Metric:
    """A metric of one kind of model, as tables show it."""

    name: str
    unit: str
    lower_is_better: bool
    of: Callable[[Tensor], float]  # computes it from a client's score
    totals: int  # numbers in a score

    @property
    def about(self) -> MetricInfo:
        """The metric as results state it."""
        return MetricInfo(f"test {self.name}", self.unit, self.lower_is_better)

    def scores(self, score: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `valid`, `test`, `valid_loss` and `test_loss` of the splits that were scored."""
        splits = {split: score[split] for split in ("valid", "test") if split in score}
        return {split: self.of(sums) for split, sums in splits.items()} | {
            f"{split}_loss": loss(sums) for split, sums in splits.items()
        }


MOST = 1 << 53  # what can be counted without loss


def check_scores(score: Mapping[str, Tensor]) -> None:
    """Raise TensorError for impossible scores, (2,) or (3,) by split and of all `parts`, `weights`
    or `choices`: no predictions, more correct than all, a negative loss, or a fractional number.
    """
    scores = {split: score[split] for split in ("valid", "test") if split in score}
    if "parts" in score:
        scores |= {f"parts {k}": part for k, part in enumerate(score["parts"].flatten(0, 1))}
    for what, sums in scores.items():
        nll, predictions, *right = sums.tolist()
        counted = all(float(value).is_integer() for value in (predictions, *right))
        fits = 1 <= predictions <= MOST and all(0 <= r <= predictions for r in right)
        if not (counted and fits and nll >= -1e-3 * predictions):
            raise TensorError(
                f"{what} {sums.tolist()} cannot be sums of losses, predictions and correct "
                f"predictions"
            )
    if "weights" in score and not bool(((score["weights"] >= 0) & (score["weights"] < 1.01)).all()):
        raise TensorError("weights must be between 0 and 1")
    if "choices" in score:
        given, right = score["choices"]
        counts = (score["choices"] == score["choices"].floor()) & (right >= 0) & (right <= given)
        if not (bool(counts.all()) and 1 <= float(given.sum()) <= MOST):
            problem = "choices must be counts of samples and of correctly classified samples"
            raise TensorError(problem)


PERPLEXITY = Metric("perplexity", "per token", True, perplexity, 2)
ACCURACY = Metric("accuracy", "%", False, accuracy, 3)


def metric_of(score: Tensor) -> Metric:
    """Return the metric of a client's score, from the number of sums in it."""
    return PERPLEXITY if score.numel() == PERPLEXITY.totals else ACCURACY


def choices(counts: Sequence[Tensor], anchored: Sequence[Sequence[int]]) -> Choices:
    """Return how many samples gates sent to each expert of a pool (DDOME, Table 5, Fig. 7), from
    (2, classes, M) counts of each client: samples of each class sent to each expert, and those that
    it classified correctly. `anchored` are the classes of each expert's anchor, if there are any.
    """
    given, right = (total.long() for total in torch.stack(list(counts)).sum(dim=0))
    gate = None
    if len(anchored) == given.shape[1]:
        fitting = sum(int(given[list(classes), m].sum()) for m, classes in enumerate(anchored))
        gate = 100 * fitting / int(given.sum())
    return Choices(given.tolist(), right.tolist(), gate)


def prediction(metric: MetricInfo) -> str:
    """Return the unit of a prediction: a token or an example."""
    return "token" if metric.unit == PERPLEXITY.unit else "example"


def direction(metric: MetricInfo) -> str:
    """Return whether lower or higher is better, in words."""
    return "lower is better" if metric.lower_is_better else "higher is better"


def sort_key(value: float, metric: MetricInfo) -> float:
    """Return the key of a ranking: the value, negated if higher is better."""
    return value if metric.lower_is_better else -value


def better(a: float, b: float, metric: MetricInfo) -> bool:
    """Return whether a beats b by the metric of a result."""
    return sort_key(a, metric) < sort_key(b, metric)


def best(values: Iterable[float], metric: MetricInfo) -> float:
    """Return the best value by the metric of a result."""
    return min(values, key=lambda value: sort_key(value, metric))


def worst(values: Iterable[float], metric: MetricInfo) -> float:
    """Return the worst value by the metric of a result."""
    return max(values, key=lambda value: sort_key(value, metric))


def change(value: float, reference: float, metric: MetricInfo) -> tuple[float, str]:
    """Return a difference and its unit: points if the metric is a percentage, otherwise percent."""
    if metric.unit == "%":
        return (value - reference, "points")
    return (100 * (value / reference - 1), "%")


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def deviation(values: list[float]) -> float:
    """Return the sample standard deviation over seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
