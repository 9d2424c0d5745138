"""An adapter made ready for inference: its matrices stacked and cast once, and a few tokens at a time without any bookkeeping.

One token through a small base is a matter of how many operations are started, not of arithmetic. So each MLP takes all its codes and
router logits in one product, and all experts together, also those with weight 0; where there are more tokens, the mixture's own forward
pass, which computes only the experts that a token uses, is the faster one.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.adapter import Adapter, AdapterBlock
from coterie.models.architecture import family_of
from coterie.models.backbone import Backbone
from coterie.models.lora import LoRA, SingleLoRA, project
from coterie.models.mixture import FrozenMLP, Mixture
from coterie.models.routing import Routing

SAME_INPUT = ("q_proj", "k_proj", "v_proj")  # layers of an attention that are called in this order with the same tensor
FEW = 8  # tokens at once, up to which all experts together are faster


def _project(base: nn.Module, x: Tensor) -> Tensor:
    """`project`, without what calling a module costs where it is a plain layer."""
    if type(base) is nn.Linear:
        return functional.linear(x, base.weight, base.bias)
    return project(base, x)


class FastAdapter:
    """What `Backbone.using` takes, made of an adapter whose values no longer change.

    Args:
        adapter: On the backbone's device.
        backbone: The base that it will be used with. Layers of it that have the same input come to lie side by side in memory.
    """

    def __init__(self, adapter: Adapter, backbone: Backbone) -> None:
        self.architecture = adapter.architecture
        family = family_of(backbone.model)
        bases = backbone.model.get_submodule(family.blocks)
        self.blocks = [
            _Block(cast(AdapterBlock, block), base.get_submodule(family.attention), base.mlp.frozen, backbone.dtype)
            for block, base in zip(adapter.blocks, bases, strict=True)
        ]


class _Block:
    """One transformer block, called as an `AdapterBlock` is."""

    def __init__(self, block: AdapterBlock, attention: nn.Module, mlp: FrozenMLP, dtype: torch.dtype) -> None:
        loras = {name: cast(SingleLoRA, lora) for name, lora in block.attention.items()}
        self.attention: dict[str, _Attention | _Part] = {name: _Attention(lora, dtype) for name, lora in loras.items()}
        together = [name for name in loras if name in SAME_INPUT]
        side_by_side = _side_by_side([cast(nn.Module, getattr(attention, name).base) for name in together])
        if side_by_side is not None:
            several = _Several([loras[name] for name in together], *side_by_side, dtype)
            self.attention |= {name: _Part(several, i) for i, name in enumerate(together)}
        self.mlp = _MLP(block.mlp, mlp, dtype)


def _diagonal(*blocks: Tensor) -> Tensor:
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found


def _side_by_side(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of several plain layers as of one, without a second copy: their own become parts of it. None for other layers."""
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
        for layer, part in zip(linears, torch.split(joined, [layer.out_features for layer in linears]), strict=True):
            layer.weight.data = part
    first = linears[0].weight.detach()
    weight = first.as_strided((sum(layer.out_features for layer in linears), linears[0].in_features), first.stride())
    return weight, None if linears[0].bias is None else torch.cat([layer.bias.detach() for layer in linears])


class _Attention:
    """`SingleLoRA` with A and gamma B^T as they are used."""

    def __init__(self, lora: SingleLoRA, dtype: torch.dtype) -> None:
        self.A = lora.A.detach()[0].to(dtype)  # (r, in)
        self.B = (lora.gamma * lora.B.detach()[0].T).to(dtype).contiguous()  # (r, out)

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        tokens = x.view(-1, x.shape[-1])
        y = _project(base, tokens).addmm_(functional.linear(tokens, self.A), self.B)
        return y.view(*x.shape[:-1], -1)


class _Several:
    """Layers that are called one after the other with the same input, with their updates: the first call computes all of them."""

    def __init__(self, loras: Sequence[SingleLoRA], weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.bias = weight, bias
        self.sizes = [lora.B.shape[1] for lora in loras]
        self.A = torch.cat([lora.A.detach()[0] for lora in loras]).to(dtype)  # (layers r, in)
        self.B = _diagonal(*(lora.gamma * lora.B.detach()[0].T for lora in loras)).to(dtype)  # (layers r, all out)
        self.x: Tensor | None = None
        self.parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) of one of the layers."""
        if self.x is not x or self.parts[index] is None:
            tokens = x.view(-1, x.shape[-1])
            y = functional.linear(tokens, self.weight, self.bias).addmm_(functional.linear(tokens, self.A), self.B)
            self.x, self.parts = x, list(torch.split(y.view(*x.shape[:-1], -1), self.sizes, dim=-1))
        found = cast(Tensor, self.parts[index])
        self.parts[index] = None
        if index == len(self.sizes) - 1:  # nothing is kept between passes
            self.x, self.parts = None, []
        return found


class _Part:
    """One layer of `_Several`, called as a `SingleLoRA` is."""

    def __init__(self, several: _Several, index: int) -> None:
        self.several, self.index = several, index

    def __call__(self, x: Tensor, base: nn.Module) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.several.part(self.index, x)


class _MLP:
    """`Mixture` for few tokens, and the mixture itself for more."""

    def __init__(self, mixture: Mixture, base: FrozenMLP, dtype: torch.dtype) -> None:
        self.mixture, self.layout = mixture, mixture.layout
        self.n, self.r = self.layout.experts, self.layout.expert_rank
        first = [self._stack(name) for name in mixture.first]
        A1 = torch.stack([A for A, _ in first], dim=1).flatten(0, 2)  # (n linears r, d)
        self.updates = len(A1)
        self.router = None if mixture.router is None else mixture.router.weight.detach()
        self.together = self.router is not None and dtype == self.router.dtype  # otherwise the router is more precise than the rest
        self.codes = (torch.cat([A1, self.router]) if self.together and self.router is not None else A1).to(dtype)
        # (n, linears r, linears f), for each expert the blocks of its layers on the diagonal
        self.B1 = torch.stack([_diagonal(*(mixture.gamma * B[j].T for _, B in first)) for j in range(self.n)]).to(dtype)
        A2, B2 = self._stack("down")
        self.A2 = A2.mT.to(dtype).contiguous()  # (n, f, r)
        self.B2 = (mixture.gamma * B2.mT).flatten(0, 1).to(dtype).contiguous()  # (n r, d)
        self.equal = torch.full((1, self.n), 1 / self.n, dtype=dtype, device=A2.device)
        self.first = _side_by_side(base.first)

    def _stack(self, linear: str) -> tuple[Tensor, Tensor]:
        """A (n, r, in) and B (n, out, r) of one layer of all experts, generalists first."""
        found = [cast(LoRA, getattr(self.mixture, role)[linear]) for role in ("generalist", "specialist") if hasattr(self.mixture, role)]
        return torch.cat([lora.A.detach() for lora in found]), torch.cat([lora.B.detach() for lora in found])

    def __call__(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """(..., d_model) -> (..., d_model), as `Mixture.forward`."""
        tokens = x.view(-1, x.shape[-1])
        count = len(tokens)
        if count > FEW:
            found: Tensor = self.mixture(x, base, record)
            return found
        codes = functional.linear(tokens, self.codes)
        weights = self._weights(tokens, codes, record)
        z = codes[:, : self.updates].view(count, self.n, -1).transpose(0, 1)  # (n, T, linears r)
        p = torch.baddbmm(self._bases(tokens, base), z, self.B1)  # (n, T, linears f)
        if len(base.first) == 2:
            gate, up = p.chunk(2, dim=-1)
            h = base.activation.forward(gate).mul_(up)
        else:
            h = base.activation.forward(p)
        if self.n > 1:
            h.mul_(weights.T.unsqueeze(-1))
        c = torch.bmm(h, self.A2).transpose(0, 1).reshape(count, self.n * self.r)
        return _project(base.down, h.sum(dim=0) if self.n > 1 else h[0]).addmm_(c, self.B2).view_as(x)

    def _bases(self, tokens: Tensor, base: FrozenMLP) -> Tensor:
        """(T, linears f) the first layers of the base."""
        if self.first is not None:
            return functional.linear(tokens, *self.first)
        return (
            torch.cat([_project(layer, tokens) for layer in base.first], dim=-1) if len(base.first) > 1 else _project(base.first[0], tokens)
        )

    def _weights(self, x: Tensor, codes: Tensor, record: list[Routing] | None) -> Tensor:
        """(T, n) in the dtype of x; the decision is appended to `record`."""
        if self.router is None:
            return self.equal
        logits = codes[:, -self.n :] if self.together else functional.linear(x.to(self.router.dtype), self.router)
        if self.layout.active == self.n:
            weights = probabilities = logits.softmax(dim=-1)
            selected = None
        else:
            top, selected = logits.topk(self.layout.active, dim=-1)
            weights = torch.zeros_like(logits).scatter_(1, selected, top.softmax(dim=-1))
            probabilities = weights if record is None else logits.softmax(dim=-1)
        if record is not None:
            record.append(Routing(weights, probabilities, selected))
        return weights.to(x.dtype)
