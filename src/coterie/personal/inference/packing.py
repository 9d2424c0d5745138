"""The layout in memory of several adapters for inference, and matrix products with
little call overhead, which dominates the time of a single token.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.mixture import LoRA, Mixture, project

# up to so many tokens, all experts are computed in one product
FEW = 8


def padded(values: Sequence[Tensor]) -> Tensor:
    """Stack tensors of different sizes as (models, ...), padded with zeros at the end."""
    sizes = [max(size) for size in zip(*(value.shape for value in values), strict=True)]
    stacked = values[0].new_zeros((len(values), *sizes))
    for place, value in zip(stacked, values, strict=True):
        place[tuple(slice(size) for size in value.shape)] = value
    return stacked


def experts_of(mixture: Mixture, linear: str) -> tuple[Tensor, Tensor]:
    """Return A (n, r, in) and B (n, out, r) of one layer of all experts, generalists first."""
    loras = [
        cast(LoRA, getattr(mixture, role)[linear])
        for role in ("generalist", "specialist")
        if hasattr(mixture, role)
    ]
    return torch.cat([lora.A.detach() for lora in loras]), torch.cat(
        [lora.B.detach() for lora in loras]
    )


def routers(mixtures: Sequence[Mixture]) -> tuple[Tensor | None, Tensor | None]:
    """Return weights (models, d, n), at least fp32, and biases (models, 1, n) of routers. A model
    without a router gets one of zeros, and a bias of -inf for experts that it lacks. None if no
    model has a router, or if all biases are 0.
    """
    experts = max(mixture.layout.experts for mixture in mixtures)
    like = experts_of(mixtures[0], "down")[1]  # (n, d, r)
    router = like.new_zeros((len(mixtures), like.shape[1], experts))
    bias = router.new_full((len(mixtures), 1, experts), -math.inf)
    for weight, constant, mixture in zip(router, bias, mixtures, strict=True):
        constant[:, : mixture.layout.experts] = 0.0
        if mixture.router is not None:
            weight[:, : mixture.layout.experts] = mixture.router.weight.detach().T
            if mixture.router.bias is not None:
                constant[:, : mixture.layout.experts] = mixture.router.bias.detach()
    routed = any(mixture.router is not None for mixture in mixtures)
    return router if routed else None, bias if bias.any() else None


def unused_of(mixtures: Sequence[Mixture]) -> Tensor | None:
    """Return (models, 1, k) which of the k largest logits a model does not use, k being the most
    that any model uses; None if each uses k, or all its experts.
    """
    active = [mixture.layout.active for mixture in mixtures]
    if min(active) == max(active) or all(m.layout.active == m.layout.experts for m in mixtures):
        return None
    device = next(mixtures[0].parameters()).device
    place = torch.arange(max(active), device=device)
    return place[None, None] >= torch.tensor(active, device=device)[:, None, None]


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
