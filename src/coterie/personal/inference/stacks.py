"""Adapters prepared for inference: matrices are stacked, scaled and cast once; no backward pass.

With several models each row of a batch is computed with the updates of its own model, as S-LoRA
(Sheng et al. 2024) and Punica (Chen et al. 2024) do for single LoRAs.
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from coterie.models.adapter import Adapter, AdapterBlock
from coterie.models.architecture import Architecture
from coterie.models.backbone import Backbone
from coterie.models.lora import SingleLoRA
from coterie.personal.inference.attention import Attended, Updates, attended
from coterie.personal.inference.mixtures import Mixtures


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
    """The adapters of one or several models as one, for `Backbone.using`: consecutive rows, equally
    many for each model, belong to one model.

    Args:
        architecture: The architecture that all adapters are for.
        blocks: The blocks from the input to the output.
    """

    def __init__(self, architecture: Architecture, blocks: Sequence[_Block]) -> None:
        self.architecture, self.blocks = architecture, blocks

    @classmethod
    def of(cls, adapters: Sequence[Adapter], backbone: Backbone, merged: bool = False) -> "Stacks":
        """Stack adapters whose values no longer change, in the given order.

        Args:
            adapters: The adapters, on the backbone's device.
            backbone: The base of the adapters. Its layers with the same input are moved side by
                side in memory.
            merged: Whether the attention's updates are added to a copy of the base's weights, see
                `PersonalModel`; for one adapter only.
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
            blocks.append(_Block(attended(loras, layers, backbone.dtype, merged), mixtures))
        return cls(adapters[0].architecture, blocks)

    def select(self, places: Tensor) -> "Stacks":
        """Return copies for a selection of several models, (groups,) int64, in any order and with
        repetitions.
        """
        return Stacks(self.architecture, [block.select(places) for block in self.blocks])
