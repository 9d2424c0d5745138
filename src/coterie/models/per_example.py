"""Exact gradients of each example of a batch by one backward pass, of a language model's low-rank
updates and routers.

Every row of the batch gets a copy of each parameter that takes no memory: the same values with a
stride of zero. As rows do not interact in a transformer, the derivative by a row's copy is that
row's gradient, and a batched product computes those of all rows for the work of one product. At
rank r, a context of C tokens and layers of width d it takes r d values per row and matrix, less
than the C d that the layer keeps anyway: computing norms alone by Gram matrices of tokens ("ghost
norms": Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Li et al., "Large Language
Models Can Be Strong Differentially Private Learners", ICLR 2022), and the clipped sum by a second
backward pass, would be more work here. Memory is bounded by the number of rows taken at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from coterie.models.adapter import Adapter, AdapterBlock
from coterie.models.architecture import Architecture
from coterie.models.lora import LoRA, SingleLoRA, project
from coterie.models.mixture import Mixture
from coterie.models.mixture_kernel import FrozenMLP
from coterie.models.routing import Router, Routing

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
    stacks = [
        (mixture.get_submodule(role), place)
        for role, count in counts.items()
        for place in range(count)
    ]
    return [
        {name: (lora, place) for name, lora in stack.named_children() if isinstance(lora, LoRA)}
        for stack, place in stacks
    ]


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
        bias = (
            copied[router.bias][:, None] if router.bias in copied else router.bias
        )  # a lent one is not copied
        logits = logits + bias.to(precise)
    return router.decide(logits.flatten(0, 1))
