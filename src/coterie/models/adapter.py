"""The adapter: all trainable tensors of one client, and nothing else; and exact gradients of each
example of a batch by one backward pass, of its low-rank updates and routers.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from coterie.core.protocol import derive_seed
from coterie.core.roles import BACKBONE, EXPERT, Role, by_role
from coterie.core.tensors import Tensors
from coterie.models.architecture import Architecture
from coterie.models.families import BlockShape
from coterie.models.layout import Layout
from coterie.models.mixture import LoRA, Mixture, SingleLoRA, project
from coterie.models.mixture_kernel import FrozenMLP
from coterie.models.routing import RepeatedRouter, Router, Routing


class AdapterBlock(nn.Module):
    """The trainable part of a block: a LoRA per attention linear, a mixture for the MLP."""

    def __init__(self, shape: BlockShape, layout: Layout, targets: Collection[str]) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {x.name: SingleLoRA(x, layout, x.name in targets) for x in shape.attention}
        )
        self.mlp = Mixture(shape.mlp, layout, targets)


class Adapter(nn.Module):
    """All trainable tensors of one client, without any reference to the backbone. They are zero
    until `initial` is loaded.

    Names: `blocks.0.attention.q_proj.A` (1, r, in), `blocks.0.mlp.generalist.up.B` (g, out, r),
    `blocks.0.mlp.specialist.down.A` (s, r, in), `blocks.0.mlp.router.weight` (n, d_model).
    Everything is fp32.
    """

    def __init__(self, architecture: Architecture, layout: Layout) -> None:
        super().__init__()
        self.architecture, self.layout = architecture, layout
        targets, count = architecture.targets(layout), len(architecture.blocks)
        self.blocks = nn.ModuleList(
            AdapterBlock(block, layout.of_block(number, count), targets)
            for number, block in enumerate(architecture.blocks)
        )
        for router, held in zip(self.routers(), layout.held, strict=False):
            router.held = held
        self.eval()

    @cached_property
    def parameters_by_role(self) -> dict[Role, dict[str, nn.Parameter]]:
        """The parameters by role, each in the order of `named_parameters`."""
        return by_role(self)

    def loras(self, all: bool = False) -> dict[str, LoRA]:
        """Return the low-rank updates by module name: the trained ones, or those of all layers."""
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

    @torch.no_grad()
    def unrepeated(self, others: int) -> tuple[Layout, Tensors]:
        """Return layout and tensors of the same model with an ordinary router: each place of
        `Layout.repeated` becomes an expert, of which those of the specialist are copies.
        """
        layout = replace(
            self.layout,
            generalists=others,
            specialists=others + 1,
            repeated=False,
            top_k=others + 1,
        )
        router = cast(RepeatedRouter, self.routers()[0])
        part: dict[Role, Callable[[Tensor], Tensor]] = {
            Role.EXPERT: lambda stack: stack[:others],
            Role.SPECIALIST: lambda expert: expert.expand(others + 1, -1, -1),
            Role.ROUTER: router.rows,
        }
        roles = {name: role for role, named in self.parameters_by_role.items() for name in named}
        kept = dict(Adapter(self.architecture, layout).named_parameters())
        return layout, {
            name: (part[roles[name]](t) if roles[name] in part else t).clone()
            for name, t in self.named_parameters()
            if name in kept
        }

    def routers(self) -> list[Router]:
        """Return the routers of all blocks."""
        return [module for module in self.modules() if isinstance(module, Router)]

    @property
    def pools(self) -> int:
        """The number of pools whose members it has: one for each block with `projected`, else 1."""
        return len(self.blocks) if self.layout.projected else 1

    def expert_slots(self) -> list[dict[str, Tensor]]:
        """Return the slices of the stacks of each pool's blocks: the first place of each pool, the
        second, and so on.
        """
        stacks = self.parameters_by_role[EXPERT]
        count = max([len(stack) for stack in stacks.values()], default=0)
        return [
            {
                f"{place}.{name}": stack.data[place : place + 1]
                for name, stack in stacks.items()
                if int(name.split(".")[1]) % self.pools == pool
            }
            for place in range(count)
            for pool in range(self.pools)
        ]

    @property
    def trainable_parameters(self) -> int:
        """The number of trained values: all but those frozen at their initial value."""
        frozen = (BACKBONE, EXPERT) if self.layout.repeated else (BACKBONE,)
        trained = (n for role, n in self.parameters_by_role.items() if role not in frozen)
        return sum(p.numel() for named in trained for p in named.values())

    @property
    def active_parameters(self) -> int:
        """The number of values that one token uses: of an MLP's experts, those it is routed to."""
        names = self.blocks.named_parameters()
        experts = sum(p.numel() for n, p in names if ".mlp." in n and ".router." not in n)
        unused = experts * (self.layout.experts - self.layout.active) // self.layout.experts
        return sum(p.numel() for p in self.blocks.parameters()) - unused

    def initial(self, role: Role, seed: int) -> Tensors:
        """Return initial values of one role's tensors, fp32 on the CPU; for EXPERT, of ONE member.

        A and the router are Kaiming-uniform with a = sqrt 5, which is U(-1/sqrt(in), 1/sqrt(in)),
        the default of `nn.Linear`: router logits then have a standard deviation near 0.6 at any
        width, enough to break the ties of top-k and far from saturation. B and biases are zero.
        Each tensor is drawn from its own stream, named by (seed, role, name), so an adapter with
        more experts of a role starts with the same first experts.
        """
        parameters = self.parameters_by_role[role]
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


Copies = Mapping[Tensor, Tensor]  # (B, ...), each row's own copy of a parameter


def copies(parameters: Sequence[nn.Parameter], rows: int) -> dict[Tensor, Tensor]:
    """Return leaves (rows, ...) that take no memory and whose gradients are each row's."""
    return {p: p.detach().expand(rows, *p.shape).requires_grad_() for p in parameters}


@dataclass(frozen=True)
class CopiedAdapter:
    """An adapter without dropout, whose rows have copies of the parameters in `copied`."""

    adapter: Adapter
    copied: Copies

    @property
    def architecture(self) -> Architecture:
        return self.adapter.architecture

    @property
    def blocks(self) -> "list[_Block]":
        return [_Block(block, self.copied) for block in self.adapter.blocks]  # type: ignore[arg-type]  # a list of AdapterBlocks


class _Block:
    """An `AdapterBlock` of a `CopiedAdapter`."""

    def __init__(self, block: AdapterBlock, copied: Copies) -> None:
        self.attention = {
            name: partial(_attention, lora, copied)
            for name, lora in block.attention.items()
            if isinstance(lora, SingleLoRA)
        }
        self._mixture, self._copied = block.mlp, copied

    def mlp(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """Return `Mixture.forward` by autograd, all experts for all tokens.

        OPT's blocks lay the rows of a batch end to end before the MLP, (B C, d_model).
        """
        mixture, copied = self._mixture, self._copied
        if x.ndim == 2:
            rows = len(next(iter(copied.values())))
            return self.mlp(x.view(rows, -1, x.shape[1]), base, record).flatten(0, 1)
        routing = None if mixture.router is None else _routing(mixture.router, x, copied)
        if record is not None and routing is not None:
            record.append(routing)
        weights = None if routing is None else routing.weights.view(*x.shape[:2], -1).to(x.dtype)
        tokens, n = x.flatten(0, 1), mixture.layout.experts
        bases = [project(linear, tokens).view(*x.shape[:2], -1) for linear in base.first]
        m, updates = torch.zeros_like(bases[0]), torch.zeros_like(x)
        for j, loras in enumerate(_experts(mixture)):
            p = [
                b + _update(x, loras[name], copied)
                for b, name in zip(bases, mixture.first, strict=True)
            ]
            h = base.activation.forward(p[0])
            h = h * p[1] if len(p) == 2 else h
            weighted = h / n if weights is None else weights[..., j, None] * h
            m, updates = m + weighted, updates + _update(weighted, loras["down"], copied)
        return project(base.down, m.flatten(0, 1)).view_as(x) + updates


def _attention(lora: SingleLoRA, copied: Copies, x: Tensor, base: nn.Module) -> Tensor:
    """See `SingleLoRA.forward`."""
    y = project(base, x.flatten(0, -2)).view(*x.shape[:-1], -1)
    return y + _update(x, (lora, 0), copied)


def _experts(mixture: Mixture) -> list[dict[str, tuple[LoRA, int]]]:
    """Return each expert's updates by layer, generalists first: their stack and place in it."""
    counts = {"generalist": mixture.layout.generalists, "specialist": mixture.layout.specialists}
    experts = list[dict[str, tuple[LoRA, int]]]()
    for role, count in counts.items():
        loras: Any = dict(mixture.get_submodule(role).named_children()) if count else {}
        experts += [{name: (lora, i) for name, lora in loras.items()} for i in range(count)]
    return experts


def _update(x: Tensor, update: tuple[LoRA, int], copied: Copies) -> Tensor:
    """Return gamma B A x, (B, C, in) -> (B, C, out), in the dtype of x."""
    lora, place = update
    A, B = (copied[p][:, place] if p in copied else p[place] for p in (lora.A, lora.B))
    return (x @ (lora.gamma * A).to(x.dtype).mT) @ B.to(x.dtype).mT


def _routing(router: Router, x: Tensor, copied: Copies) -> Routing:
    """See `Router.forward`."""
    precise = torch.promote_types(x.dtype, torch.float32)
    weight = copied.get(router.weight, router.weight)
    logits = x.to(precise) @ weight.to(precise).mT
    if router.bias is not None:
        bias = copied[router.bias][:, None] if router.bias in copied else router.bias
        logits = logits + bias.to(precise)
    return router.decide(logits.flatten(0, 1))
