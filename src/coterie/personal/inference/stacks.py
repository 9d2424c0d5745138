"""Adapters prepared for inference: matrices are stacked, scaled and cast once; no backward pass.
Models whose predictions are mixed are rows of one batch on one base; texts of different lengths
that are continued in one batch have their keys and values in one cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from coterie.models.adapter import Adapter, AdapterBlock
from coterie.models.architecture import Architecture
from coterie.models.backbone import Backbone
from coterie.models.interpolation import interpolate
from coterie.models.mixture import SingleLoRA
from coterie.models.routing import Routing
from coterie.models.slots import Attachable
from coterie.personal.inference.mixtures import Apart, Mixtures
from coterie.personal.inference.packing import base_layer, padded

SPARE = 64  # columns that are added if there is no room for the next token


class _Columns:
    """The columns in use in all layers, `begin` to `end`; the next are written from `end` on."""

    def __init__(self) -> None:
        self.begin = self.end = 0


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers' types are not read
    """The buffers of one layer, (rows, heads, columns, d) each."""

    def __init__(self, columns: _Columns) -> None:
        super().__init__()
        self.columns = columns

    def resize(self, rows: int, columns: int, end: int, like: Tensor) -> None:
        """Allocate buffers of rows and columns, in which the used columns end at `end`."""
        used = slice(self.columns.begin, self.columns.end)
        # zeros, since masked values must still be finite
        for name in ("keys", "values"):
            buffer = like.new_zeros((rows, like.shape[0], columns, like.shape[-1]))
            if (old := getattr(self, name)) is not None:
                buffer[: len(old), :, end - used.stop + used.start : end] = old[:, :, used]
            setattr(self, name, buffer)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, t, d) of the next tokens; return (B, heads, used columns + t, d)."""
        rows, begin, end = len(key_states), self.columns.begin, self.columns.end
        after = end + key_states.shape[-2]
        self.keys[:rows, :, end:after] = key_states
        self.values[:rows, :, end:after] = value_states
        return self.keys[:rows, :, begin:after], self.values[:rows, :, begin:after]

    def get_seq_length(self) -> int:
        """Return the number of used columns."""
        return self.columns.end - self.columns.begin


class RowCache(Cache):  # type: ignore[misc]  # transformers' types are not read
    """The cache of a running batch. Each row is a text; rows are numbered from 0 without gaps. Of
    models whose predictions are mixed a text has a row of the buffers for each part.
    """

    def __init__(self, blocks: int, parts: int = 1) -> None:
        self.parts, self.columns = parts, _Columns()
        super().__init__(layers=[_Layer(self.columns) for _ in range(blocks)])
        self.lengths: list[int] = []  # tokens of each row

    def put(self, row: int, source: Cache, place: int, length: int) -> None:
        """Copy a text of `length` tokens from a row of `source`, whose texts all end in the last
        column, into an existing row or the next one.
        """
        lengths = [*self.lengths[:row], length, *self.lengths[row + 1 :]]
        self._fit(len(lengths), max(lengths), source.layers[0].keys[place])
        self.lengths = lengths
        columns = slice(self.columns.end - length, self.columns.end)
        for layer, source_layer in zip(self.layers, source.layers, strict=True):
            to, of = self._of(row), self._of(place)
            layer.keys[to, :, columns] = source_layer.keys[of, :, -length:]
            layer.values[to, :, columns] = source_layer.values[of, :, -length:]
        self._narrow()

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        last = len(self.lengths) - 1
        columns = slice(self.columns.end - self.lengths[last], self.columns.end)
        if row != last:
            for layer in self.layers:
                to, of = self._of(row), self._of(last)
                layer.keys[to, :, columns] = layer.keys[of, :, columns]
                layer.values[to, :, columns] = layer.values[of, :, columns]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._narrow()

    def reserve(self) -> tuple[Tensor, Tensor]:
        """Make room for the next token of every row. Return (B, used columns + 1) int64 the mask of
        the columns that each row attends to, the next token's included, and (B, 1) int64 that
        token's position in its text.
        """
        self._fit(len(self.lengths), max(self.lengths), self._layer.keys[0])
        lengths = torch.tensor(self.lengths, device=self._layer.keys.device)
        column = torch.arange(self.columns.end - self.columns.begin + 1, device=lengths.device)
        return (column >= len(column) - 1 - lengths[:, None]).long(), lengths[:, None]

    def advance(self) -> None:
        """Count the column that the last pass has written as used."""
        self.columns.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def _of(self, row: int) -> slice:
        return slice(row * self.parts, (row + 1) * self.parts)

    @property
    def _layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    def _narrow(self) -> None:
        """Reduce the used columns to the length of the longest row."""
        self.columns.begin = self.columns.end - max(self.lengths, default=0)

    def _fit(self, rows: int, longest: int, like: Tensor) -> None:
        """Make room for a number of rows, for the longest of them, and for one more token."""
        keys, end = self._layer.keys, self.columns.end
        self.columns.begin = max(self.columns.begin, end - longest)
        rows = rows * self.parts
        size = (0, 0) if keys is None else (keys.shape[0], keys.shape[2])
        if rows <= size[0] and longest <= end < size[1]:
            return
        rows = size[0] if rows <= size[0] else max(rows, 2 * size[0])
        for layer in self.layers:
            layer.resize(rows, longest + SPARE, longest, like)
        self.columns.begin += longest - end
        self.columns.end = longest


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
        return cls(A[0][None], B[0][None]) if len(loras) == 1 else cls(padded(A), padded(B))

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


class _Block:
    """The adapters of one transformer block, called like an `AdapterBlock`."""

    def __init__(self, attention: dict[str, Updates], mlp: Mixtures | Apart) -> None:
        self.attention, self.mlp = attention, mlp

    def select(self, places: Tensor) -> "_Block":
        """Return a copy for other models, see `Stacks.select`."""
        attention = {name: layer.select(places) for name, layer in self.attention.items()}
        return _Block(attention, self.mlp.select(places))


class Stacks:
    """The adapters of several models as one, for `Backbone.using`: as many rows for each model."""

    def __init__(self, architecture: Architecture, blocks: Sequence[_Block], groups: int) -> None:
        self.architecture, self.blocks, self.groups = architecture, blocks, groups

    @classmethod
    def of(cls, adapters: Sequence[Adapter], backbone: Backbone) -> "Stacks":
        """Stack adapters whose values no longer change, in the given order."""
        blocks = []
        for mlp, *adapter_blocks in zip(
            backbone.mlps, *(adapter.blocks for adapter in adapters), strict=True
        ):
            each = cast(Sequence[AdapterBlock], adapter_blocks)
            attention = {
                name: Updates.of(
                    [cast(SingleLoRA, block.attention[name]) for block in each], backbone.dtype
                )
                for name in each[0].attention
            }
            mlps = [block.mlp for block in each]
            apart = any(adapter.layout.projected for adapter in adapters)
            stack = Apart(mlps) if apart else Mixtures.of(mlps, mlp, backbone.dtype)
            blocks.append(_Block(attention, stack))
        return cls(adapters[0].architecture, blocks, len(adapters))

    def select(self, places: Tensor) -> "Stacks":
        """Return copies for several models, (groups,) int64, in any order, with repetitions."""
        blocks = [block.select(places) for block in self.blocks]
        return Stacks(self.architecture, blocks, len(places))


# arguments of a forward pass with a first dimension for rows
_OF_ROWS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


class Mixed:
    """The adapters of the parts of several groups of rows, in turn, with (groups, P) weights."""

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
