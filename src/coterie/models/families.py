"""Families of causal LMs that adapters attach to: which modules of a block are its layers."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from coterie.core.errors import ModelError
from coterie.core.foreign import read_text, yaml_of

_PARTS, _MOST_PARTS = re.compile(r"(num|n)_\w*(layer|expert)|\w*layers$"), 1000


@dataclass(frozen=True)
class LinearShape:
    """A frozen linear layer: its name within its part of the block, input and output width."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class BlockShape:
    """One transformer block: the linears of its attention, and of its MLP."""

    attention: tuple[LinearShape, ...]
    mlp: tuple[LinearShape, ...]  # up and down, or gate, up and down


@dataclass(frozen=True)
class Family:
    """The module names of one family of causal LMs."""

    name: str  # for messages
    blocks: str  # path of the list of blocks
    attention: str  # path of the attention within a block
    linears: Sequence[str]  # names of the attention's linears in call order
    # our name of each linear -> theirs, in our order; two may be halves of one of theirs
    mlp: dict[str, str]
    activation: str  # name of the MLP's activation
    models: str = ""  # the family's known models, for messages, if not `name`
    place: str = "mlp"  # path of the MLP within a block; "": its layers are the block's own

    @property
    def fused(self) -> str | None:
        """The name of the layer that combines gate and up, if there is one."""
        gate = self.mlp.get("gate")
        return gate if gate == self.mlp["up"] else None

    @property
    def paths(self) -> dict[str, str]:
        """The path within a block of each linear: of attention by its name, of the MLP by ours."""
        attention = {name: f"{self.attention}.{name}" for name in self.linears}
        return attention | {ours: self.within(theirs) for ours, theirs in self.mlp.items()}

    def within(self, name: str) -> str:
        """Return the path of an MLP's module within a block."""
        return f"{self.place}.{name}" if self.place else name


FAMILIES = [Family(**entry) for entry in yaml_of(read_text(Path(__file__).with_suffix(".yaml")))]
_KINDS = "; ".join(family.models or family.name for family in FAMILIES)
REMEDY = f"Use a base of one of these kinds: {_KINDS}."


def family_of(model: nn.Module) -> Family:
    """Return the family that matches a model's layers. Raises ModelError if there is none."""
    known = [f for f in FAMILIES if isinstance(find(model, f.blocks), nn.ModuleList)]
    if not known:
        paths = " nor ".join(dict.fromkeys(family.blocks for family in FAMILIES))
        raise ModelError(f"{type(model).__name__} has neither {paths}", REMEDY)
    for family in known:
        first = next(_blocks(model, family), None)
        if first is not None and not misfit(family, first):
            return family
    blocks = list(_blocks(model, known[0]))
    if not blocks:
        problem = f"{type(model).__name__} has no blocks at {known[0].blocks}"
        raise ModelError(problem, "Use a base with at least one transformer block.")
    raise ModelError(_problem(known[0], blocks[0], 0), REMEDY)


def find(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path; None if there is none."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def shape_of(family: Family, model: nn.Module) -> tuple[BlockShape, ...]:
    """Return the shapes of a model's blocks. Raises ModelError if one lacks a layer."""
    shapes = []
    for index, block in enumerate(_blocks(model, family)):
        if misfit(family, block):
            raise ModelError(_problem(family, block, index), REMEDY)
        layers = {ours: _linear(find(block, path), ours) for ours, path in family.paths.items()}
        for half in ("gate", "up") if family.fused else ():
            layers[half] = replace(layers[half], outputs=layers[half].outputs // 2)
        attention, mlp = ([layers[x] for x in names] for names in (family.linears, family.mlp))
        shapes.append(BlockShape(tuple(attention), tuple(mlp)))
    return tuple(shapes)


def misfit(family: Family, block: nn.Module) -> str:
    """Return which layer of a family a block lacks, in words; "" if none."""
    for path in family.paths.values():
        layer = find(block, path)
        if not (layer is None or isinstance(layer, nn.Linear) or is_transposed(layer)):
            return f"has at {path} a {type(layer).__name__}, not a linear layer"
        if layer is None:
            return f"lacks the layer {path}"
    path = family.within(family.activation)
    return "" if callable(find(block, path)) else f"lacks the layer {path}"


def is_transposed(layer: nn.Module | None) -> bool:
    """Whether a layer is GPT-2's Conv1D, whose weight is transposed."""
    return hasattr(layer, "nf") and hasattr(layer, "nx")


def _problem(family: Family, block: nn.Module, index: int) -> str:
    return f"block {index} ({family.blocks}.{index}) {misfit(family, block)}"


def _blocks(model: nn.Module, family: Family) -> Iterator[nn.Module]:
    return iter(cast(nn.ModuleList, find(model, family.blocks)))


def _linear(layer: nn.Module | None, name: str) -> LinearShape:
    """Return the shape of an nn.Linear, or of GPT-2's Conv1D."""
    if isinstance(layer, nn.Linear):
        return LinearShape(name, layer.in_features, layer.out_features)
    assert layer is not None
    return LinearShape(name, int(layer.nx), int(layer.nf))  # type: ignore[arg-type]  # of a Conv1D


def check_parts(settings: Mapping[str, Any], source: str) -> None:
    """Refuse more layers or experts than any base has; building them would take hours."""
    for name, value in settings.items():
        if isinstance(value, dict):
            check_parts(value, source)
        most = 10**6 if name == "num_labels" else _MOST_PARTS if _PARTS.match(name) else math.inf
        if isinstance(value, int) and value > most:
            problem = f"base {source!r}: {name} is {value:,}, at most {most:,} are made"
            raise ModelError(problem, REMEDY)
