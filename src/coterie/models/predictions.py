"""Predictions with what was right, and the score that they come to."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from coterie.core import devices

# of a batch: log-probabilities, (n, classes), and the right class, (n,); of text only those of the
# right token, (n, 1), and zeros
Prediction = tuple[Tensor, Tensor]


def score_of(predictions: Iterable[Prediction], sums: int = 0) -> Tensor:
    """Return a score, (2,) or with several classes (3,) float64 on the CPU: the summed negative
    log-likelihood in nats, the predictions, and the correct ones; as many `sums` of no predictions.
    """
    of_batches = []
    for log_probs, right in predictions:
        likelihood = devices.exact(log_probs.gather(1, right[:, None])).sum()
        correct = devices.exact(log_probs.argmax(dim=1) == right).sum()
        of_batches.append(
            torch.stack([-likelihood, torch.full_like(likelihood, len(right)), correct])
        )
    if not of_batches:
        return torch.zeros(sums, dtype=torch.float64)
    total = sum(of_batches, start=torch.zeros_like(of_batches[0]))
    return total.cpu().double()[: 3 if log_probs.shape[1] > 1 else 2]


@torch.no_grad()
def flops_of(compute: Callable[[], object]) -> int:
    """Return the floating-point operations of a computation, without a backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


def joined(by_part: Sequence[Sequence[Prediction]]) -> Prediction:
    """Return models' predictions of the same data, (P, n, classes) float64, and the right, (n,)."""
    log_probs = [torch.cat([p for p, _ in batches]).cpu().double() for batches in by_part]
    return torch.stack(log_probs), torch.cat([right for _, right in by_part[0]]).cpu()


def likelihoods(log_probs: Tensor, right: Tensor) -> Tensor:
    """Return the log-probabilities of what is right, (P, n), from `joined`."""
    return log_probs.gather(2, right.expand(len(log_probs), -1)[..., None])[..., 0]
