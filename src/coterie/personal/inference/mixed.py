"""Models whose predictions are mixed, computed as rows of one batch on one base.

Each row of ids is computed once for every part, by that part's adapter, and the logits of the parts
become the logarithms of the mixture's probabilities. Caches hold the rows of all parts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coterie.models.backbone import Backbone
from coterie.models.interpolation import interpolate
from coterie.models.routing import Routing
from coterie.models.slots import Attachable
from coterie.personal.inference.stacks import Stacks

# arguments of a forward pass with a first dimension for rows
_OF_ROWS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


class Mixed:
    """The adapters of all parts of several groups of rows, as many rows in each.

    Args:
        stacks: The adapters, those of a group's parts one after another.
        weights: (groups, P) float64, of each group's parts.
    """

    def __init__(self, stacks: Stacks, weights: Tensor) -> None:
        self.stacks, self.weights, self.groups = stacks, weights, len(weights)
        self.architecture, self.blocks = stacks.architecture, stacks.blocks

    def rows(self, values: Tensor) -> Tensor:
        """Return rows, (B, ...), once for each part: group by group, part by part."""
        groups, parts = self.weights.shape
        apart = values.view(groups, 1, -1, *values.shape[1:])
        return apart.expand(-1, parts, *apart.shape[2:]).flatten(0, 2)

    def cache_rows(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows in a cache of `count` texts of these texts, (B,) int64, by part."""
        groups, parts = self.weights.shape
        each = count // groups
        group, row = rows // each, rows % each
        first = self.rows(group * parts * each + row).view(groups, parts, -1)
        steps = torch.arange(parts, device=rows.device)[:, None] * each
        return (first + steps).flatten()

    def mixed(self, logits: Tensor) -> Tensor:
        """Return (B, C, V) log-probabilities of the mixtures from the parts' logits."""
        groups, parts = self.weights.shape
        by_part = logits.float().log_softmax(dim=-1).view(groups, parts, -1, *logits.shape[1:])
        weights = self.weights.to(logits.device, torch.float32)
        return torch.cat([interpolate(of, w) for of, w in zip(by_part, weights, strict=True)])


@contextmanager
def attached(
    backbone: Backbone, adapter: Attachable, record: list[Routing] | None = None
) -> Iterator[None]:
    """Attach an adapter, or several that are mixed, for forward passes of the base's model."""
    if not isinstance(adapter, Mixed):
        with backbone.using(adapter, record):
            yield
        return

    def before(_: Any, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        ids = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
        for_parts = {
            name: adapter.rows(value)
            if name in _OF_ROWS and isinstance(value, Tensor) and len(value) == len(ids)
            else value
            for name, value in inputs.items()
        }
        return tuple(adapter.rows(value) for value in args), for_parts

    def after(_: Any, args: tuple[Any, ...], output: Any) -> Any:
        output.logits = adapter.mixed(output.logits)
        return output

    with backbone.using(adapter):
        hooks = (
            backbone.model.register_forward_pre_hook(before, with_kwargs=True),
            backbone.model.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
