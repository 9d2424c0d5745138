"""Matrix products with little call overhead, which takes most of the time of a single token."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.lora import project


def base_layer(base: nn.Module, x: Tensor) -> Tensor:
    """`project`, without the overhead of a module call if it is a plain layer."""
    if type(base) is nn.Linear:
        return functional.linear(x, base.weight, base.bias)
    return project(base, x)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b, of matrices or batches of them: `torch.matmul` with less overhead."""
    return torch.mm(a, b, out=out) if a.ndim == 2 else torch.bmm(a, b, out=out)


def add_product(y: Tensor, a: Tensor, b: Tensor, keep: bool = False) -> Tensor:
    """Return y + a b, of matrices or batches of them, in the place of y unless that is kept."""
    if y.ndim == 2:
        return (y.addmm if keep else y.addmm_)(a, b)
    return (y.baddbmm if keep else y.baddbmm_)(a, b)
