"""Frozen linear layers in 8 or 4 bits, so that a large base fits users' machines: weights are kept
as codes with scales, and dequantised one layer at a time; and in bf16, on CPUs that emulate it.

The gradient with respect to inputs is exact for the dequantised weights. The trained adapter stays
in fp32 (Dettmers et al., "QLoRA", NeurIPS 2023). Everything is plain PyTorch, for every device.
"""

from copy import copy
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from coterie.core import devices
from coterie.core.errors import ModelError
from coterie.core.tensors import all_finite
from coterie.models.families import Family, find, is_transposed

Quantisation = Literal["int8", "nf4"]
GROUP = 64  # consecutive weights of a row that share a scale of nf4
# Quantiles of the normal distribution, scaled to [-1, 1], 0 among them (QLoRA, Appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class QuantisedLinear(nn.Module):
    """A frozen linear layer whose weight, (out, in), is codes and scales; its bias stays unchanged.

    int8: w = scale c, one scale for each output. nf4: w = scale q_c with q the quantiles of a
    normal distribution, for each group of 64 inputs.
    """

    codes: Tensor
    scale: Tensor
    levels: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Quantisation) -> None:
        super().__init__()
        self.kind, (self.out_features, self.in_features) = kind, weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        codes, scale = (_int8 if kind == "int8" else _nf4)(weight.detach().float())
        if not all_finite({"scale": scale}):
            raise ModelError(
                f"{kind}: the scales of a layer of {self.out_features} x {self.in_features} "
                f"weights are not finite in half precision",
                "The base is damaged, or has weights too large to quantise: leave out "
                "model.quantise.",
            )
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        levels = torch.tensor(NF4, device=weight.device) if kind == "nf4" else None
        self.register_buffer("levels", levels, persistent=False)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight, (out, in)."""
        if self.kind == "int8":
            return self.codes.to(dtype).mul_(self.scale.to(dtype))
        codes = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)
        groups = codes.view(len(codes), -1, GROUP)
        weight = cast(Tensor, self.levels).to(dtype)[groups.int()]
        return weight.mul_(self.scale.to(dtype)[..., None]).flatten(1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class Bf16Linear(nn.Linear):
    """A frozen linear layer in bf16 whose products are in fp32 where that is faster."""

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    forward = QuantisedLinear.forward  # type: ignore[assignment]  # a name of an argument


def rows_of(whole: nn.Linear | QuantisedLinear, rows: slice) -> nn.Module:
    """Return some outputs of a frozen layer as a layer that shares its memory."""
    layer: Any = copy(whole)
    layer._parameters = {
        name: None if p is None else nn.Parameter(p.detach()[rows], requires_grad=False)
        for name, p in whole._parameters.items()
    }
    layer._buffers = {
        name: t if t is None or name == "levels" else t[rows] for name, t in whole._buffers.items()
    }
    layer.out_features = len(range(whole.out_features)[rows])
    return cast(nn.Module, layer)


class _Product(torch.autograd.Function):
    """x W^T + b. Neither pass keeps W: both convert it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer, dtype = layer, devices.product_dtype(x)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return functional.linear(x.to(dtype), layer.weight_as(dtype), bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dtype = devices.product_dtype(grad)
        return (grad.to(dtype) @ ctx.layer.weight_as(dtype)).to(grad.dtype), None


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes (out, in) and scales (out, 1) of (out, in)."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    return (weight / scale).round_().to(torch.int8), scale


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (out, in / 2), two per byte, and scales (out, groups), of (out, in)."""
    missing = -weight.shape[1] % GROUP
    filled = torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1)
    groups = filled.view(len(weight), -1, GROUP)
    scale = groups.abs().amax(dim=-1).clamp(min=1e-7).to(torch.float16)
    levels = torch.tensor(NF4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(groups / scale.float()[..., None], middles).to(torch.uint8)
    pairs = codes.view(len(codes), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scale


def quantise(
    model: nn.Module, family: Family, kind: str, device: str | torch.device | None = None
) -> None:
    """Quantise the linears of a base's attention and MLPs to 8 or 4 bits in place, not its
    embeddings and output layer, each on a device, so that it never holds all weights. Weights that
    are mapped from a file are read one by one. Raises ModelError for another kind.
    """
    if kind not in get_args(Quantisation):
        problem = f"a base cannot be quantised to {kind!r}"
        raise ModelError(problem, f"Allowed: {', '.join(get_args(Quantisation))}.")
    names = [f"{family.attention}.{name}" for name in family.linears]
    names += dict.fromkeys(family.within(name) for name in family.mlp.values())
    for block in cast(nn.ModuleList, find(model, family.blocks)):
        for name in names:
            layer: Any = block.get_submodule(name)
            weight = layer.weight.T if is_transposed(layer) else layer.weight
            quantised = QuantisedLinear(weight.to(device), layer.bias, cast(Quantisation, kind))
            block.set_submodule(name, quantised)


def dequantise(model: nn.Module) -> None:
    """Replace layers made by `quantise` by plain ones of the same values, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantisedLinear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(layer.weight_as(torch.float32), requires_grad=False)
            plain.register_parameter("bias", layer.bias)
            model.set_submodule(name, plain)


def convert_products(blocks: nn.Module) -> None:
    """Make linear layers in bf16 `Bf16Linear`, in place, where this CPU emulates bf16."""
    for layer in blocks.modules():
        if type(layer) is nn.Linear and not devices.has_bf16("cpu"):
            layer.__class__ = Bf16Linear  # type: ignore[assignment]


def bytes_per_weight(kind: str) -> float:
    """Return the bytes per weight, including its share of scales."""
    return 1.0 if kind == "int8" else 0.5 + 2 / GROUP
