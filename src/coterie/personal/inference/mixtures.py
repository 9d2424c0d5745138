"""The mixtures of one MLP, of one model or of several in one batch, without a backward pass.

The time of one token through a small base is limited by the number of operations and by memory
reads, not by arithmetic: all codes and router logits are one product, and all experts are computed
together, including those with weight 0. Many tokens are computed in parts that fit into a CPU
cache, one expert after the other. The tokens of one model are sorted by the set of experts that
they use, so that no rows of wide tensors are selected.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from coterie.models.mixture import Mixture
from coterie.models.mixture_kernel import Activation, FrozenMLP
from coterie.models.routing import Routing, by_experts, top_k_weights
from coterie.personal.inference.packing import (
    FEW,
    add_product,
    base_layer,
    experts_of,
    padded,
    product,
    routers,
    unused_of,
)

# tokens of a part on a CPU: more would not speed up the products, and allocating large tensors is
# slow
MANY = 256


@dataclass(frozen=True)
class Mixtures:
    """The mixtures of one MLP, called like a `Mixture`, with n experts, the most of any model.

    If any model has a router, a model without one gets a router of zeros: equal weights. A model
    with fewer experts gets a bias of -inf for those that it lacks.
    """

    # (models, d, linears n r), followed by n router logits if `together`; of several models
    # contiguous
    A: Tensor
    B1: Tensor  # (linears, n, models, r, f), scaled by gamma
    A2: Tensor  # (n, models, f, r)
    B2: Tensor  # (models, n r, d), scaled by gamma
    router: Tensor | None  # (models, d, n), at least fp32
    bias: Tensor | None  # (models, 1, n) of the router; None if it is 0
    active: int  # k, the number of experts of the model that uses most
    # (models, 1, k) which of the k largest logits a model does not use; None: all are used
    unused: Tensor | None
    # of a single model, for tokens with too many different sets of experts to sort
    original: Mixture | None

    @classmethod
    def of(cls, mixtures: Sequence[Mixture], base: FrozenMLP, dtype: torch.dtype) -> "Mixtures":
        """Stack the mixtures of models on one backbone, in the given order."""
        first = mixtures[0].first
        A = padded(
            [torch.stack([experts_of(m, name)[0] for name in first]).to(dtype) for m in mixtures]
        ).flatten(1, 3)  # (models, linears n r, d)
        B1 = [
            padded([(m.gamma * experts_of(m, name)[1].mT).to(dtype) for m in mixtures])
            for name in first
        ]  # (models, n, r, f)
        A2 = padded([experts_of(m, "down")[0].mT.to(dtype) for m in mixtures])  # (models, n, f, r)
        B2 = padded(
            [(m.gamma * experts_of(m, "down")[1].mT).to(dtype) for m in mixtures]
        )  # (models, n, r, d)
        router, bias = routers(mixtures)
        if router is not None and router.dtype == dtype:
            A = torch.cat([A, router.mT], dim=1)
        several = len(mixtures) > 1
        return cls(
            A.mT.contiguous() if several else A.mT,
            torch.stack([B.transpose(0, 1) for B in B1]).contiguous(),
            A2.transpose(0, 1).contiguous(),
            B2.flatten(1, 2).contiguous(),
            router if several or router is None else router.mT.contiguous().mT,
            bias,
            max(mixture.layout.active for mixture in mixtures),
            unused_of(mixtures),
            None if several else mixtures[0],
        )

    def select(self, places: Tensor) -> "Mixtures":
        """Return copies for a selection of models, (groups,) int64, in any order."""
        router, bias, unused = (
            None if stack is None else stack.index_select(0, places)
            for stack in (self.router, self.bias, self.unused)
        )
        return replace(
            self,
            A=self.A.index_select(0, places),
            B1=self.B1.index_select(2, places),
            A2=self.A2.index_select(1, places),
            B2=self.B2.index_select(0, places),
            router=router,
            bias=bias,
            unused=unused,
        )

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The numbers of linears, experts and models, and r."""
        linears, experts, models, rank, _ = self.B1.shape
        return linears, experts, models, rank

    @cached_property
    def updates(self) -> int:
        """The number of codes of a token: linears n r."""
        linears, experts, _, rank = self.shape
        return linears * experts * rank

    @cached_property
    def together(self) -> bool:
        """Whether one product computes codes and logits; otherwise the router is more precise."""
        return self.A.shape[2] > self.updates

    def __call__(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """Compute (..., d_model) -> (..., d_model), as `Mixture.forward`."""
        models = self.shape[2]
        tokens = x.reshape(models, -1, x.shape[-1])  # (models, t, d)
        count = tokens.shape[1]
        if count == 1 if models > 1 and x.device.type == "cpu" else count <= FEW and models == 1:
            return self._few(tokens, base, record).view_as(x)
        if self.original is not None and not self._sorts(count):
            return cast(Tensor, self.original(x, base, record))
        return self._many(tokens, base, record).view_as(x)

    def _sorts(self, count: int) -> bool:
        """Return whether sorting so many tokens by their set of experts pays off."""
        experts = self.shape[1]  # a set of them is an int64
        return experts < 63 and math.comb(experts, self.active) * FEW <= count

    @cached_property
    def _equal(self) -> Tensor:
        """The weights (models, 1, n) without a router."""
        _, experts, models, _ = self.shape
        bias = self.B1.new_zeros(models, 1, experts) if self.bias is None else self.bias
        return bias.softmax(dim=-1).to(self.B1.dtype)

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor]:
        """B1 and A2 for one batched product: (linears n models, r, f) and (n models, f, r)."""
        return self.B1.flatten(0, 2), self.A2.flatten(0, 1)

    @cached_property
    def _alone(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `_part_of` one: (d, linears n r), (linears, n, r, f), (n, f, r), (n r, d)."""
        return self.A[0], self.B1[:, :, 0], self.A2[:, 0], self.B2[0]

    def _part_of(self, models: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A, B1, A2 and B2 of some models."""
        return self.A[models], self.B1[:, :, models], self.A2[:, models], self.B2[models]

    def _few(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None) -> Tensor:
        """Compute (models, t, d_model) -> (models, t, d_model), all experts at once: for a few
        tokens of one model, or one token of each of several models.
        """
        linears, experts, models, rank = self.shape
        count, tokens = x.shape[1], x.flatten(0, 1)
        codes = torch.bmm(x, self.A) if models > 1 else functional.linear(tokens, self._alone[0].T)
        codes = codes.view(models, count, -1)
        weights, _ = self._weights(x, codes[..., self.updates :], record)
        z = codes[..., : self.updates].view(models, count, linears, experts, rank)
        p = torch.bmm(z.permute(2, 3, 0, 1, 4).reshape(-1, count, rank), self._flat[0])
        p = p.view(linears, experts, len(tokens), -1)  # (linears, n, models t, f)
        bases = self._bases(tokens, base).view(len(tokens), linears, 1, -1)
        p.add_(bases.permute(1, 2, 0, 3))
        h = base.activation.forward(p[0])
        if linears == 2:
            h.mul_(p[1])
        if experts > 1:
            h.mul_(weights.permute(2, 0, 1).reshape(experts, -1, 1))
        y = base_layer(base.down, h.sum(dim=0) if experts > 1 else h[0])
        c = torch.bmm(h.view(experts * models, count, -1), self._flat[1])
        if models == 1:
            return y.addmm_(c.transpose(0, 1).reshape(count, -1), self._alone[3])
        return y.unsqueeze(1).baddbmm_(
            c.view(experts, models, -1).transpose(0, 1).reshape(models, 1, -1), self.B2
        )

    def _many(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None) -> Tensor:
        """Compute (models, t, d_model) -> (models, t, d_model), part by part."""
        models, count = x.shape[:2]
        weights, selected = self._weights(x, None, record)
        order, sets = None, [(list(range(self.shape[1])), 0, count)]
        if models == 1:
            x, weights = x[0], weights[0]
            if selected is not None:
                order, sets = by_experts(selected[0])
                x, weights = x.index_select(0, order), weights.index_select(0, order)
        groups, size = max(MANY // count, 1), min(count, MANY)
        if x.device.type != "cpu":
            groups, size = models, count
        y = torch.empty_like(x)
        for first in range(0, models, groups):
            stacks = self._alone if models == 1 else self._part_of(slice(first, first + groups))
            for begin in range(0, count, size):
                some = (slice(first, first + groups), slice(begin, begin + size))[1 - x.ndim :]
                inside = [
                    (experts, max(start - begin, 0), min(end - begin, size))
                    for experts, start, end in sets
                    if start < begin + size and end > begin
                ]
                y[some] = self._part(stacks, x[some], weights[some], inside, base)
        return y if order is None else y.index_select(0, order.argsort())

    def _part(
        self,
        stacks: tuple[Tensor, Tensor, Tensor, Tensor],
        x: Tensor,
        weights: Tensor,
        sets: Sequence[tuple[Sequence[int], int, int]],
        base: FrozenMLP,
    ) -> Tensor:
        """Compute ([g,] t, d_model) -> ([g,] t, d_model) for some models, or a single one: the
        tokens of each set use the same experts, which are computed one after the other.
        """
        A, B1, A2, B2 = stacks
        tokens, shape = x.view(-1, x.shape[-1]), (*x.shape[:-1], -1)
        bases = [base_layer(layer, tokens).view(shape) for layer in base.first]
        codes = product(A.mT, x.mT)  # ([g,] linears n r, t)
        # ([g,] n r, t), 0 where a token does not use the expert
        c = x.new_zeros((*x.shape[:-2], B2.shape[-2], x.shape[-2]))
        for experts, start, end in sets:
            rows = slice(start, end)
            shares = weights[..., rows, :]
            scalings = [b[..., rows, :] for b in bases]
            self._turns(
                experts, (B1, A2), codes[..., rows], shares, scalings, c[..., rows], base.activation
            )
        y = base_layer(base.down, bases[0].view(len(tokens), -1)).view(shape)
        return add_product(y, c.mT, B2)

    def _turns(
        self,
        experts: Sequence[int],
        stacks: tuple[Tensor, Tensor],
        codes: Tensor,
        weights: Tensor,
        bases: Sequence[Tensor],
        c: Tensor,
        activation: Activation,
    ) -> None:
        """Compute t tokens that use the same experts: overwrite the first of bases ([g,] t, f) with
        the weighted hidden layers, and write the experts' rows of c ([g,] n r, t).
        """
        _, count, _, rank = self.shape
        B1, A2 = stacks
        m: Tensor | None = None
        for j in experts:
            p = []
            for i, b in enumerate(bases):
                row = (i * count + j) * rank
                z = codes[..., row : row + rank, :].mT
                p.append(add_product(b, z, B1[i, j], keep=j != experts[-1]))
            h = activation.forward(p[0])
            if len(p) == 2:
                h.mul_(p[1])
            if count > 1:
                h.mul_(weights[..., j : j + 1])
            product(A2[j].mT, h.mT, out=c[..., j * rank : (j + 1) * rank, :])
            m = h if m is None else m.add_(h)
        bases[0].copy_(cast(Tensor, m))

    def _bases(self, tokens: Tensor, base: FrozenMLP) -> Tensor:
        """Return (T, linears f), the outputs of the base's first layers."""
        first = [base_layer(layer, tokens) for layer in base.first]
        return torch.cat(first, dim=-1) if len(first) > 1 else first[0]

    def _weights(
        self, x: Tensor, logits: Tensor | None, record: list[Routing] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weights (models, t, n) in the dtype of x, and the selected experts (models, t,
        k), None for all. Append the decision to `record`. `logits` come with the codes.
        """
        if self.router is None:
            return self._equal.expand(-1, x.shape[1], -1), None
        if logits is None or not self.together:
            logits = product(x.to(self.router.dtype), self.router)
        if self.bias is not None:
            logits = logits + self.bias
        weights, selected = top_k_weights(logits, self.active, self.unused)
        if record is not None:
            flat = None if selected is None else selected.flatten(0, 1)
            record.append(Routing.of(logits.flatten(0, 1), weights.flatten(0, 1), flat))
        return weights.to(x.dtype), selected


@dataclass(frozen=True)
class Apart:
    """The mixtures of one MLP, computed model by model, as `Mixtures`: for routers that compare
    projections.
    """

    mixtures: Sequence[Mixture]

    def select(self, places: Tensor) -> "Apart":
        """See `Mixtures.select`."""
        return Apart([self.mixtures[place] for place in places.tolist()])

    def __call__(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """Compute (..., d_model) -> (..., d_model), as `Mixture.forward`."""
        parts, records = x.reshape(len(self.mixtures), -1, x.shape[-1]), list[Routing]()
        y = [mixture(t, base, records) for mixture, t in zip(self.mixtures, parts, strict=True)]
        if record is not None:
            most = max(mixture.layout.experts for mixture in self.mixtures)
            rows = [functional.pad(r.weights, (0, most - r.weights.shape[1])) for r in records]
            record.append(Routing(torch.cat(rows), torch.cat(rows), None))
        return torch.stack(y).view_as(x)
