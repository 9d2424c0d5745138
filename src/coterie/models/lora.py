"""Low-rank updates: W = W0 + gamma B A, gamma = alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023)."""

import math

import torch
from torch import Tensor, nn

from coterie.core.roles import GENERALIST, Role
from coterie.models.layout import Layout


def gamma(alpha: float, rank: int) -> float:
    """Return the scale of a rank-stabilised update."""
    return alpha / math.sqrt(rank)


def project(base: nn.Module, x: Tensor) -> Tensor:
    """Return a frozen linear layer's (T, out) of (T, in), in a tensor that may be updated in place.

    GPT-2's Conv1D returns a view; updating that in place costs autograd copies of the whole tensor.
    """
    if hasattr(base, "nf"):
        return torch.addmm(base.bias, x, base.weight)  # type: ignore[arg-type]
    y: Tensor = base(x)
    return y


class LoRA(nn.Module):
    """A stack of `count` updates of one linear layer: A (count, r, in), B (count, out, r), both
    fp32.

    `roles` are those of A and of B; `count` is 1 for attention, otherwise the experts of that role.
    """

    def __init__(
        self,
        roles: tuple[Role, Role],
        count: int,
        inputs: int,
        outputs: int,
        rank: int,
        alpha: float,
    ) -> None:
        super().__init__()
        self.gamma = gamma(alpha, rank)
        self.A = nn.Parameter(torch.zeros(count, rank, inputs))
        self.B = nn.Parameter(torch.zeros(count, outputs, rank))
        self.roles = dict(zip("AB", roles, strict=True))


class SingleLoRA(LoRA):
    """The one update of an attention layer, a generalist's in every variant of CoMiGS."""

    def __init__(self, inputs: int, outputs: int, layout: Layout) -> None:
        super().__init__(layout.factors(GENERALIST), 1, inputs, outputs, layout.rank, layout.alpha)
        self.dropout = layout.dropout

    def forward(self, x: Tensor, base: nn.Module) -> Tensor:
        """Return base(x) + gamma B A x, (..., in) -> (..., out), in the dtype of x.

        The long side comes last in every thin product, also in the backward pass: on CPUs that is
        up to four times as fast.
        """
        tokens = x.flatten(0, -2)
        codes = (
            self.A[0].to(x.dtype) @ nn.functional.dropout(tokens, self.dropout, self.training).T
        )  # (r, T)
        y = project(base, tokens).addmm_(
            codes.T, self.B[0].to(x.dtype).T.contiguous(), alpha=self.gamma
        )
        return y.view(*x.shape[:-1], -1)
