"""Next-token cross-entropy straight from hidden states: the logits of all tokens never exist at
once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# values; on a CPU about what its last cache holds
LOGITS_AT_ONCE, ON_ACCELERATORS = 2**20, 2**27
# but at least, of a large vocabulary: fewer would read the whole head, far more than a cache holds,
# for little work
TOKENS_AT_ONCE = 128


class _HeadLoss(torch.autograd.Function):
    """The sum of the NLL through a frozen head: its gradient is found in the forward pass, so
    only dL/dhidden (T, d) is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        total = torch.zeros(
            (), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32)
        )
        gradient = torch.empty_like(hidden)
        for part in _parts(hidden, weight):
            logits = nn.functional.linear(hidden[part], weight, bias).to(total.dtype)
            log_p = torch.log_softmax(logits, dim=-1)
            index = targets[part, None]
            total -= log_p.gather(1, index).sum()
            residual = log_p.exp_()
            residual.scatter_add_(1, index, residual.new_full((1, 1), -1.0).expand_as(index))
            torch.mm(residual.to(weight.dtype), weight, out=gradient[part])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None


def _parts(hidden: Tensor, weight: Tensor) -> list[slice]:
    most = LOGITS_AT_ONCE if hidden.device.type == "cpu" else ON_ACCELERATORS
    rows = max(most // weight.shape[0], TOKENS_AT_ONCE)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """sum_t -log softmax(W h_t + bias)[target_t], differentiable with respect to the hidden states
    only.

    Args:
        hidden: (T, d).
        weight: (V, d), frozen.
        bias: (V,) or None, frozen.
        targets: (T,) int64.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, bias, targets)  # type: ignore[no-untyped-call]
    return loss


def head_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """(T,) the NLL of each target, at least fp32; without gradient."""
    found = []
    for part in _parts(hidden, weight):
        logits = nn.functional.linear(hidden[part], weight, bias)
        found.append(
            nn.functional.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)),
                targets[part],
                reduction="none",
            )
        )
    return torch.cat(found)
