"""The negative log-likelihood of the targets of a batch that count, under what is attached to the
base.
"""

import torch
from torch import Tensor, nn

from coterie.models.backbone import Backbone
from coterie.models.loss import head_loss, head_nll
from coterie.models.windows import Windows


def nll_sum(backbone: Backbone, windows: Windows) -> Tensor:
    """Return the summed NLL, differentiable."""
    if backbone.head is None:
        return nll_of(backbone, windows).sum()
    hidden = backbone.hidden(windows.inputs, windows.positions).flatten(0, 1)
    return head_loss(windows.chosen(hidden), *backbone.head, windows.targets)


def nll_of(backbone: Backbone, windows: Windows) -> Tensor:
    """(T,) the NLL of each target, at least fp32."""
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
    return nn.functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        windows.targets,
        reduction="none",
    )


def nll_by_row(backbone: Backbone, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return the summed NLL, and the sum over rows of each row's mean, differentiable."""
    if windows.counted is None:
        nll = nll_sum(backbone, windows)
        return nll, nll / windows.ids[:, 1:].shape[1]
    each = nll_of(backbone, windows)
    counts = torch.tensor([row.predictions for row in windows.rows()])
    weights = (1 / counts).repeat_interleave(counts).to(each.device, each.dtype)
    return each.sum(), (each * weights).sum()
