"""Next-token cross-entropy from hidden states, without materialising all logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# values; on a CPU about what its second cache holds
LOGITS_AT_ONCE, ON_ACCELERATORS = 2**21, 2**27
# but at least, of many tokens: narrower products are slower
WORDS_AT_ONCE = 256


class _HeadLoss(torch.autograd.Function):
    """The sum of the NLL through a frozen head; it keeps only dL/dhidden, (T, d)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        gradient = torch.zeros_like(hidden, dtype=_exact(hidden))
        nll = _by_vocabulary(hidden, weight, bias, targets, gradient)
        ctx.save_for_backward(gradient.to(hidden.dtype))
        return nll.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None


def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return sum_t -log softmax(W h_t + bias)[target_t], differentiable by hidden states only.

    `hidden` is (T, d), `weight` (V, d) and `bias` (V,) or None, both frozen, `targets` (T,) int64.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, bias, targets)  # type: ignore[no-untyped-call]
    return loss


def head_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return the NLL of each target, (T,), at least fp32; without gradient."""
    return _by_vocabulary(hidden, weight, bias, targets, None)


def _by_vocabulary(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, gradient: Tensor | None
) -> Tensor:
    """Return the NLL of each target, (T,); add its gradient to `gradient`, (T, d), if given.

    The vocabulary is processed in blocks, with a softmax that is rescaled as the largest logit
    grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): each block of
    W is read once and multiplied twice, by all tokens, while its logits are in the cache. With the
    target y apart, the gradient is sum_{v != y} p_v W_v - (1 - p_y) W_y, without cancellation.
    """
    top = hidden.new_full((len(hidden), 1), torch.finfo(_exact(hidden)).min, dtype=_exact(hidden))
    others, target_logit = torch.zeros_like(top), torch.zeros_like(top)
    for start, stop in _blocks(hidden, weight):
        rows = weight[start:stop]
        part = None if bias is None else bias[start:stop]
        logits = torch.nn.functional.linear(hidden, rows, part).to(_exact(hidden))
        place = targets[:, None] - start
        here = (place >= 0) & (place < stop - start)
        place = place.clamp(0, stop - start - 1)
        gathered = logits.gather(1, place)
        target_logit = torch.where(here, gathered, target_logit)
        logits.scatter_(1, place, gathered.masked_fill(here, -torch.inf))
        before, top = top, torch.maximum(top, logits.amax(dim=1, keepdim=True))
        shrunk, shares = (before - top).exp_(), logits.sub_(top).exp_()
        others.mul_(shrunk).add_(shares.sum(dim=1, keepdim=True))
        if gradient is not None:
            _add_product(gradient.mul_(shrunk), shares, rows)
    rest = others.log().add_(top)  # log sum_{v != y} exp(logit_v)
    total = torch.logaddexp(rest, target_logit)
    if gradient is not None:
        gradient.mul_((top - total).exp_())
        gradient.addcmul_((rest - total).exp_(), weight[targets].to(gradient.dtype), value=-1)
    return (total - target_logit)[:, 0]


def _add_product(total: Tensor, shares: Tensor, weight: Tensor) -> None:
    if total.dtype == weight.dtype:
        total.addmm_(shares, weight)
    else:
        total.add_(shares.to(weight.dtype) @ weight)


def _exact(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _blocks(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """Return the first and end row of W for each block."""
    most = LOGITS_AT_ONCE if hidden.device.type in ("cpu", "meta") else ON_ACCELERATORS
    size, count = max(most // max(len(hidden), 1), WORDS_AT_ONCE), len(weight)
    return [(start, min(start + size, count)) for start in range(0, count, size)]
