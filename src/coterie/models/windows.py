"""A batch of token ids on the base's device: windows of running text, or packed conversations; and
their next-token cross-entropy from hidden states, without materialising all logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coterie.core.devices import product_dtype
from coterie.data.chats.splits import ChatBatch
from coterie.models.backbone import Backbone
from coterie.models.routing import Routing

LOGITS_AT_ONCE, ON_ACCELERATORS = 2**21, 2**27  # values; on a CPU about what its second cache holds
WORDS_AT_ONCE = 256  # but at least, of many tokens: narrower products are slower


class _HeadLoss(torch.autograd.Function):
    """The sum of the NLL through a frozen head; it keeps only dL/dhidden, (T, d)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        gradient = torch.zeros_like(hidden, dtype=_exact(hidden))
        nll = head_nll(hidden, weight, bias, targets, gradient)
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


def head_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    gradient: Tensor | None = None,
) -> Tensor:
    """Return the NLL of each target, (T,), at least fp32, see `head_loss`; add its gradient to
    `gradient`, (T, d), if given.

    The vocabulary is processed in blocks, with a softmax that is rescaled as the largest logit
    grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): each block of
    W is read once and multiplied twice, by all tokens, while its logits are in the cache. With the
    target y apart, the gradient is sum_{v != y} p_v W_v - (1 - p_y) W_y, without cancellation.
    """
    top = hidden.new_full((len(hidden), 1), torch.finfo(_exact(hidden)).min, dtype=_exact(hidden))
    others, target_logit = torch.zeros_like(top), torch.zeros_like(top)
    most = LOGITS_AT_ONCE if hidden.device.type in ("cpu", "meta") else ON_ACCELERATORS
    size = max(most // max(len(hidden), 1), WORDS_AT_ONCE)
    dtype = product_dtype(hidden)
    hidden = hidden.to(dtype)
    for start in range(0, len(weight), size):
        stop = min(start + size, len(weight))
        rows = weight[start:stop].to(dtype)
        part = None if bias is None else bias[start:stop].to(dtype)
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
        if gradient is not None and gradient.mul_(shrunk).dtype == rows.dtype:
            gradient.addmm_(shares, rows)
        elif gradient is not None:
            gradient.add_(shares.to(rows.dtype) @ rows)
    rest = others.log().add_(top)  # log sum_{v != y} exp(logit_v)
    total = torch.logaddexp(rest, target_logit)
    if gradient is not None:
        gradient.mul_((top - total).exp_())
        gradient.addcmul_((rest - total).exp_(), weight[targets].to(gradient.dtype), value=-1)
    return (total - target_logit)[:, 0]


def _exact(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


TextBatch = Tensor | ChatBatch


def tokens_in(batch: TextBatch) -> int:
    """Return the number of inputs of a batch."""
    ids = batch if isinstance(batch, Tensor) else batch.ids
    return len(ids) * (ids.shape[1] - 1)


def shortened(batch: TextBatch, tokens: int) -> TextBatch:
    """Return rows of a batch with about so many inputs, or the start of one, to time it."""
    rows = max(tokens * len(batch) // max(tokens_in(batch), 1), 1)
    if isinstance(batch, Tensor):
        return batch[:rows, : tokens + 1]
    columns = (batch.ids, batch.counted, batch.positions)
    ids, counted, positions = (values[:rows, : tokens + 1] for values in columns)
    # a start of conversations that counts nothing would skip the head
    return ChatBatch(ids, counted if counted[:, 1:].any() else positions >= 0, positions)


@dataclass(frozen=True)
class Windows:
    """Rows of token ids, and masks of the tokens that count."""

    ids: Tensor  # (B, C + 1) int64
    # (B, C) each input's place in its conversation, if a row holds several
    positions: Tensor | None = None
    counted: Tensor | None = None  # (B, C) which targets count, on the CPU; None: all
    # (B, C) which inputs have a next token in their conversation, on the CPU; None: all
    real: Tensor | None = None

    @classmethod
    def of(cls, backbone: Backbone, batch: TextBatch) -> "Windows":
        """Return a batch on a base's device. Raises ModelError if they do not fit."""
        if isinstance(batch, Tensor):
            return cls(backbone.checked(batch, predicts=True))
        ids = backbone.checked(batch.ids, predicts=True)
        positions = None
        if batch.packed:
            backbone.check_packing()
            positions = batch.positions[:, :-1].clamp(min=0).to(ids.device)
        # the last token of a conversation predicts nothing, and is no input of it alone
        real = batch.positions[:, 1:] == batch.positions[:, :-1] + 1
        real &= batch.positions[:, :-1] >= 0
        return cls(ids, positions, batch.counted[:, 1:], real)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def predictions(self) -> int:
        """The number of counted targets."""
        return self.inputs.numel() if self.counted is None else int(self.counted.sum())

    @cached_property
    def routed(self) -> int:
        """The number of inputs with a next token, over which load balancing and routing weights
        average.
        """
        return self.inputs.numel() if self.real is None else int(self.real.sum())

    @property
    def inputs(self) -> Tensor:
        """(B, C)."""
        return self.ids[:, :-1]

    @property
    def targets(self) -> Tensor:
        """The counted targets, (T,), row by row."""
        return self.chosen(self.ids[:, 1:].flatten())

    def chosen(self, values: Tensor) -> Tensor:
        """Return the (T, ...) values of counted targets out of (B C, ...)."""
        if self.counted is None:
            return values
        places = torch.nonzero(self.counted.flatten())[:, 0]  # of a mask on the CPU: no waiting
        return values.index_select(0, places.to(values.device, non_blocking=True))

    def split(self, rows: int) -> list[Self]:
        """Return parts of at most `rows` rows each, in order."""
        if rows >= len(self):
            return [self]
        parts = [slice(start, start + rows) for start in range(0, len(self), rows)]
        masks = (self.positions, self.counted, self.real)
        return [
            type(self)(self.ids[part], *(mask if mask is None else mask[part] for mask in masks))
            for part in parts
        ]

    def of_tokens(self, record: Sequence[Routing]) -> Sequence[Routing]:
        """Return the routing decisions of inputs with a next token."""
        if self.real is None or self.real.all():
            return record
        places = self.real.flatten().nonzero()[:, 0].to(self.ids.device)
        return [decision.at(places) for decision in record]

    def by_row(self, record: Sequence[Routing]) -> list[Sequence[Routing]]:
        """Return the decisions of each row's own tokens."""
        parts = self.split(1)
        return [
            row_windows.of_tokens([decision.part(row, len(parts)) for decision in record])
            for row, row_windows in enumerate(parts)
        ]

    def means(self, hidden: Tensor) -> Tensor:
        """Return the mean over each row's tokens, (B, C, d) -> (B, d)."""
        if self.real is None:
            return hidden.mean(dim=1)
        weights = self.real.to(hidden.device, hidden.dtype)[..., None]
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def nll_sum(backbone: Backbone, windows: Windows) -> Tensor:
    """Return the summed NLL, differentiable."""
    if backbone.head is None:
        return nll_of(backbone, windows).sum()
    hidden = backbone.hidden(windows.inputs, windows.positions).flatten(0, 1)
    return head_loss(windows.chosen(hidden), *backbone.head, windows.targets)


def nll_of(backbone: Backbone, windows: Windows) -> Tensor:
    """Return the NLL of each target, (T,), at least fp32."""
    head = backbone.head
    if head is None or (torch.is_grad_enabled() and windows.counted is None):
        all_logits = backbone.logits(windows.inputs, windows.positions).flatten(0, 1)
        logits = windows.chosen(all_logits)
    else:
        hidden = backbone.hidden(windows.inputs, windows.positions).flatten(0, 1)
        hidden = windows.chosen(hidden)
        if not torch.is_grad_enabled():
            return head_nll(hidden, *head, windows.targets)
        logits = nn.functional.linear(hidden, *head)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(exact, windows.targets, reduction="none")


def nll_by_row(backbone: Backbone, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return the summed NLL, and the sum of each row's mean, both differentiable."""
    if windows.counted is None:
        nll = nll_sum(backbone, windows)
        return nll, nll / windows.ids[:, 1:].shape[1]
    each = nll_of(backbone, windows)
    counts = torch.tensor([row.predictions for row in windows.split(1)])
    weights = (1 / counts).repeat_interleave(counts).to(each.device, each.dtype)
    return each.sum(), (each * weights).sum()
