"""Blocks, updates and mixtures of several personal models in one forward pass."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.adapter import AdapterBlock, Architecture
from coterie.models.lora import SingleLoRA
from coterie.models.mixture import Mixture
from coterie.models.mixture_kernel import FrozenMLP
from coterie.models.routing import Routing
from coterie.personal.inference.single import MANY, SAME_INPUT, base_layer, experts_of
from coterie.personal.model import PersonalModel


class _Stacks:
    """The adapters of several models as one, what `Backbone.using` takes: consecutive rows, equally
    many for each, belong to one model.

    Args:
        architecture: What all were made for.
        blocks: From the input to the output.
    """

    def __init__(self, architecture: Architecture, blocks: Sequence["_Block"]) -> None:
        self.architecture, self.blocks = architecture, blocks

    @classmethod
    def of(cls, models: Sequence[PersonalModel]) -> "_Stacks":
        """Those of models on one backbone, in their order."""
        dtype = models[0].backbone.dtype
        blocks = zip(*(model.adapter.blocks for model in models), strict=True)
        return cls(
            models[0].adapter.architecture,
            [_Block.of(cast(Sequence[AdapterBlock], block), dtype) for block in blocks],
        )

    def select(self, places: Tensor) -> "_Stacks":
        """Return copies for other models in another order, (groups,) int64; they may repeat."""
        return _Stacks(self.architecture, [block.select(places) for block in self.blocks])


class _Block:
    """One transformer block, called as an `AdapterBlock` is.

    Args:
        loras: By layer of the attention, but for those that have the same input.
        several: These.
        mlp: The mixtures.
    """

    def __init__(
        self, loras: Mapping[str, "_LoRA"], several: "_Several | None", mlp: "_MLP"
    ) -> None:
        self.loras, self.several, self.mlp = loras, several, mlp
        self.attention: dict[str, _LoRA | _Part] = dict(loras)
        if several is not None:
            self.attention |= {name: _Part(several, name, i) for i, name in enumerate(several.B)}

    @classmethod
    def of(cls, blocks: Sequence[AdapterBlock], dtype: torch.dtype) -> "_Block":
        names = list(blocks[0].attention)
        loras = {
            name: _LoRA.of([cast(SingleLoRA, block.attention[name]) for block in blocks], dtype)
            for name in names
        }
        together = {name: loras.pop(name) for name in names if name in SAME_INPUT}
        return cls(
            loras,
            _Several.of(together) if together else None,
            _MLP.of([block.mlp for block in blocks], dtype),
        )

    def select(self, places: Tensor) -> "_Block":
        """See `_Stacks.select`."""
        several = None if self.several is None else self.several.select(places)
        return _Block(
            {name: lora.select(places) for name, lora in self.loras.items()},
            several,
            self.mlp.select(places),
        )


@dataclass(frozen=True)
class _LoRA:
    """The updates of one layer of the attention. Every matrix is read in the order in which it lies
    in memory.

    Args:
        A: (models, in, r).
        B: (models, r, out), scaled by gamma.
    """

    A: Tensor
    B: Tensor

    @classmethod
    def of(cls, loras: Sequence[SingleLoRA], dtype: torch.dtype) -> "_LoRA":
        A = _padded([lora.A.detach()[0].T.to(dtype) for lora in loras])
        return cls(A, _padded([(lora.gamma * lora.B.detach()[0].T).to(dtype) for lora in loras]))

    def select(self, places: Tensor) -> "_LoRA":
        return _LoRA(self.A.index_select(0, places), self.B.index_select(0, places))

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        return _updated(x, base, torch.bmm(x.reshape(len(self.A), -1, x.shape[-1]), self.A), self.B)


def _updated(x: Tensor, base: nn.Module, codes: Tensor, B: Tensor) -> Tensor:
    """base(x) + z B for x (..., in) and the codes z (models, t, r)."""
    y = base_layer(base, x.reshape(-1, x.shape[-1]))
    y.view(*codes.shape[:2], -1).baddbmm_(codes, B)
    return y.view(*x.shape[:-1], -1)


class _Several:
    """Layers that are called one after the other with the same input: the first call computes the
    codes of all.

    Args:
        A: (models, in, layers r).
        B: (models, r, out) by layer, in the order in which they are called.
    """

    def __init__(self, A: Tensor, B: Mapping[str, Tensor]) -> None:
        self.A, self.B = A, B
        self.x: Tensor | None = None
        self.codes: Sequence[Tensor] = ()

    @classmethod
    def of(cls, loras: Mapping[str, _LoRA]) -> "_Several":
        return cls(
            torch.cat([lora.A for lora in loras.values()], dim=-1),
            {name: lora.B for name, lora in loras.items()},
        )

    def select(self, places: Tensor) -> "_Several":
        return _Several(
            self.A.index_select(0, places),
            {name: B.index_select(0, places) for name, B in self.B.items()},
        )

    def part(self, name: str, index: int, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out) of one of the layers."""
        if self.x is not x:
            tokens = x.reshape(len(self.A), -1, x.shape[-1])
            self.x, self.codes = x, torch.bmm(tokens, self.A).chunk(len(self.B), dim=-1)
        codes = self.codes[index]
        if index == len(self.B) - 1:  # nothing is kept between passes
            self.x, self.codes = None, ()
        return _updated(x, base, codes, self.B[name])


@dataclass(frozen=True)
class _Part:
    """One layer of `_Several`, called as a `SingleLoRA` is."""

    several: _Several
    name: str
    index: int

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.several.part(self.name, self.index, x, base)


@dataclass(frozen=True)
class _MLP:
    """The mixtures of one MLP, with n experts, the most that any has.

    A model without a router has one of zeros: equal weights. A model with fewer experts has a bias
    of -inf for those that it lacks.

    Args:
        A1: (models, d, linears n r).
        B1: (linears, n, models, r, f), scaled by gamma.
        A2: (n, models, f, r).
        B2: (models, n r, d), scaled by gamma.
        router: (models, d, n), at least fp32.
        bias: (models, 1, n).
        unused: (models, 1, k) which of the k largest logits a model does not use; None where each
            uses all experts that it has.
    """

    A1: Tensor
    B1: Tensor
    A2: Tensor
    B2: Tensor
    router: Tensor
    bias: Tensor
    unused: Tensor | None

    @classmethod
    def of(cls, mixtures: Sequence[Mixture], dtype: torch.dtype) -> "_MLP":
        first = mixtures[0].first
        A1 = _padded(
            [torch.stack([experts_of(m, name)[0] for name in first]).to(dtype) for m in mixtures]
        )  # (models, linears, n, r, d)
        B1 = [
            _padded([(m.gamma * experts_of(m, name)[1].mT).to(dtype) for m in mixtures])
            for name in first
        ]  # (models, n, r, f)
        A2 = _padded([experts_of(m, "down")[0].mT.to(dtype) for m in mixtures])  # (models, n, f, r)
        B2 = _padded(
            [(m.gamma * experts_of(m, "down")[1].mT).to(dtype) for m in mixtures]
        )  # (models, n, r, d)
        return cls(
            A1.permute(0, 4, 1, 2, 3).flatten(2).contiguous(),
            torch.stack([B.transpose(0, 1) for B in B1]),
            A2.transpose(0, 1).contiguous(),
            B2.flatten(1, 2),
            *_routers(mixtures),
        )

    def select(self, places: Tensor) -> "_MLP":
        """See `_Stacks.select`."""
        A1, B2, router, bias = (
            stack.index_select(0, places) for stack in (self.A1, self.B2, self.router, self.bias)
        )
        unused = None if self.unused is None else self.unused.index_select(0, places)
        return _MLP(
            A1,
            self.B1.index_select(2, places),
            self.A2.index_select(1, places),
            B2,
            router,
            bias,
            unused,
        )

    @cached_property
    def rows(self) -> Tensor:
        """(linears, n models, r) where the rows of B1 are."""
        count = self.B1[..., 0].numel()
        return torch.arange(count, device=self.B1.device).view(len(self.B1), -1, self.B1.shape[3])

    def __call__(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """(..., d_model) -> (..., d_model), as `Mixture.forward`."""
        tokens = x.reshape(len(self.A1), -1, x.shape[-1])  # (models, t, d)
        weights, selected = self._weights(tokens, record)
        count = tokens.shape[1]
        if x.is_cuda:
            return self._piece(slice(None), tokens, weights, base).view_as(x)
        if count == 1:
            return self._single(tokens, weights, selected, base).view_as(x)
        y = torch.empty_like(tokens)
        groups, size = max(MANY // count, 1), min(count, MANY)
        for first in range(0, len(tokens), groups):
            for begin in range(0, count, size):
                some = slice(first, first + groups), slice(begin, begin + size)
                y[some] = self._piece(some[0], tokens[some], weights[some], base)
        return y.view_as(x)

    def _piece(self, models: slice, x: Tensor, weights: Tensor, base: FrozenMLP) -> Tensor:
        """(g, t, d_model) -> (g, t, d_model) for some models, whose experts take turns."""
        shape, tokens, last = x.shape[:2], x.flatten(0, 1), len(self.A2) - 1
        bases = [base_layer(layer, tokens).view(*shape, -1) for layer in base.first]
        codes = torch.bmm(x, self.A1[models]).view(*shape, len(bases), len(self.A2), -1)
        m, c = bases[0], []
        for j, A2 in enumerate(self.A2):
            p = [
                (b.baddbmm_ if j == last else b.baddbmm)(codes[:, :, i, j], self.B1[i, j, models])
                for i, b in enumerate(bases)
            ]
            h = base.activation.forward(p[0])
            if len(p) == 2:
                h.mul_(p[1])
            if last > 0:
                h.mul_(weights[..., j : j + 1])
            c.append(torch.bmm(h, A2[models]))
            m = h if j == 0 else m.add_(h)
        y = base_layer(base.down, m.flatten(0, 1)).view(*shape, -1)
        return y.baddbmm_(torch.cat(c, dim=-1), self.B2[models])

    def _single(
        self, x: Tensor, weights: Tensor, selected: Tensor | None, base: FrozenMLP
    ) -> Tensor:
        """(models, 1, d_model) -> (models, 1, d_model), one token of each. Of B1, most of what
        there is, only selected experts are read.
        """
        models, tokens, experts = len(x), x[:, 0], len(self.A2)
        codes = (
            torch.bmm(x, self.A1)
            .view(models, len(self.B1), experts, -1)
            .permute(1, 2, 0, 3)
            .flatten(1, 2)
        )  # (linears, n models, r)
        w, rows, chosen = weights[:, 0].T.reshape(-1, 1), self.rows, None
        if selected is not None:
            chosen = torch.add(
                torch.arange(models, device=x.device), selected[:, 0].T, alpha=models
            ).flatten()  # (k models,)
            codes, w, rows = (
                codes.index_select(1, chosen),
                w.index_select(0, chosen),
                rows.index_select(1, chosen),
            )
        p = functional.embedding_bag(
            rows.flatten(0, 1),
            self.B1.flatten(0, 3),
            per_sample_weights=codes.flatten(0, 1),
            mode="sum",
        )
        p = p.view(len(base.first), -1, models, p.shape[-1])  # (linears, k, models, f)
        for own, layer in zip(p, base.first, strict=True):
            own.add_(base_layer(layer, tokens))
        h = base.activation.forward(p[0])
        if len(p) == 2:
            h.mul_(p[1])
        if experts > 1:
            h.mul_(w.view(-1, models, 1))
        y = base_layer(base.down, h.sum(dim=0) if experts > 1 else h[0])
        if chosen is not None:  # zeros for the others are less than copies of A2 would be
            h = h.new_zeros(experts * models, h.shape[-1]).index_copy_(0, chosen, h.flatten(0, 1))
        c = torch.bmm(h.view(experts * models, 1, -1), self.A2.flatten(0, 1)).view(
            experts, models, -1
        )
        return y.unsqueeze(1).baddbmm_(c.transpose(0, 1).reshape(models, 1, -1), self.B2)

    def _weights(self, x: Tensor, record: list[Routing] | None) -> tuple[Tensor, Tensor | None]:
        """(models, t, n) in the dtype of x, and the selected experts (models, t, k) unless it is
        all; the decision goes to `record`.
        """
        logits = torch.baddbmm(self.bias, x.to(self.router.dtype), self.router)
        weights, selected = logits.softmax(dim=-1), None
        probabilities = weights
        if self.unused is not None:
            top, selected = logits.topk(self.unused.shape[-1], dim=-1)
            weights = torch.zeros_like(logits).scatter_(
                -1, selected, top.masked_fill_(self.unused, -math.inf).softmax(dim=-1)
            )
        if record is not None:
            record.append(
                Routing(
                    weights.flatten(0, 1),
                    probabilities.flatten(0, 1),
                    None if selected is None else selected.flatten(0, 1),
                )
            )
        return weights.to(x.dtype), selected


def _padded(values: Sequence[Tensor]) -> Tensor:
    """(models, ...) of tensors of different sizes, with zeros behind their values."""
    sizes = [max(size) for size in zip(*(value.shape for value in values), strict=True)]
    found = values[0].new_zeros((len(values), *sizes))
    for place, value in zip(found, values, strict=True):
        place[tuple(slice(size) for size in value.shape)] = value
    return found


def _routers(mixtures: Sequence[Mixture]) -> tuple[Tensor, Tensor, Tensor | None]:
    """`router`, `bias` and `unused` of `_MLP`."""
    layouts = [mixture.layout for mixture in mixtures]
    like = experts_of(mixtures[0], "down")[1]  # (n, d, r)
    found = like.new_zeros(
        (len(mixtures), like.shape[1], max(layout.experts for layout in layouts))
    )
    bias = found.new_full((len(mixtures), 1, found.shape[-1]), -math.inf)
    for weight, constant, mixture in zip(found, bias, mixtures, strict=True):
        constant[:, : mixture.layout.experts] = 0.0
        if mixture.router is not None:
            weight[:, : mixture.layout.experts] = mixture.router.weight.detach().T
            if mixture.router.bias is not None:
                constant[:, : mixture.layout.experts] = mixture.router.bias.detach()
    if all(layout.active == layout.experts for layout in layouts):
        return found, bias, None
    place = torch.arange(max(layout.active for layout in layouts), device=found.device)
    active = torch.tensor([layout.active for layout in layouts], device=found.device)
    return found, bias, place[None, None] >= active[:, None, None]
