"""Matrix products with little call overhead, which dominates the time of a single token."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.lora import project


def base_layer(base: nn.Module, x: Tensor) -> Tensor:
    """Return `project(base, x)`, without the overhead of a module call for a plain layer."""
    if type(base) is nn.Linear:
        return functional.linear(x, base.weight, base.bias)
    return project(base, x)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of matrices or of batches of them: `torch.matmul` with less overhead."""
    return torch.mm(a, b, out=out) if a.ndim == 2 else torch.bmm(a, b, out=out)


def add_product(y: Tensor, a: Tensor, b: Tensor, keep: bool = False) -> Tensor:
    """Return y + a b, for matrices or batches of them; y is overwritten unless `keep`."""
    if y.ndim == 2:
        return (y.addmm if keep else y.addmm_)(a, b)
    return (y.baddbmm if keep else y.baddbmm_)(a, b)
