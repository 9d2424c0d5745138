"""A base with cache and adapter as a function of tensors alone, for exporters that trace graphs.

One graph serves every client: the tensors of an adapter are inputs, of any number of experts and
any ranks. The base's own blocks are traced, through the slots that training uses, so each family
computes here what it computes there.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from coterie.export.layers import gate_of
from coterie.models.adapter import AdapterBlock
from coterie.models.architecture import Architecture
from coterie.models.backbone import Backbone
from coterie.models.mixture_kernel import FrozenMLP
from coterie.personal import PersonalModel

ACTIVE = "active"  # the name of k among a client's tensors
KEPT = "logits_to_keep"
INTEGERS = ("input_ids", KEPT, ACTIVE)  # int64 inputs
T = TypeVar("T")


def client_tensors(model: PersonalModel) -> dict[str, Tensor]:
    """Return a client's tensors by the names of the graph's inputs, fp32 but for `active`.

    `blocks.0.attention.q_proj.A` (r, in) and `.B` (r, out); `blocks.0.mlp.up.A` (n, r, in) and `.B`
    (n, r, out), of all experts, generalists first; an update is x A^T B, so B is transposed and
    holds the scale. `blocks.0.mlp.router` (n, d_model), of zeros where all experts have the same
    weight, and `.bias` (n,). `active` (1,) int64 is k.
    """
    tensors: dict[str, Tensor] = {}
    n = model.layout.experts
    for path, (A, B) in model.adapter.updates().items():
        alone = ".attention." in path
        tensors[f"{path}.A"], tensors[f"{path}.B"] = (A[0], B[0].mT) if alone else (A, B.mT)
    for i, block in enumerate(cast(Iterable[AdapterBlock], model.adapter.blocks)):
        bias = None if block.mlp.router is None else block.mlp.router.bias
        tensors[f"blocks.{i}.mlp.router"] = gate_of(block, n)
        tensors[f"blocks.{i}.mlp.bias"] = torch.zeros(n) if bias is None else bias.detach()
    tensors = {name: tensor.float().cpu().contiguous() for name, tensor in tensors.items()}
    return tensors | {ACTIVE: torch.tensor([model.layout.active])}


def _attended(A: Tensor, B: Tensor, x: Tensor, base: nn.Module) -> Tensor:
    """Return (B, C, in) -> (B, C, out) with a layer's update, called as a `SingleLoRA` is."""
    return cast(Tensor, base(x) + x @ A.mT @ B)


class _Experts:
    """The mixture of one MLP, called as a `Mixture` is: all experts for every token."""

    def __init__(self, tensors: Mapping[str, Tensor], path: str, first: Sequence[str]) -> None:
        self.tensors, self.path, self.first = tensors, path, first

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"{self.path}.{name}"]

    def _update(self, x: Tensor, name: str) -> Tensor:
        """Return the experts' updates: (1 or n, T, in) -> (n, T, out)."""
        return x @ self._tensor(f"{name}.A").mT @ self._tensor(f"{name}.B")

    def _weights(self, tokens: Tensor) -> Tensor:
        """(T, d_model) -> (n, T, 1): the softmax over the k largest logits, 0 elsewhere."""
        logits = tokens @ self._tensor("router").mT + self._tensor("bias")
        # An expert is kept if fewer than k others rank before it; of equals the first ranks first.
        # Pairs are compared because topk would fix n and k in the graph.
        logit, others = logits[:, :, None], logits[:, None, :]
        index = torch.arange(logits.shape[-1], device=logits.device)
        earlier = index[None, :] < index[:, None]
        before = (others > logit) | ((others == logit) & earlier)
        kept = before.to(torch.int64).sum(dim=-1) < self.tensors[ACTIVE]
        return logits.masked_fill(~kept, -math.inf).softmax(dim=-1).mT[:, :, None]

    def __call__(self, x: Tensor, base: FrozenMLP, record: list[Tensor] | None = None) -> Tensor:
        """(B, C, d_model) -> (B, C, d_model); the weights (T, n) are appended to `record`."""
        tokens = x.reshape(-1, x.shape[-1])
        # The base's products keep three dimensions: quantisers recognise no others.
        wide = [layer(x) for layer in base.first]
        first, *second = (
            y.reshape(1, -1, y.shape[-1]) + self._update(tokens[None], name)
            for y, name in zip(wide, self.first, strict=True)
        )
        h = base.activation.forward(first)
        weights = self._weights(tokens)
        if record is not None:
            record.append(weights[..., 0].mT)
        h = (h * second[0] if second else h) * weights
        mixed = base.down(h.sum(dim=0).view_as(wide[0]))
        return cast(Tensor, mixed + self._update(h, "down").sum(dim=0).view_as(x))


def _client(architecture: Architecture, tensors: Mapping[str, Tensor]) -> Any:
    """Return what stands for the adapter while the base is traced."""
    blocks = []
    for i, shape in enumerate(architecture.blocks):
        names = {one.name: f"blocks.{i}.attention.{one.name}" for one in shape.attention}
        attention = {
            name: partial(_attended, tensors[f"{path}.A"], tensors[f"{path}.B"])
            for name, path in names.items()
        }
        first = [linear.name for linear in shape.mlp if linear.name != "down"]
        mlp = _Experts(tensors, f"blocks.{i}.mlp", first)
        blocks.append(SimpleNamespace(attention=attention, mlp=mlp))
    return SimpleNamespace(architecture=architecture, blocks=blocks)


@dataclass(frozen=True)
class CacheShape:
    """The shapes of one layer's cache: (B, heads, P, key) and (B, heads, P, value)."""

    heads: int
    key: int
    value: int

    def zeros(self, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of zeros."""
        return (
            torch.zeros(batch, self.heads, tokens, self.key),
            torch.zeros(batch, self.heads, tokens, self.value),
        )


@torch.no_grad()
def cache_shapes(backbone: Backbone) -> list[CacheShape]:
    """Return the shapes of a base's cache, layer by layer."""
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.zeros((1, 2), dtype=torch.int64)
    backbone.model(ids, use_cache=True, **{backbone.cache_name: cache})
    return [CacheShape(k.shape[1], k.shape[-1], v.shape[-1]) for k, v in _entries(cache.layers)]


def _entries(layers: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for layer in layers:
        if layer.is_initialized:
            yield layer.keys, layer.values


class Functional(nn.Module):
    """A base, not to be used elsewhere during the trace, whose cache and adapter are arguments."""

    def __init__(self, backbone: Backbone, routing: bool = False) -> None:
        super().__init__()
        self.base, self.backbone, self.routing = backbone.model, backbone, routing

    def forward(
        self,
        input_ids: Tensor,
        logits_to_keep: Tensor,
        past: Sequence[tuple[Tensor, Tensor]],
        client: Mapping[str, Tensor],
    ) -> tuple[Any, ...]:
        """Return logits (B, K, V), keys and values of all tokens, (B, heads, P + C, width), in a
        list; and with `routing` the experts' weights, (B, K, n), the mean over all blocks: of (B,
        C) int64 ids, the (K,) int64 indices of those that get logits, the cache, (B, heads, P,
        width), and `client_tensors`.
        """
        from transformers import DynamicCache

        cache = DynamicCache(ddp_cache_data=past)
        weights: Any = []
        with self.backbone.using(_client(self.backbone.architecture, client), weights):
            output = self.base(
                input_ids,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self.backbone.cache_name: cache},
            )
        if not self.routing:
            return output.logits, [*_entries(cache.layers)]
        mean = torch.stack(weights).mean(dim=0).view(*input_ids.shape, -1)
        return output.logits, [*_entries(cache.layers)], mean[:, logits_to_keep]


Axes = list[str | int]  # the dimensions of one tensor: a name for any size, or a fixed size


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a traced base."""

    caches: list[CacheShape]  # layer by layer
    client: dict[str, Axes]  # the dimensions of a client's tensors by name
    vocabulary: int  # V
    routing: bool = False  # whether routing weights are returned too

    @classmethod
    def of(cls, model: PersonalModel, routing: bool = False) -> "Interface":
        """Return the interface of a model's base."""
        client = {name: _axes(name, value) for name, value in client_tensors(model).items()}
        vocabulary = model.backbone.architecture.vocabulary
        return cls(cache_shapes(model.backbone), client, vocabulary, routing)

    @property
    def inputs(self) -> dict[str, Axes]:
        """The dimensions of the inputs in order; the cache is named as by other exporters."""
        tokens: dict[str, Axes] = {"input_ids": ["batch", "tokens"], KEPT: ["kept"]}
        return tokens | self._cache("past_key_values", "past") | self.client

    @property
    def outputs(self) -> dict[str, Axes]:
        """The dimensions of the outputs in order."""
        logits: dict[str, Axes] = {"logits": ["batch", "kept", self.vocabulary]}
        weights: dict[str, Axes] = {"routing": ["batch", "kept", "experts"]}
        return logits | self._cache("present", "past + tokens") | (weights if self.routing else {})

    def _cache(self, prefix: str, tokens: str) -> dict[str, Axes]:
        return {
            f"{prefix}.{i}.{what}": ["batch", shape.heads, tokens, width]
            for i, shape in enumerate(self.caches)
            for what, width in (("key", shape.key), ("value", shape.value))
        }

    def arguments(self, values: Sequence[T]) -> tuple[T, T, list[tuple[T, T]], dict[str, T]]:
        """Group one value for each input, in order, as `Functional` takes them."""
        ids, kept, *others = values
        cached = 2 * len(self.caches)
        past = list(zip(others[:cached:2], others[1:cached:2], strict=True))
        return ids, kept, past, dict(zip(self.client, others[cached:], strict=True))

    def described(self) -> dict[str, Any]:
        """Return the inputs and the outputs for export.json."""
        return {
            kind: {
                name: {"dtype": "int64" if name in INTEGERS else "float32", "shape": axes}
                for name, axes in tensors.items()
            }
            for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs))
        }


def _axes(name: str, tensor: Tensor) -> Axes:
    if name == ACTIVE:
        return [1]
    if ".attention." in name:
        return ["rank", tensor.shape[1]]
    ranks: Axes = ["expert_rank"] if tensor.ndim == 3 else []
    widths: Axes = [tensor.shape[-1]] if tensor.ndim > 1 else []
    return ["experts", *ranks, *widths]


# the sizes of the traced example: the tracer takes sizes of 0 and 1 for constants
_SIZES = {"batch": 2, "tokens": 3, "kept": 2, "past": 5, "experts": 3, "rank": 4, "expert_rank": 6}


@torch.no_grad()
def traced(model: PersonalModel, interface: Interface) -> torch.export.ExportedProgram:
    """Trace the base of a model. Named dimensions of the interface may have any size."""
    examples: list[Tensor] = []
    dims: list[dict[int, Any]] = []
    for name, axes in interface.inputs.items():
        shape = [_SIZES[axis] if isinstance(axis, str) else axis for axis in axes]
        dtype = torch.int64 if name in INTEGERS else torch.float32
        examples.append(torch.ones(shape, dtype=dtype))
        named = [i for i, axis in enumerate(axes) if isinstance(axis, str)]
        dims.append(dict.fromkeys(named, torch.export.Dim.DYNAMIC))
    return torch.export.export(
        Functional(model.backbone, interface.routing),
        interface.arguments(examples),
        dynamic_shapes=interface.arguments(dims),
        strict=False,
    )
