"""The tensors of a personal model on a Llama-like base for export: the base's tensors, the factors
of each update, and the routers.
"""

from typing import cast

from torch import Tensor, nn

from coterie.models.adapter import AdapterBlock
from coterie.models.families import FAMILIES
from coterie.models.lora import LoRA
from coterie.personal import PersonalModel
from coterie.personal.inference.packing import experts_of

FAMILY = next(family for family in FAMILIES if family.name == "Llama-like")


def base_tensors(model: PersonalModel) -> dict[str, Tensor]:
    """Return the base's tensors by its own names, without the `base` of a backbone's slots."""
    state: dict[str, Tensor] = model.backbone.model.state_dict()
    return {name.replace(".base.", "."): tensor for name, tensor in state.items()}


def pair(lora: nn.Module) -> tuple[Tensor, Tensor]:
    """Return A (r, in) and B (out, r) of an update, B multiplied by the scale."""
    update = cast(LoRA, lora)
    return update.A.detach()[0], update.gamma * update.B.detach()[0]


def gate_of(block: AdapterBlock, experts: int) -> Tensor:
    """Return a router's weight, (n, d_model); zeros if all experts have the same weight."""
    router = block.mlp.router
    if router is not None:
        return router.weight.detach()
    down = experts_of(block.mlp, "down")[1]
    return down.new_zeros((experts, down.shape[1]))
