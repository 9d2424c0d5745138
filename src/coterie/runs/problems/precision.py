"""The dtype of a base on a CPU where a recipe leaves it `auto`: bf16 if its products are faster."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from statistics import median

import torch

from coterie.core import devices
from coterie.core.errors import SaveError
from coterie.core.files import write_json
from coterie.core.foreign import json_of, read_text
from coterie.data.store import default_cache
from coterie.models.architecture import EMBEDDED, Architecture
from coterie.models.backbone import DTYPES
from coterie.runs.problems.auto import choices_before
from coterie.runs.problems.loading import pick_device
from coterie.runs.recipes.recipe import Recipe, changed
from coterie.runs.recipes.sections import LanguageSection

# weights of blocks: smaller bases stay fp32 on every CPU, so that their figures are the same
SMALL = 50_000_000
LESS = 0.75  # of fp32's time, from which on bf16 is taken: a step is not products alone
_DTYPE = "model.dtype"
_TOKENS, _REPEATS = 128, 3
_LARGEST = 2**22  # weights of a layer that is measured, which has fewer outputs otherwise
_WITHIN_S = 0.5  # after which no further layer is measured


def with_dtype(recipe: Recipe, folder: Path | None = None) -> tuple[Recipe, str]:
    """Return a recipe with bf16 in place of `auto` where this CPU computes its base so faster, and
    a line about it. Raises Refused without the base.

    Where it does not, `auto` stays, which is fp32 on CPUs. A run resumed in `folder` keeps its
    earlier choice.
    """
    section = recipe.model
    if not isinstance(section, LanguageSection) or section.dtype != "auto":
        return recipe, ""
    if (before := choices_before(recipe, folder, [_DTYPE])) is not None:
        return changed(recipe, {_DTYPE: before[_DTYPE]}), ""
    if pick_device(section.device) != "cpu" or not devices.has_bf16("cpu"):
        return recipe, ""
    if section.quantise is not None or section.base == EMBEDDED:
        return recipe, ""
    layers = Architecture.from_base(section.base).linears
    if sum(layer.inputs * layer.outputs for layer in layers) < SMALL:
        return recipe, ""
    share = _kept(Counter((layer.inputs, layer.outputs) for layer in layers))
    dtype = "bf16" if share < LESS else "fp32"
    line = f"{_DTYPE} {dtype}: here products in bf16 take {share:.2f} of their time in fp32"
    return (changed(recipe, {_DTYPE: dtype}) if dtype == "bf16" else recipe), line


def _kept(shapes: Mapping[tuple[int, int], int]) -> float:
    """Return what `measure` does, from the cache if this machine has measured these shapes."""
    about = {
        "processor": devices.processor(),
        "torch": torch.__version__,
        "shapes": sorted(shapes.items()),
    }
    key = blake2b(repr(about).encode(), digest_size=8).hexdigest()
    path = default_cache() / f"dtype-{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json_of(read_text(path))["share"])
    share = measure(shapes)
    with suppress(SaveError):  # otherwise the next run measures again
        write_json(path, {"share": share, **about})
    return share


def measure(shapes: Mapping[tuple[int, int], int]) -> float:
    """Return the time of frozen products in bf16 over that in fp32, forward and backward, of so
    many layers of (inputs, outputs). Takes about half a second.
    """
    end, seconds = time.perf_counter() + _WITHIN_S, dict.fromkeys(DTYPES, 0.0)
    for (inputs, outputs), count in shapes.items():
        works = {name: _work(inputs, outputs, dtype) for name, dtype in DTYPES.items()}
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(1 + _REPEATS):  # in turns, as the machine may be shared; first to warm up
            for name, work in works.items():
                begun = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - begun)
        for name in works:
            seconds[name] += count * median(times[name][1:])
        if time.perf_counter() > end:
            break
    return seconds["bf16"] / seconds["fp32"]


def _work(inputs: int, outputs: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return a frozen layer's two products: of its inputs, and of its outputs' gradients."""
    weight = torch.ones(max(min(outputs, _LARGEST // inputs), 1), inputs, dtype=dtype)
    x, grad = weight.new_ones(_TOKENS, inputs), weight.new_ones(_TOKENS, len(weight))
    return lambda: (x @ weight.T, grad @ weight)
