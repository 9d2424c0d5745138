"""The memory that a local step takes on a base, from its configuration alone.

The step itself is run on the meta device, where tensors have sizes but no values, and the largest
sum of the bytes that are alive at once is noted.
"""

import math
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count, takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.core import devices
from coterie.core.errors import ModelError
from coterie.models.adapter import Adapter
from coterie.models.architecture import Architecture, outline
from coterie.models.backbone import DTYPES, Backbone
from coterie.models.families import family_of
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.quantised import bytes_per_weight
from coterie.models.windows import ON_ACCELERATORS

PROCESS = 0.6e9  # bytes of Python and its libraries, or of an accelerator's context
SHARE = 0.85  # of the memory there is that a step may take
_MOST_ROWS = 2**20  # where memory is unknown
_COPIES = 4  # of a client's values: parameters, gradients, and two moments of an optimizer
_OF_A_LOGIT = 10  # bytes, in half and in single precision, of logits that are there at once
_SHORTEST = 64  # tokens of a window that is proposed
_FEW_BLOCKS = (1, 3)  # that are run; memory is linear in their number
_OF_A_CODE = 6  # bytes, of the steps from a code of 4 bits to its weight


@dataclass(frozen=True)
class Footprint:
    """The bytes of a local step."""

    weights: float  # of the base
    fixed: float  # of the process, the client's values and scratch space
    row: float  # of each window of a forward and backward pass

    def of(self, rows: int) -> float:
        """Return the bytes of a step with so many windows at a time."""
        return self.weights + self.fixed + rows * self.row

    def rows(self, memory: float) -> int:
        """Return how many windows fit into memory, in bytes; 0 where not one does."""
        return max(int(min((memory - self.weights - self.fixed) / self.row, _MOST_ROWS)), 0)


@dataclass(frozen=True)
class Step:
    """A local step on a base, as far as its memory depends on it."""

    base: str  # see `Backbone.load`
    context: int  # tokens of a window
    layout: Layout  # of the adapter
    dtype: str = "fp32"  # "fp32" or "bf16", of weights and computation
    quantised: str | None = None  # bits of its blocks' weights; None: as dtype says
    on_cpu: bool = True  # whether it is done on a CPU

    @lru_cache(maxsize=64)  # noqa: B019  # steps are few, and small
    def footprint(self, checkpointing: bool = False) -> Footprint:
        """Return the memory that it takes. Raises ModelError: a missing or unsupported base."""
        model = outline(self.base).to(DTYPES[self.dtype])
        weights = float(sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
        shape, size = Architecture.of(model), DTYPES[self.dtype].itemsize
        sizes = [layer.inputs * layer.outputs for layer in shape.linears]
        multiplied = 4 if self.on_cpu and not devices.has_bf16("cpu") else size  # as fp32
        scratch = 0.0 if multiplied == size else float(multiplied * max(sizes))
        if self.quantised is not None:
            weights += sum(sizes) * (bytes_per_weight(self.quantised) - size)
            scratch = max(sizes) * (_OF_A_CODE + multiplied)
        if not self.on_cpu:
            logits = min(self.context * shape.vocabulary, ON_ACCELERATORS)
            scratch += _OF_A_LOGIT * logits
        few, blocks = _FEW_BLOCKS, len(shape.blocks)
        low, high = (self._peak(model, min(some, blocks), checkpointing) for some in few)
        each = (high - low) / max(min(few[1], blocks) - min(few[0], blocks), 1)
        rest = each * (blocks - min(few[0], blocks))
        return Footprint(weights, PROCESS + self._values(shape) + scratch, low + rest)

    def checkpointing(self, rows: int, memory: float, given: bool | None = None) -> bool:
        """Return whether blocks are computed again in the backward pass: as given, or where so many
        windows at a time do not fit into memory otherwise. Raises ModelError if they never do.
        """
        if self._bound(rows) < memory:
            return bool(given)
        small = self.footprint(given is not False)
        if (fits := small.rows(memory)) < rows:
            least = rows if fits else 1
            raise ModelError(
                f"model.base: {self.base}: a step on {least} window{'s' * (least > 1)} of "
                f"{self.context} tokens takes about {small.of(least) / 1e9:.1f} GB (weights "
                f"{small.weights / 1e9:.1f}), and there are {memory / 1e9:.1f} GB for it",
                f"Set training.micro_batch: {fits}." if fits else self._remedy(memory),
            )
        return self.footprint(False).rows(memory) < rows if given is None else given

    def _bound(self, rows: int) -> float:
        """Return bytes that a step stays well below, without running it."""
        shape = Architecture.from_base(self.base)
        weights = 2 * shape.vocabulary * shape.d_model
        weights += sum(layer.inputs * layer.outputs for layer in shape.linears)
        each = 2 * self.context * sum(layer.inputs + layer.outputs for layer in shape.linears)
        values = self._values(shape)  # of which a pass makes a copy: it counts with each window
        values += rows * values // _COPIES
        return 2 * PROCESS + values + 4.0 * (2 * weights + rows * each)

    def _values(self, shape: Architecture) -> int:
        """Return the bytes of a client's values, see `_COPIES`."""
        with torch.device("meta"):
            return _COPIES * sum(p.nbytes for p in Adapter(shape, self.layout).parameters())

    def _remedy(self, memory: float) -> str:
        """Return what to set for one window to fit."""
        small = replace(self, quantised="nf4")
        changes = {"model.checkpointing: true": self, "model.quantise: nf4": small}
        for context in takewhile(_SHORTEST.__le__, (self.context >> k for k in count(1))):
            setting = f"model.quantise: nf4 and model.context: {context}"
            changes[setting] = replace(small, context=context)
        for setting, step in changes.items():
            if step.footprint(True).rows(memory):
                return f"Set {setting}, or take a smaller base."
        return "Take a smaller base, or a machine with more memory."

    def _peak(self, model: nn.Module, blocks: int, checkpointing: bool) -> int:
        """Return the bytes that a step makes on a base's first blocks, one window at a time."""
        model = deepcopy(model)
        path = family_of(model).blocks
        model.set_submodule(path, cast(nn.ModuleList, model.get_submodule(path))[:blocks])
        cast(Any, model.config).num_hidden_layers = blocks
        backbone = Backbone(model)
        backbone.attached.checkpointing = checkpointing
        for attention in backbone.attentions:  # which is also called again in the backward pass
            fused = _FusedAttention()
            attention.register_forward_pre_hook(partial(_enter, fused))
            attention.register_forward_hook(partial(_leave, fused))
        language = LanguageModel(backbone, self.layout)
        ids = torch.zeros(1, self.context + 1, dtype=torch.int64, device="meta")
        with _Peak() as peak:
            language.gradient(ids, list(language.adapter.parameters()))
        return int(peak.most)


def room(device: str | torch.device) -> float:
    """Return the bytes of a device's memory that a step may take; infinite if unknown."""
    total = devices.memory(torch.device(device)) or devices.memory_here()
    return math.inf if total is None else SHARE * total


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number of bytes of storages, made within the block, that exist at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: the compiler, whose import takes seconds, is not used."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True  # transformers asks whether each row is a single text
        result = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _enter(mode: TorchFunctionMode, *_: object) -> None:
    mode.__enter__()  # type: ignore[no-untyped-call]


def _leave(mode: TorchFunctionMode, *_: object) -> None:
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """Fused attention: it keeps its inputs, its output and a value per row of the softmax."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1]))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _FusedAttention(TorchFunctionMode):
    """Takes fused attention for PyTorch's, of which the meta device would keep all scores."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
