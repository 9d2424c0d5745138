"""Adapters prepared for inference: matrices are stacked, scaled and cast once; no backward pass.
Models whose predictions are mixed are rows of one batch on one base.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.adapter import Adapter, AdapterBlock
from coterie.models.architecture import Architecture
from coterie.models.backbone import Backbone
from coterie.models.interpolation import interpolate
from coterie.models.mixture import SingleLoRA
from coterie.models.routing import Routing
from coterie.models.slots import Attachable
from coterie.personal.inference.mixtures import Mixtures
from coterie.personal.inference.packing import FEW, base_layer, padded, side_by_side

# layers of an attention that are called in this order with the same tensor
SAME_INPUT = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Updates:
    """The updates of one layer, called like a `SingleLoRA`."""

    A: Tensor  # (models, in, r), of several models contiguous
    B: Tensor  # (models, r, out), scaled by gamma

    @classmethod
    def of(cls, loras: Sequence[SingleLoRA], dtype: torch.dtype) -> "Updates":
        """Stack the updates of one layer in every model."""
        A = [lora.A.detach()[0].T.to(dtype) for lora in loras]
        B = [(lora.gamma * lora.B.detach()[0].T).to(dtype).contiguous() for lora in loras]
        if len(loras) == 1:
            return cls(A[0][None], B[0][None])
        return cls(padded(A), padded(B))

    def select(self, places: Tensor) -> "Updates":
        """Return copies for other models in another order, (groups,) int64."""
        return Updates(self.A.index_select(0, places), self.B.index_select(0, places))

    @cached_property
    def alone(self) -> tuple[Tensor, Tensor] | None:
        """The matrices (r, in) and (r, out) of one model; None for several models."""
        return (self.A[0].T, self.B[0]) if len(self.A) == 1 else None

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        tokens = x.reshape(-1, x.shape[-1])
        y = base_layer(base, tokens)
        if self.alone is None:
            codes = torch.bmm(tokens.view(len(self.A), -1, x.shape[-1]), self.A)
            y.view(*codes.shape[:2], -1).baddbmm_(codes, self.B)
        else:
            # the product of a few long rows is faster
            y.addmm_((self.alone[0] @ tokens.T).T, self.alone[1])
        return y.view(*x.shape[:-1], -1)


class _Joined:
    """Layers of one model that are called with the same input: the first call computes all."""

    def __init__(self, loras: Sequence[SingleLoRA], layer: tuple[Tensor, Tensor | None]) -> None:
        self.weight, self.bias = layer
        dtype = self.weight.dtype
        self.sizes = [lora.B.shape[1] for lora in loras]
        self.A = torch.cat([lora.A.detach()[0] for lora in loras]).to(dtype)  # (layers r, in)
        B = torch.block_diag(*(lora.gamma * lora.B.detach()[0].T for lora in loras))  # type: ignore[no-untyped-call]
        self.B = B.to(dtype)  # (layers r, all out)
        self.x: Tensor | None = None
        self.parts: list[Tensor | None] = []

    def part(self, index: int, alone: "Attended", x: Tensor, base: nn.Module) -> Tensor:
        """Compute one of the layers, (..., in) -> (..., out)."""
        # with many tokens the zeros in the joined updates would cost more than the calls
        if x.numel() > FEW * x.shape[-1]:
            return alone(x, base)
        if self.x is not x or self.parts[index] is None:
            tokens = x.reshape(-1, x.shape[-1])
            y = functional.linear(tokens, self.weight, self.bias)
            y.addmm_(functional.linear(tokens, self.A), self.B)
            self.x, self.parts = x, list(torch.split(y.view(*x.shape[:-1], -1), self.sizes, dim=-1))
        output = cast(Tensor, self.parts[index])
        self.parts[index] = None
        # nothing is kept between passes
        if index == len(self.sizes) - 1:
            self.x, self.parts = None, []
        return output


# called like a `SingleLoRA`
Attended = Callable[[Tensor, nn.Module], Tensor]


def attended(
    blocks: Sequence[Mapping[str, SingleLoRA]], layers: Mapping[str, nn.Module], dtype: torch.dtype
) -> dict[str, Attended]:
    """Return the computation of each layer of an attention, by its name."""
    first = blocks[0]
    by_layer: dict[str, Attended] = {
        name: Updates.of([block[name] for block in blocks], dtype) for name in layers
    }
    together = [name for name in first if name in SAME_INPUT]
    layer = side_by_side([layers[name] for name in together]) if len(blocks) == 1 else None
    if layer is not None:
        joined = _Joined([first[name] for name in together], layer)
        by_layer |= {
            name: partial(joined.part, i, by_layer[name]) for i, name in enumerate(together)
        }
    return by_layer


class _Block:
    """The adapters of one transformer block, called like an `AdapterBlock`."""

    def __init__(self, attention: dict[str, Attended], mlp: Mixtures) -> None:
        self.attention, self.mlp = attention, mlp

    def select(self, places: Tensor) -> "_Block":
        """Return a copy for other models, see `Stacks.select`."""
        attention: dict[str, Attended] = {
            name: cast(Updates, layer).select(places) for name, layer in self.attention.items()
        }
        return _Block(attention, self.mlp.select(places))


class Stacks:
    """The adapters of several models as one, for `Backbone.using`: as many rows for each model."""

    def __init__(self, architecture: Architecture, blocks: Sequence[_Block], groups: int) -> None:
        self.architecture, self.blocks, self.groups = architecture, blocks, groups

    @classmethod
    def of(cls, adapters: Sequence[Adapter], backbone: Backbone) -> "Stacks":
        """Stack adapters whose values no longer change, in the given order. The base's layers with
        the same input are moved side by side in memory.
        """
        blocks = []
        for slots, mlp, *adapter_blocks in zip(
            backbone.attentions,
            backbone.mlps,
            *(adapter.blocks for adapter in adapters),
            strict=True,
        ):
            each = cast(Sequence[AdapterBlock], adapter_blocks)
            loras = [
                {name: cast(SingleLoRA, lora) for name, lora in block.attention.items()}
                for block in each
            ]
            layers = {name: cast(nn.Module, getattr(slots, name).base) for name in loras[0]}
            mixtures = Mixtures.of([block.mlp for block in each], mlp, backbone.dtype)
            blocks.append(_Block(attended(loras, layers, backbone.dtype), mixtures))
        return cls(adapters[0].architecture, blocks, len(adapters))

    def select(self, places: Tensor) -> "Stacks":
        """Return copies for several models, (groups,) int64, in any order, with repetitions."""
        blocks = [block.select(places) for block in self.blocks]
        return Stacks(self.architecture, blocks, len(places))


# arguments of a forward pass with a first dimension for rows
_OF_ROWS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


class Mixed:
    """The adapters of the parts of several groups of rows, one after another, with (groups, P)
    weights.
    """

    def __init__(self, stacks: Stacks, weights: Tensor) -> None:
        self.stacks, self.weights, self.groups = stacks, weights, len(weights)
        self.architecture, self.blocks = stacks.architecture, stacks.blocks

    def rows(self, values: Tensor) -> Tensor:
        """Return rows, (B, ...), once for each part: group by group, part by part."""
        groups, parts = self.weights.shape
        apart = values.view(groups, 1, -1, *values.shape[1:])
        return apart.expand(-1, parts, *apart.shape[2:]).flatten(0, 2)

    def cache_rows(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows in a cache of `count` texts of these texts, (B,) int64, by part."""
        groups, parts = self.weights.shape
        each = count // groups
        group, row = rows // each, rows % each
        first = self.rows(group * parts * each + row).view(groups, parts, -1)
        steps = torch.arange(parts, device=rows.device)[:, None] * each
        return (first + steps).flatten()

    def mixed(self, logits: Tensor) -> Tensor:
        """Return (B, C, V) log-probabilities of the mixtures from the parts' logits."""
        groups, parts = self.weights.shape
        by_part = logits.float().log_softmax(dim=-1).view(groups, parts, -1, *logits.shape[1:])
        weights = self.weights.to(logits.device, torch.float32)
        return torch.cat([interpolate(of, w) for of, w in zip(by_part, weights, strict=True)])


@contextmanager
def attached(
    backbone: Backbone, adapter: Attachable, record: list[Routing] | None = None
) -> Iterator[None]:
    """Attach an adapter, or several that are mixed, for forward passes of the base's model."""
    if not isinstance(adapter, Mixed):
        with backbone.using(adapter, record):
            yield
        return

    def before(_: Any, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        ids = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
        for_parts = {
            name: adapter.rows(value)
            if name in _OF_ROWS and isinstance(value, Tensor) and len(value) == len(ids)
            else value
            for name, value in inputs.items()
        }
        return tuple(adapter.rows(value) for value in args), for_parts

    def after(_: Any, args: tuple[Any, ...], output: Any) -> Any:
        output.logits = adapter.mixed(output.logits)
        return output

    with backbone.using(adapter):
        hooks = (
            backbone.model.register_forward_pre_hook(before, with_kwargs=True),
            backbone.model.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
