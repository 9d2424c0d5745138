"""An adapter made ready for inference: its matrices stacked, scaled and cast once, and nothing kept
for a backward pass.

One token through a small base is a matter of how many operations are started and how much is read,
not of arithmetic. So each MLP takes all its codes and router logits in one product, and all experts
together, also those with weight 0. Many tokens are sorted by the set of experts that they use: each
set is then a block of rows, on which its experts follow each other without selecting rows of wide
tensors.
"""

import copy
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.errors import ModelError
from coterie.models.adapter import Adapter, AdapterBlock
from coterie.models.architecture import family_of
from coterie.models.backbone import Backbone
from coterie.models.lora import LoRA, SingleLoRA, project
from coterie.models.mixture import Mixture
from coterie.models.mixture_kernel import Activation, FrozenMLP
from coterie.models.routing import Routing, by_experts

SAME_INPUT = (
    "q_proj",
    "k_proj",
    "v_proj",
)  # layers of an attention that are called in this order with the same tensor
FEW = 8  # tokens at once, up to which all experts together are faster
# tokens at once on a CPU: more would gain nothing in the products, and large tensors that are made
# anew are slow
MANY = 256


def base_layer(base: nn.Module, x: Tensor) -> Tensor:
    """`project`, without what calling a module costs where it is a plain layer."""
    if type(base) is nn.Linear:
        return functional.linear(x, base.weight, base.bias)
    return project(base, x)


class FastAdapter:
    """What `Backbone.using` takes, made of an adapter whose values no longer change.

    Args:
        adapter: On the backbone's device.
        backbone: The base that it will be used with. Layers of it that have the same input come to
            lie side by side in memory.
        merged: Whether the attention's updates are added to a copy of its weights, see
            `PersonalModel`.
    """

    def __init__(self, adapter: Adapter, backbone: Backbone, merged: bool = False) -> None:
        self.architecture = adapter.architecture
        family = family_of(backbone.model)
        bases = backbone.model.get_submodule(family.blocks)
        self.blocks = [
            _Block(
                cast(AdapterBlock, block),
                base.get_submodule(family.attention),
                base.mlp.frozen,
                backbone.dtype,
                merged,
            )
            for block, base in zip(adapter.blocks, bases, strict=True)
        ]


class _Block:
    """One transformer block, called as an `AdapterBlock` is."""

    def __init__(
        self,
        block: AdapterBlock,
        attention: nn.Module,
        mlp: FrozenMLP,
        dtype: torch.dtype,
        merged: bool,
    ) -> None:
        loras = {name: cast(SingleLoRA, lora) for name, lora in block.attention.items()}
        layers = {name: cast(nn.Module, getattr(attention, name).base) for name in loras}
        if merged:
            layers = {name: _merged(layer, loras[name]) for name, layer in layers.items()}
        self.attention: dict[str, _Attention | _Merged | _Part] = {
            name: _Merged(layer) if merged else _Attention(loras[name], dtype)
            for name, layer in layers.items()
        }
        together = [name for name in loras if name in SAME_INPUT]
        side_by_side = _side_by_side([layers[name] for name in together])
        if side_by_side is not None:
            several = _Several([loras[name] for name in together], *side_by_side, dtype, merged)
            self.attention |= {
                name: _Part(several, i, self.attention[name]) for i, name in enumerate(together)
            }
        self.mlp = _MLP(block.mlp, mlp, dtype)


def _diagonal(*blocks: Tensor) -> Tensor:
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found


def _side_by_side(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of several plain layers as of one, without a second copy: their own become
    parts of it. None for other layers.
    """
    if len(layers) < 2 or any(type(layer) is not nn.Linear for layer in layers):
        return None
    linears = cast(Sequence[nn.Linear], layers)
    if len({layer.bias is None for layer in linears}) > 1:
        return None
    ends = [layer.weight.data_ptr() + layer.weight.nbytes for layer in linears]
    whole = linears[0].weight.untyped_storage().data_ptr()
    if any(
        layer.weight.data_ptr() != end or layer.weight.untyped_storage().data_ptr() != whole
        for end, layer in zip(ends, linears[1:], strict=False)
    ):
        joined = torch.cat([layer.weight.detach() for layer in linears])
        for layer, part in zip(
            linears, torch.split(joined, [layer.out_features for layer in linears]), strict=True
        ):
            layer.weight.data = part
    first = linears[0].weight.detach()
    weight = first.as_strided(
        (sum(layer.out_features for layer in linears), linears[0].in_features), first.stride()
    )
    return weight, None if linears[0].bias is None else torch.cat(
        [layer.bias.detach() for layer in linears]
    )


class _Attention:
    """`SingleLoRA` with A and gamma B^T as they are used."""

    def __init__(self, lora: SingleLoRA, dtype: torch.dtype) -> None:
        self.A = lora.A.detach()[0].to(dtype)  # (r, in)
        self.B = (lora.gamma * lora.B.detach()[0].T).to(dtype).contiguous()  # (r, out)

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        tokens = x.view(-1, x.shape[-1])
        y = base_layer(base, tokens).addmm_(
            (self.A @ tokens.T).T, self.B
        )  # few rows of long codes are the quicker product
        return y.view(*x.shape[:-1], -1)


def _merged(layer: nn.Module, lora: SingleLoRA) -> nn.Module:
    """Return a copy of a layer with its update added. Raises ModelError where it has no plain
    weight.
    """
    if type(layer) is not nn.Linear and not hasattr(layer, "nf"):
        raise ModelError(
            f"a {type(layer).__name__} cannot take up an update", "Leave out merged=True."
        )
    found = copy.deepcopy(layer)
    weight = cast(nn.Parameter, found.weight)
    update = lora.gamma * lora.B.detach()[0] @ lora.A.detach()[0]  # (out, in)
    weight.data = (weight.data + (update.T if hasattr(layer, "nf") else update)).to(weight.dtype)
    return found


class _Merged:
    """A layer that has taken up its update, called as a `SingleLoRA` is."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        return base_layer(self.layer, x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _Several:
    """Layers that are called one after the other with the same input, with their updates: the
    first call computes all of them.
    """

    def __init__(
        self,
        loras: Sequence[SingleLoRA],
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        merged: bool,
    ) -> None:
        self.merged = merged
        self.weight, self.bias = weight, bias
        self.sizes = [lora.B.shape[1] for lora in loras]
        self.A = torch.cat([lora.A.detach()[0] for lora in loras]).to(dtype)  # (layers r, in)
        self.B = _diagonal(*(lora.gamma * lora.B.detach()[0].T for lora in loras)).to(
            dtype
        )  # (layers r, all out)
        self.x: Tensor | None = None
        self.parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) of one of the layers."""
        if self.x is not x or self.parts[index] is None:
            tokens = x.view(-1, x.shape[-1])
            y = functional.linear(tokens, self.weight, self.bias)
            if not self.merged:
                y.addmm_(functional.linear(tokens, self.A), self.B)
            self.x, self.parts = x, list(torch.split(y.view(*x.shape[:-1], -1), self.sizes, dim=-1))
        found = cast(Tensor, self.parts[index])
        self.parts[index] = None
        if index == len(self.sizes) - 1:  # nothing is kept between passes
            self.x, self.parts = None, []
        return found


class _Part:
    """One layer of `_Several`, called as a `SingleLoRA` is. Many tokens go through the layer
    alone: zeros would cost more than calls.
    """

    def __init__(
        self, several: _Several, index: int, alone: "_Attention | _Merged | _Part"
    ) -> None:
        self.several, self.index, self.alone = several, index, alone

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        return (
            self.several.part(self.index, x)
            if x.numel() <= FEW * x.shape[-1]
            else self.alone(x, base)
        )


class _MLP:
    """`Mixture` without a backward pass."""

    def __init__(self, mixture: Mixture, base: FrozenMLP, dtype: torch.dtype) -> None:
        self.mixture, self.layout = mixture, mixture.layout
        self.n, self.r, self.active = (
            self.layout.experts,
            self.layout.expert_rank,
            self.layout.active,
        )
        first = [experts_of(mixture, name) for name in mixture.first]
        A1 = torch.cat([A for A, _ in first]).flatten(0, 1)  # (linears n r, d)
        self.updates = len(A1)
        self.router = None if mixture.router is None else mixture.router.weight.detach()
        self.bias = (
            None
            if mixture.router is None or mixture.router.bias is None
            else mixture.router.bias.detach()
        )
        self.together = (
            self.router is not None and dtype == self.router.dtype
        )  # otherwise the router is more precise than the rest
        self.direct = (
            self.together and self.bias is None and self.active == self.n
        )  # then the weights are the softmax of the logits
        self.codes = (
            torch.cat([A1, self.router]) if self.together and self.router is not None else A1
        ).to(dtype)
        self.B1 = (
            torch.cat([mixture.gamma * B.mT for _, B in first]).to(dtype).contiguous()
        )  # (linears n, r, f)
        A2, B2 = experts_of(mixture, "down")
        self.A2 = A2.mT.to(dtype).contiguous()  # (n, f, r)
        self.B2 = (mixture.gamma * B2.mT).flatten(0, 1).to(dtype).contiguous()  # (n r, d)
        self.equal = torch.full((1, self.n), 1 / self.n, dtype=dtype, device=A2.device)
        self.side_by_side = _side_by_side(base.first)

    def __call__(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """(..., d_model) -> (..., d_model), as `Mixture.forward`."""
        tokens = x.view(-1, x.shape[-1])
        if len(tokens) == 1:
            return self._one(tokens, base, record).view_as(x)
        if len(tokens) <= FEW:
            return self._few(tokens, base, record).view_as(x)
        if (
            math.comb(self.n, self.active) * FEW <= len(tokens) and self.n < 63
        ):  # a set of experts is an int64
            return self._many(tokens, base, record).view_as(x)
        found: Tensor = self.mixture(
            x, base, record
        )  # more sets of experts than it pays to tell apart
        return found

    def _one(self, token: Tensor, base: FrozenMLP, record: list[Routing] | None) -> Tensor:
        """(1, d_model) -> (1, d_model): `_few` with as few calls as can be, since here each of
        them counts.
        """
        linears = len(base.first)
        codes = functional.linear(token, self.codes)
        p = torch.bmm(codes[:, : self.updates].view(-1, 1, self.r), self.B1).view(
            linears, self.n, -1
        )
        bases = (
            self._bases(token, base)
            if self.side_by_side is None
            else functional.linear(token, *self.side_by_side)
        )
        first, *second = p.add_(bases.view(linears, 1, -1)).unbind()
        h = base.activation.forward(first)
        if second:
            h.mul_(second[0])
        if self.n > 1:
            logits = codes[:, self.updates :]
            weights = (
                logits.softmax(dim=-1)
                if self.direct and record is None
                else self._weights(token, logits, record)[0]
            )
            h.mul_(weights.T)
        c = torch.bmm(h.unsqueeze(1), self.A2).view(1, -1)
        return base_layer(base.down, h.sum(dim=0, keepdim=True)).addmm_(c, self.B2)

    def _few(self, tokens: Tensor, base: FrozenMLP, record: list[Routing] | None) -> Tensor:
        """(T, d_model) -> (T, d_model), all experts at once."""
        count, linears = len(tokens), len(base.first)
        codes = functional.linear(tokens, self.codes)
        weights, _ = self._weights(tokens, codes[:, self.updates :], record)
        z = codes[:, : self.updates].view(count, linears * self.n, self.r).transpose(0, 1)
        p = torch.bmm(z, self.B1).view(linears, self.n, count, -1)
        p.add_(self._bases(tokens, base).view(count, linears, 1, -1).permute(1, 2, 0, 3))
        h = base.activation.forward(p[0])
        if linears == 2:
            h.mul_(p[1])
        if self.n > 1:
            h.mul_(weights.T.unsqueeze(-1))
        c = torch.bmm(h, self.A2).transpose(0, 1).reshape(count, self.n * self.r)
        return base_layer(base.down, h.sum(dim=0) if self.n > 1 else h[0]).addmm_(c, self.B2)

    def _many(self, tokens: Tensor, base: FrozenMLP, record: list[Routing] | None) -> Tensor:
        """(T, d_model) -> (T, d_model), set by set of experts."""
        weights, selected = self._weights(
            tokens, functional.linear(tokens, self.codes[self.updates :]), record
        )
        order, sets = None, [(list(range(self.n)), 0, len(tokens))]
        if selected is not None:
            order, sets = by_experts(selected)
            tokens, weights = tokens.index_select(0, order), weights.index_select(0, order)
        y = torch.empty_like(tokens)
        size = len(tokens) if tokens.is_cuda else MANY
        for begin in range(0, len(tokens), size):
            end = min(begin + size, len(tokens))
            bases = [base_layer(layer, tokens[begin:end]) for layer in base.first]
            c = tokens.new_zeros(
                (self.n * self.r, end - begin)
            )  # 0 where a token does not use the expert
            for experts, first, last in sets:
                if (first := max(first, begin)) < (last := min(last, end)):
                    x, w, rows = (
                        tokens[first:last],
                        weights[first:last],
                        slice(first - begin, last - begin),
                    )
                    self._piece(
                        experts, x, w.T, [b[rows] for b in bases], base.activation, c[:, rows]
                    )
            y[begin:end] = base_layer(base.down, bases[0]).addmm_(c.T, self.B2)
        return y if order is None else y.index_select(0, order.argsort())

    def _piece(
        self,
        experts: Sequence[int],
        x: Tensor,
        weights: Tensor,
        bases: list[Tensor],
        activation: Activation,
        c: Tensor,
    ) -> None:
        """For t tokens that use the same experts: bases (t, f) -> m in the place of the first,
        and the experts' rows of c (n r, t).
        """
        m: Tensor | None = None
        for j in experts:
            p = []
            for i, b in enumerate(bases):
                row = i * self.n + j
                z = (self.codes[row * self.r : (row + 1) * self.r] @ x.T).T
                p.append((b.addmm_ if j == experts[-1] else b.addmm)(z, self.B1[row]))
            h = activation.forward(p[0])
            if len(p) == 2:
                h.mul_(p[1])
            h.mul_(weights[j].unsqueeze(1))
            torch.mm(self.A2[j].T, h.T, out=c[j * self.r : (j + 1) * self.r])
            m = h if m is None else m.add_(h)
        bases[0].copy_(cast(Tensor, m))

    def _bases(self, tokens: Tensor, base: FrozenMLP) -> Tensor:
        """(T, linears f) the first layers of the base."""
        if self.side_by_side is not None:
            return functional.linear(tokens, *self.side_by_side)
        return (
            torch.cat([base_layer(layer, tokens) for layer in base.first], dim=-1)
            if len(base.first) > 1
            else base_layer(base.first[0], tokens)
        )

    def _weights(
        self, x: Tensor, logits: Tensor, record: list[Routing] | None
    ) -> tuple[Tensor, Tensor | None]:
        """(T, n) in the dtype of x, and the selected experts (T, k) unless it is all; the
        decision is appended to `record`.
        """
        if self.router is None:
            return self.equal.expand(len(x), self.n), None
        if not self.together:
            logits = functional.linear(x.to(self.router.dtype), self.router)
        if self.bias is not None:
            logits = logits + self.bias
        if self.active == self.n:
            weights = probabilities = logits.softmax(dim=-1)
            selected = None
        else:
            top, selected = logits.topk(self.active, dim=-1)
            weights = torch.zeros_like(logits).scatter_(1, selected, top.softmax(dim=-1))
            probabilities = weights if record is None else logits.softmax(dim=-1)
        if record is not None:
            record.append(Routing(weights, probabilities, selected))
        return weights.to(x.dtype), selected


def experts_of(mixture: Mixture, linear: str) -> tuple[Tensor, Tensor]:
    """Return a (n, r, in) and B (n, out, r) of one layer of all experts, generalists first."""
    found = [
        cast(LoRA, getattr(mixture, role)[linear])
        for role in ("generalist", "specialist")
        if hasattr(mixture, role)
    ]
    return torch.cat([lora.A.detach() for lora in found]), torch.cat(
        [lora.B.detach() for lora in found]
    )
