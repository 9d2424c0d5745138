"""The adapter: all trainable tensors of one client, and nothing else."""

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from coterie.core.protocol import derive_seed
from coterie.core.roles import BACKBONE, EXPERT, Role, by_role
from coterie.core.tensors import Tensors
from coterie.models.architecture import Architecture
from coterie.models.families import BlockShape
from coterie.models.layout import Layout
from coterie.models.lora import LoRA, SingleLoRA
from coterie.models.mixture import Mixture
from coterie.models.routing import Gate, Router


class AdapterBlock(nn.Module):
    """The trainable part of a block: a LoRA per attention linear, a mixture for the MLP."""

    def __init__(self, shape: BlockShape, layout: Layout, targets: Collection[str]) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {
                linear.name: SingleLoRA(
                    linear.inputs, linear.outputs, layout, linear.name in targets
                )
                for linear in shape.attention
            }
        )
        self.mlp = Mixture(shape.mlp, layout, targets)


class Adapter(nn.Module):
    """All trainable tensors of one client, without any reference to the backbone. They are zero
    until `initial` is loaded.

    Names: `blocks.0.attention.q_proj.A` (1, r, in), `blocks.0.mlp.generalist.up.B` (g, out, r),
    `blocks.0.mlp.specialist.down.A` (s, r, in), `blocks.0.mlp.router.weight` (n, d_model),
    `gate.first` (64, d_model). Everything is fp32.
    """

    def __init__(self, architecture: Architecture, layout: Layout) -> None:
        super().__init__()
        self.architecture, self.layout = architecture, layout
        targets, count = architecture.targets(layout), len(architecture.blocks)
        self.blocks = nn.ModuleList(
            AdapterBlock(block, layout.of_block(number, count), targets)
            for number, block in enumerate(architecture.blocks)
        )
        self.gate = (
            Gate(architecture.blocks[0].mlp.width, layout.members) if layout.members else None
        )
        self.eval()

    def parameters_by_role(self) -> dict[Role, dict[str, nn.Parameter]]:
        """Return the parameters by role, each in the order of `named_parameters`."""
        return by_role(self)

    def loras(self, all: bool = False) -> dict[str, LoRA]:
        """Return the low-rank updates by module name: those that are trained, or also those of
        layers that are no targets.
        """
        modules = self.named_modules()
        return {name: m for name, m in modules if isinstance(m, LoRA) and (all or m.target)}

    def updates(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A (n, r, in) and gamma B (n, out, r) of each layer, such as `blocks.0.mlp.up`: of
        all experts, generalists first; in the attention n is 1.
        """
        updates: dict[str, tuple[Tensor, Tensor]] = {}
        for path, lora in self.loras(all=True).items():
            layer = path.replace(".generalist", "").replace(".specialist", "")
            A, B = lora.A.detach(), lora.gamma * lora.B.detach()
            if layer in updates:
                A, B = (torch.cat(two) for two in zip(updates[layer], (A, B), strict=True))
            updates[layer] = A, B
        return updates

    @torch.no_grad()
    def whole(self) -> tuple[Layout, Tensors]:
        """Return layout and tensors of the same model without frozen sums, exact in fp32: LoRAs of
        the rank that this needs. The adapter has one expert.
        """
        pairs, ranks = {path: lora.whole() for path, lora in self.loras().items()}, [1, 1]
        for path, (A, _) in pairs.items():
            ranks[".mlp." in path] = max(ranks[".mlp." in path], A.shape[1])
        layout = replace(self.layout, frozen_sum=False, rank=ranks[0], mlp_rank=ranks[1])
        tensors = Tensors()
        for path, (A, B) in pairs.items():
            rank = ranks[".mlp." in path]
            missing = rank - A.shape[1]
            tensors[f"{path}.A"] = pad(A, (0, 0, 0, missing))
            tensors[f"{path}.B"] = pad(B, (0, missing)) / layout.gamma(rank)
        return layout, tensors

    def routers(self) -> list[Router]:
        """Return the routers of all blocks."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def expert_slots(self) -> list[dict[str, Tensor]]:
        """Return, for each generalist of a pool, its slices of the stacks of all blocks."""
        stacks = self.parameters_by_role()[EXPERT]
        count = self.layout.generalists if stacks else 0
        return [
            {f"{place}.{name}": stack.data[place : place + 1] for name, stack in stacks.items()}
            for place in range(count)
        ]

    @property
    def trainable_parameters(self) -> int:
        """The number of trained values: all but those frozen at their initial value."""
        by_role = self.parameters_by_role()
        trained = [named for role, named in by_role.items() if role is not BACKBONE]
        return sum(p.numel() for named in trained for p in named.values())

    @property
    def active_parameters(self) -> int:
        """The number of values that one token uses: of an MLP's experts, those it is routed to."""
        mixtures = [module for module in self.modules() if isinstance(module, Mixture)]
        parts = chain.from_iterable(mixture.modules() for mixture in mixtures)
        loras = [part for part in parts if isinstance(part, LoRA)]
        experts = sum(p.numel() for lora in loras for p in lora.parameters())
        unused = experts * (self.layout.experts - self.layout.active) // self.layout.experts
        return sum(p.numel() for p in self.blocks.parameters()) - unused

    def initial(self, role: Role, seed: int) -> Tensors:
        """Return initial values of the tensors of one role, fp32 on the CPU; for EXPERT, of ONE
        member of a pool.

        A and the router are Kaiming-uniform with a = sqrt 5, which is U(-1/sqrt(in), 1/sqrt(in)),
        the default of `nn.Linear`: router logits then have a standard deviation near 0.6 at any
        width, enough to break the ties of top-k and far from saturation. B and biases are zero.
        Each tensor is drawn from its own stream, named by (seed, role, name), so an adapter with
        more experts of a role starts with the same first experts.
        """
        parameters = self.parameters_by_role()[role]
        return {
            name: _initial(name, p[:1] if role is EXPERT else p, derive_seed(seed, role, name))
            for name, p in parameters.items()
        }


def _initial(name: str, parameter: Tensor, seed: int) -> Tensor:
    values = torch.zeros(parameter.shape)
    if name.rpartition(".")[2] in ("B", "W", "bias"):
        return values
    bound = 1 / math.sqrt(parameter.shape[-1])
    return values.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
