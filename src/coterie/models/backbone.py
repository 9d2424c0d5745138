"""The frozen base model of a process, shared by all clients, to which adapters attach."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cache, cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from coterie.core import devices
from coterie.core.errors import ModelError
from coterie.core.importing import uncollected
from coterie.data.text_encoding import REMEDY, missing_row
from coterie.models import architecture as bases
from coterie.models.adapter import Adapter
from coterie.models.families import family_of
from coterie.models.layout import Layout
from coterie.models.mixture_kernel import FrozenMLP
from coterie.models.predictions import flops_of
from coterie.models.quantised import convert_products, dequantise, quantise
from coterie.models.routing import Routing
from coterie.models.slots import Attachable, Attached, LinearSlot, check_mlps, recomputable, slotted

_NAME = "sdpa-fp32"


@cache
def _precise_attention() -> str:
    """Return the name of SDPA in fp32, known to transformers from then on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, None]:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()
        y, _ = sdpa_attention_forward(module, q.float(), k.float(), v.float(), mask, **how)
        return y.to(q.dtype), None

    AttentionInterface.register(_NAME, forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    return _NAME


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# settings of a base whose logits are scaled or capped
_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def cache_name(model: nn.Module) -> str:
    """Return a base's name for the cache of earlier tokens; from transformers 5.24 on `cache`."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


class Backbone:
    """A frozen causal LM with a slot for an adapter at every attention linear and MLP.

    A Hugging Face model is frozen, put into eval mode and given slots, in place. Its tokenizer
    comes from `source`, a folder or a Hub id. `quantised` are the bits of its blocks' weights, see
    `models.quantised`, on a device; with `plain` they are kept as plain ones of the same values.
    Raises ModelError if it lacks layers that an adapter attaches to.
    """

    def __init__(
        self,
        model: nn.Module,
        source: str | None = None,
        quantised: str | None = None,
        plain: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        self.architecture = bases.Architecture.of(model)
        self.family = family = family_of(model)
        self.quantised = quantised
        if quantised is not None:
            quantise(model, family, quantised, device)
            if plain:
                dequantise(model)
        self.model: Any = model.to(device).requires_grad_(False).eval()
        self.config = cast(Any, model.config)
        if self.device.type == "cpu" and self.dtype == torch.bfloat16:
            if self.config._attn_implementation == "sdpa":
                self.config._attn_implementation = _precise_attention()
            convert_products(model.get_submodule(family.blocks))
        self.cache_name = cache_name(model)
        self._source, self.attached = source, Attached()
        self._in_use, self._flops = threading.RLock(), dict[tuple[Layout | None, int], int]()
        self.attentions: list[nn.Module] = []  # of each block, from the input to the output
        self.mlps: list[FrozenMLP] = []
        for i, block in enumerate(cast(nn.ModuleList, model.get_submodule(family.blocks))):
            attention = block.get_submodule(family.attention)
            for name in family.linears:
                linear = getattr(attention, name)
                setattr(attention, name, LinearSlot(linear, self.attached, i, name))
            self.attentions.append(attention)
            self.mlps.append(slotted(block, family, self.attached, i))
            recomputable(block, self.attached)
        if self.device.type != "meta":
            check_mlps(model, self.architecture.d_model)

    @classmethod
    def load(
        cls,
        base: str | Path,
        *,
        dtype: Literal["fp32", "bf16"] = "fp32",
        device: str | torch.device = "cpu",
        quantised: str | None = None,
        plain: bool = False,
    ) -> "Backbone":
        """Load a base, a Hub id, a local folder, or "embedded" (the small model in the package), to
        a device, in a dtype for weights and computation. On CPUs attention is in fp32, and without
        instructions for bf16 linear layers are, too. Blocks are quantised to "int8" or "nf4",
        their weights read in their stored precision; for `plain` see `Backbone`. Raises ModelError
        if the base is missing, incomplete, damaged or unsupported, or there is no such device.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if dtype not in DTYPES:
            problem = f"dtype {dtype!r} of the base is unknown"
            raise ModelError(problem, f"Allowed: {', '.join(DTYPES)}.")
        devices.check(device)
        bases.Architecture.from_base(base)  # refuses what is unsupported before weights are read
        source = bases.locate(base)
        bases.refuse_adapter(source)
        # of reading weights into memory; that of a download is another one
        logging.disable_progress_bar()
        with bases.explained(base), uncollected():
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=DTYPES[dtype] if quantised is None or dtype != "fp32" else "auto",
                output_loading_info=True,
                trust_remote_code=bases.trusted(),
                weights_only=True,
            )
        if missing := sorted(report["missing_keys"]):
            raise ModelError(
                f"base {str(base)!r}: its weights lack {missing[0]!r} ({len(missing)} tensors in "
                f"all)",
                "The files are incomplete or belong to another configuration: get the base again.",
            )
        backbone = cls(model, source, quantised, plain, device)
        for parameter in backbone.model.parameters():
            # a copy lets go of the file, of which other weights were mapped
            parameter.data = parameter.data.to(DTYPES[dtype], copy=quantised is not None)
        return backbone

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backbone":
        """Return a copy with its own modules but shared weights, for another thread."""
        memo |= {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        twin = memo[id(self)] = copy(self)
        twin._in_use = threading.RLock()
        for name in ("attached", "model", "attentions", "mlps"):
            setattr(twin, name, deepcopy(getattr(self, name), memo))
        return twin

    @property
    def nbytes(self) -> int:
        """The size of its weights in bytes."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    @classmethod
    def outlined(cls, base: str | Path) -> "Backbone":
        """Return a base without values, on the meta device, see `outline`."""
        return cls(bases.outline(base), bases.locate(base))

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.model.dtype)

    @property
    def context_limit(self) -> int:
        """The base's maximum context length in tokens."""
        return int(self.config.max_position_embeddings)

    def checked(self, ids: Tensor, predicts: bool = False) -> Tensor:
        """Return (B, C) token ids on the base's device. Raises ModelError if they are not (B, C)
        int64, or longer than the base's context.
        """
        if ids.ndim != 2 or ids.dtype != torch.int64 or not len(ids) or ids.shape[1] <= predicts:
            remedy = f"Expected int64 [rows, tokens] with at least 1 row and {1 + predicts} tokens."
            raise ModelError(f"a batch of token ids is {ids.dtype}{list(ids.shape)}", remedy)
        if ids.shape[1] - predicts > self.context_limit:
            raise ModelError(
                f"windows of {ids.shape[1] - predicts} tokens exceed the base's context of "
                f"{self.context_limit}",
                "Use a smaller context.",
            )
        return ids.to(self.device, non_blocking=True)

    def check_ids(self, ids: Tensor | Sequence[int]) -> None:
        """Refuse token ids without a row in the base's embedding. Raises ModelError."""
        largest = int(ids.max()) if isinstance(ids, Tensor) else max(ids, default=0)
        if largest >= self.architecture.vocabulary:
            problem = missing_row(self.tokenizer, largest, self.architecture.vocabulary)
            raise ModelError(problem, REMEDY)

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer, loaded on first use. Raises ModelError if it has none."""
        if self._source is None:
            problem = "this base was made in memory and has no tokenizer"
            raise ModelError(problem, "Load it from a folder or the Hub.")
        return bases.tokenizer(self._source)

    @cached_property
    def head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the output layer, unless logits are scaled or capped."""
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return None
        if self.device.type == "meta":  # without values, only the settings tell
            changed = any(getattr(self.config, name, None) for name in _OF_LOGITS)
            return None if changed else (head.weight, head.bias)
        probe = torch.arange(min(4, self.architecture.vocabulary), device=self.device)[None]
        with torch.no_grad(), self.using(None):
            logits, expected = self.logits(probe), head(self.hidden(probe))
        same = torch.allclose(logits, expected, rtol=1e-3, atol=1e-5)
        return (head.weight, head.bias) if same else None

    def hidden(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the hidden states for the output layer, (B, C, d_model), of (B, C) ids.

        Where `positions`, (B, C), restart, a new text begins that attends to itself only, see
        `check_packing`. None: each row is one text.
        """
        placed = {} if positions is None else {"position_ids": positions}
        return cast(Tensor, self.model.base_model(ids, use_cache=False, **placed).last_hidden_state)

    def logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return (B, C, V) logits of (B, C) token ids, see `hidden`."""
        placed = {} if positions is None else {"position_ids": positions}
        return cast(Tensor, self.model(ids, use_cache=False, **placed).logits)

    def check_packing(self) -> None:
        """Refuse a base in which texts of one row would see each other. Raises ModelError.

        transformers separates them by positions in its masks for eager attention, SDPA and flex
        attention; whether it does so for this base is tested once.
        """
        if not self.packs:
            problem = f"{type(self.model).__name__} does not keep conversations of one row apart"
            raise ModelError(problem, "Set data.packing: false, so that every window holds one.")

    @cached_property
    def packs(self) -> bool:
        """Whether texts of one row do not see each other, see `check_packing`."""
        size = min(self.architecture.vocabulary, 8)
        first, second = (torch.arange(n, device=self.device).remainder(size)[None] for n in (5, 7))
        positions = torch.cat([torch.arange(n, device=self.device) for n in (5, 7)])[None]
        both = torch.cat([first, second.flip(1)], dim=1)
        with torch.no_grad(), self.using(None):
            alone = self.hidden(second.flip(1)).float()
            try:
                packed = self.hidden(both, positions)[:, 5:].float()
            except TypeError:  # a base without positions
                return False
        rounding = 1e-4 if self.dtype == torch.float32 else 3e-2
        return bool((packed - alone).norm() <= rounding * alone.norm())

    def flops_per_token(self, layout: Layout | None, context: int) -> int:
        """Return the operations per token of a forward pass over `context` tokens, counted once for
        each layout of an adapter.
        """
        if (layout, context) in self._flops:
            return self._flops[layout, context]
        from torch.nn.attention import SDPBackend, sdpa_kernel

        adapter = Adapter(self.architecture, layout).to(self.device) if layout else None
        ids = torch.zeros((1, context), dtype=torch.int64, device=self.device)
        # without a mask transformers would look at values for one
        mask = torch.zeros((1, 1, context, context), dtype=self.dtype, device=self.device)
        # Of fused attention on a CPU the counter knows nothing.
        with self.using(adapter), sdpa_kernel(SDPBackend.MATH):
            flops = flops_of(lambda: self.model(ids, attention_mask=mask, use_cache=False))
        return self._flops.setdefault((layout, context), flops // context)

    @contextmanager
    def using(
        self, adapter: Attachable | None, record: list[Routing] | None = None
    ) -> Iterator[None]:
        """Attach an adapter on the backbone's device, or none, within the block, then restore what
        was attached before. `record` gets every routing decision, block by block, forward pass by
        forward pass. Other threads wait for the end of the block. Raises ModelError if the adapter
        was made for another architecture.
        """
        if adapter is not None and adapter.architecture != self.architecture:
            problem = "the adapter was made for another base model"
            raise ModelError(problem, "Load the base that its recipe names.")
        with self._in_use:
            before = self.attached.adapter, self.attached.record
            self.attached.adapter, self.attached.record = adapter, record
            try:
                yield
            finally:
                self.attached.adapter, self.attached.record = before
