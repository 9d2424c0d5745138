"""Slots in a frozen base, at linears of its attention and MLPs, that call the adapter in use."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coterie.core.errors import ModelError
from coterie.models.adapter import AdapterBlock
from coterie.models.architecture import Architecture
from coterie.models.families import REMEDY, Family
from coterie.models.mixture import project
from coterie.models.mixture_kernel import Activation, FrozenMLP
from coterie.models.quantised import QuantisedLinear, rows_of
from coterie.models.routing import Routing


class Attachable(Protocol):
    """An `Adapter` or a replacement: `blocks[i]` is called like an `AdapterBlock`."""

    @property
    def architecture(self) -> Architecture:
        """The architecture that it was made for."""

    @property
    def blocks(self) -> Any:
        """The blocks from input to output."""


@dataclass
class Attached:
    """The adapter in use and the record of its decisions: the state of all slots of a backbone."""

    adapter: Attachable | None = None
    record: list[Routing] | None = None
    checkpointing: bool = False  # whether blocks are recomputed in the backward pass

    def block(self, index: int) -> AdapterBlock | None:
        return None if self.adapter is None else cast(AdapterBlock, self.adapter.blocks[index])

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record no decisions within the block: those of a recomputed one are known."""
        record, self.record = self.record, None
        try:
            yield
        finally:
            self.record = record


class _Recomputed(nn.Module):
    """A block of a base that keeps its input only, where `attached` says so, and is computed again
    in the backward pass (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
    """

    attached: Attached

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.attached.checkpointing and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        contexts = lambda: (nullcontext(), self.attached.unrecorded())  # noqa: E731
        return checkpoint(
            super().forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )


@cache
def _recomputed(kind: Any) -> Any:
    return type(kind.__name__, (_Recomputed, kind), {})


def recomputable(block: nn.Module, attached: Attached) -> None:
    """Let a block be recomputed in the backward pass, in place; its class becomes a subclass."""
    block.attached = attached  # type: ignore[assignment]  # no module
    block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]  # types are hashable


class LinearSlot(nn.Module):
    """A frozen linear of the attention with the LoRA of the adapter in use."""

    def __init__(self, base: nn.Module, attached: Attached, block: int, name: str) -> None:
        super().__init__()
        self.base, self.attached, self.block, self.name = base, attached, block, name

    def forward(self, x: Tensor) -> Tensor:
        block = self.attached.block(self.block)
        y: Tensor = self.base(x) if block is None else block.attention[self.name](x, self.base)
        return y

    # a module's own looks for hooks, which for one token of a small base is a few percent of the
    # time
    __call__ = forward


class MLPSlot(nn.Module):
    """A frozen MLP with the mixture of the adapter in use."""

    def __init__(self, base: nn.Module, frozen: FrozenMLP, attached: Attached, block: int) -> None:
        super().__init__()
        self.base, self.frozen, self.attached, self.block = base, frozen, attached, block

    def forward(self, x: Tensor) -> Tensor:
        block = self.attached.block(self.block)
        if block is None:
            return cast(Tensor, self.base(x))
        return cast(Tensor, block.mlp(x, self.frozen, self.attached.record))

    __call__ = forward  # see LinearSlot


class _Together(nn.Module):
    """Two layers with the same input, in place of one that stacked both."""

    def __init__(self, whole: nn.Linear | QuantisedLinear) -> None:
        super().__init__()
        half = whole.out_features // 2
        self.gate, self.up = rows_of(whole, slice(half)), rows_of(whole, slice(half, None))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


class _InTheBlock(nn.Module):
    """The MLP of a block that holds its layers itself (OPT)."""

    def __init__(self, up: nn.Module, activation: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = up, activation, down

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.activation(self.up(x))))


def slotted(block: nn.Module, family: Family, attached: Attached, index: int) -> FrozenMLP:
    """Give a block's MLP a slot, and return its layers."""
    owner = block.get_submodule(family.place)
    activation = _fused(cast(nn.Module, getattr(owner, family.activation)))
    setattr(owner, family.activation, activation)
    if family.fused:
        setattr(owner, family.fused, together := _Together(getattr(owner, family.fused)))
        first: tuple[nn.Module, ...] = (together.gate, together.up)
    else:
        first = tuple(
            getattr(owner, theirs) for ours, theirs in family.mlp.items() if ours != "down"
        )
    frozen = FrozenMLP(first, getattr(owner, family.mlp["down"]), Activation.of(activation))
    if family.place:
        setattr(block, family.place, MLPSlot(owner, frozen, attached, index))
    else:  # the first of the layers that the block calls in turn does everything
        whole = _InTheBlock(first[0], activation, frozen.down)
        setattr(block, family.mlp["up"], MLPSlot(whole, frozen, attached, index))
        setattr(block, family.activation, nn.Identity())
        setattr(block, family.mlp["down"], nn.Identity())
    return frozen


def _fused(activation: nn.Module) -> nn.Module:
    """Return torch's module for an activation that transformers computes slowly in Python."""
    from transformers import activations

    if isinstance(activation, (activations.NewGELUActivation, activations.GELUTanh)):
        return nn.GELU(approximate="tanh")
    if isinstance(activation, activations.GELUActivation):
        return nn.GELU()
    return nn.SiLU() if isinstance(activation, activations.SiLUActivation) else activation


@torch.no_grad()
def check_mlps(model: nn.Module, width: int) -> None:
    """Refuse a base whose MLPs compute something else than their family's. Raises ModelError."""
    like = next(model.parameters())
    x = torch.linspace(-1, 1, width, device=like.device).sin().to(like.dtype)[None, None]
    off = 1e-3 if like.dtype.itemsize >= 4 else 0.05
    for slot in (module for module in model.modules() if isinstance(module, MLPSlot)):
        expected, frozen = slot.base(x).float(), slot.frozen
        first, *second = (project(layer, x[0]) for layer in frozen.first)
        h = frozen.activation.forward(first)
        output = project(frozen.down, h * second[0] if second else h)[None].float()
        if (output - expected).norm() > off * expected.norm():
            form = "down(act(gate x) * up x)" if second else "down(act(up x))"
            problem = f"the MLP of block {slot.block} of a {type(model).__name__} is not {form}"
            raise ModelError(problem, REMEDY)
