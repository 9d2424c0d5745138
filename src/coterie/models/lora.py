"""Low-rank updates: W = W0 + gamma B A, with gamma = alpha / sqrt(r) (rank-stabilised LoRA, Kalajdzievski 2023)."""

import math

import torch
from torch import Tensor, nn

from coterie.roles import Role


def gamma(alpha: float, rank: int) -> float:
    """The scale of a rank-stabilised update."""
    return alpha / math.sqrt(rank)


def project(base: nn.Module, x: Tensor) -> Tensor:
    """(T, in) -> (T, out): a frozen linear layer, into a tensor that may be updated in place.

    GPT-2's Conv1D would return a view, and updating a view in place costs autograd copies of the whole tensor.
    """
    if hasattr(base, "nf"):
        return torch.addmm(base.bias, x, base.weight)  # type: ignore[arg-type]
    y: Tensor = base(x)
    return y


class LoRA(nn.Module):
    """Updates of one linear layer, `count` of one role in one stack: A (count, r, in), B (count, out, r), both fp32.

    Args:
        role: Of both A and B.
        count: Updates in the stack; 1 for attention, otherwise the experts of that role.
        inputs: The layer's input width.
        outputs: Its output width.
        rank: r.
    """

    def __init__(self, role: Role, count: int, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(count, rank, inputs))
        self.B = nn.Parameter(torch.zeros(count, outputs, rank))
        self.roles = {"A": role, "B": role}


class SingleLoRA(LoRA):
    """The one update of an attention layer, always a generalist: shared in every variant of CoMiGS.

    Args:
        inputs: The layer's input width.
        outputs: Its output width.
        rank: r.
        alpha: The numerator of gamma.
        dropout: Probability of dropping a value of the update's input while training.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float, dropout: float) -> None:
        super().__init__(Role.GENERALIST, 1, inputs, outputs, rank)
        self.gamma, self.dropout = gamma(alpha, rank), dropout

    def forward(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out): base(x) + gamma B A x, in the dtype of x."""
        tokens = x.flatten(0, -2)
        codes = nn.functional.linear(nn.functional.dropout(tokens, self.dropout, self.training), self.A[0].to(x.dtype))
        y = project(base, tokens).addmm_(codes, self.B[0].to(x.dtype).T, alpha=self.gamma)
        return y.view(*x.shape[:-1], -1)
