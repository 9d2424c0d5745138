"""Values of fields that are `auto`, chosen from the base, the clients' training text and this
machine before anything starts; the dtype of a base on a CPU is bf16 if its products are faster
there.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from coterie.core import devices
from coterie.core.errors import RecipeError, SaveError
from coterie.core.files import write_json
from coterie.core.foreign import json_of, read_text
from coterie.data.chats.splits import ChatSplit
from coterie.data.section import Section
from coterie.data.splits import Tokens, TokenSplit
from coterie.data.store import default_cache
from coterie.data.text_streams import RunningText
from coterie.models.architecture import EMBEDDED, Architecture, configuration, tokenizer
from coterie.models.backbone import DTYPES
from coterie.models.memory import Step, room
from coterie.runs import recipes
from coterie.runs.problems.language import memory_step, pick_dtype
from coterie.runs.problems.loading import pick_device
from coterie.runs.recipes import dotted
from coterie.runs.recipes.dotted import BATCH, CONTEXT, LR, MICRO_BATCH, ROWS, STEPS
from coterie.runs.recipes.recipe import Recipe, changed
from coterie.runs.recipes.sections import LanguageSection

EPOCHS = 3.0  # of a client's text, about as many as CoMiGS trains for (its 500 iterations are 3.4)
ROUNDS = 10  # with as many epochs
FEWEST, MOST = 50, 1000  # local iterations in as many rounds
ENOUGH = 100  # of them, for which batches are made smaller
SHORTEST, LONGEST, LEAST = 64, 1024, 16  # tokens of a window; at least, where a split is short
LARGEST_BATCH, SMALLEST_BATCH = 8, 2
WHOLE = 0.95  # of conversations that fit into a window
LEAST_LR, MOST_LR = 2e-4, 8e-3
# rows of valid and of test for each row of training: at 0.4 of the time of its step, both take a
# fifth of a round
SCORED, FEWEST_SCORED = 0.3, 4
# of texts that nobody here has
UNSEEN = {CONTEXT: 128, BATCH: 8, MICRO_BATCH: None, STEPS: 10, ROWS: 24}


@dataclass(frozen=True)
class Texts:
    """The amount of clients' text, in tokens."""

    train: Sequence[int]  # of the training text of each client
    shortest: int  # of the shortest split of any client
    # the document with the middle token of all training text; of separate conversations and
    # documents, the 95 % quantile
    document: int

    @property
    def mean(self) -> float:
        return sum(self.train) / len(self.train)


def learning_rate(base: str) -> tuple[float, str]:
    """Return the experts' peak learning rate for a base, and why. Raises ModelError without the
    base.

    It is 10 * 5e-5 * (2000 / width)^0.781, between 2e-4 and 8e-3: ten times that of full
    fine-tuning, decreasing with the width (Schulman et al., "LoRA Without Regret", 2025, and the
    exponent for Llama of tinker-cookbook's `get_lr`); 2e-4 is used by LoRA's authors (Hu et al.,
    2021, Table 11) and most libraries. At widths of 64 and 256 it was measured, see
    docs/own-text.md.
    """
    width = Architecture.from_base(base).d_model
    rate = 10 * 5e-5 * (2000 / width) ** 0.781
    return float(f"{min(max(rate, LEAST_LR), MOST_LR):.2g}"), f"a base of width {width:,}"


def context_of(texts: Texts, limit: int) -> tuple[int, str]:
    """Return the window length, a power of two, and why: that of documents, bounded by the base's
    limit, 1,024 tokens, and the shortest split.
    """
    enough = 1 << max(texts.document - 1, 0).bit_length()  # a power of two, at least the document
    most = min(limit, LONGEST)
    room = max(_power_below(texts.shortest - 1), LEAST)
    context = max(min(max(enough, SHORTEST), most, room), 2)
    if context == room < enough:
        return context, f"the shortest split has {texts.shortest:,} tokens"
    if context == most < enough:
        return context, "the most" if context < limit else "the longest context of the base"
    return context, f"documents of about {texts.document:,} tokens"


def batch_of(texts: Texts, context: int) -> tuple[int, str]:
    """Return windows per batch, and why: up to 8, if three epochs then are 100 iterations."""
    fits = EPOCHS * texts.mean / (context * ENOUGH)
    batch = min(max(_power_below(int(fits)), SMALLEST_BATCH), LARGEST_BATCH)
    return batch, f"{texts.mean:,.0f} tokens a client"


def steps_of(
    texts: Texts, context: int, batch: int, rounds: int, most: str = ""
) -> tuple[int, str]:
    """Return local iterations per round, and why: ten rounds are three epochs of the mean client,
    within bounds. `most` is "at most " where training may end before the last round. Every client
    does as many, so that clients stay comparable: those with less text see it more often, and
    `keep: best` ends that when their validation data say so.
    """
    iterations = EPOCHS * texts.mean / (context * batch)
    steps = math.ceil(min(max(iterations, FEWEST), MOST) / ROUNDS)
    epoch = context * batch / texts.mean  # of one iteration
    few = "" if iterations >= FEWEST else "the fewest, as there is little text: "
    return steps, (
        f"{few}{steps * ROUNDS * epoch:.1f} epochs of {texts.mean:,.0f} tokens a client in "
        f"{ROUNDS} rounds, {most}{steps * rounds * epoch:.1f} in {rounds}"
    )


def rows_that_fit(step: Step, memory: float, checkpointing: bool | None = None) -> int:
    """Return about how many windows at a time fit into memory (bytes) in a training step, at least
    one; with blocks computed again if they are to be, or none fits otherwise.
    """
    rows = step.footprint(bool(checkpointing)).rows(memory)
    if not rows and checkpointing is None:
        rows = step.footprint(True).rows(memory)
    return max(rows, 1)


def rows_of(steps: int, batch: int, every: int) -> tuple[int, str]:
    """Return the rows of each set that are scored between rounds, and why."""
    rows = max(math.ceil(SCORED * steps * batch * max(every, 1)), FEWEST_SCORED)
    return rows, "scoring takes a fifth of a round; at the end everything is scored"


def texts_of(recipe: Recipe) -> Texts:
    """Measure the texts of a recipe, encoded by its base's tokenizer. Raises Refused."""
    assert isinstance(recipe.data, Section)
    encoder = tokenizer(recipe.model.base)  # type: ignore[union-attr] # `_language` has looked
    context = 2 if isinstance(recipe.data.encoder(encoder), RunningText) else LONGEST
    federation = recipe.data.load(encoder, context, order_seed=recipe.seed)
    splits = [data.splits for data in federation.clients.values()]
    train = [split for split, *_ in splits]
    if separate := [split for split in train if isinstance(split, ChatSplit)]:
        lengths = np.sort(np.concatenate([split.lengths for split in separate]))
        fitting = int(lengths[int(WHOLE * (len(lengths) - 1))])
        return Texts(list(map(len, train)), LONGEST + 1, fitting)
    streams = [split.tokens for split in train if isinstance(split, TokenSplit)]
    return Texts(
        [len(stream) for stream in streams],
        min(len(split) for of_client in splits for split in of_client),
        _middle_document(streams, encoder.eos_token_id),
    )


def _middle_document(streams: Sequence[Tokens], end: int | None) -> int:
    """Return the length of the document that contains the middle one of all tokens."""
    lengths: list[int] = []
    for stream in streams:
        ends = np.flatnonzero(np.asarray(stream) == end) if end is not None else np.empty(0, int)
        lengths += np.diff([-1, *ends.tolist(), len(stream) - 1]).tolist()
    ordered = np.sort([length for length in lengths if length > 0])
    return int(ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)])


def _power_below(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)


def resolved(
    recipe: Recipe, folder: Path | None = None, *, devices: bool = False
) -> tuple[Recipe, str]:
    """Return a recipe with a value for each `auto` field, and a line about them. Raises Refused if
    base or data cannot be used. A run resumed in `folder` keeps its earlier choices. If texts are
    on `devices`, the learning rate is chosen by the base, and all else are fixed values.
    """
    if before := choices_before(folder, recipe.auto):
        left = [key for key in recipe.auto if key not in before]
        recipe = changed(recipe, before | {"auto": left})
    if not recipe.auto:
        return recipe, ""
    section, choices = _language(recipe), dict[str, tuple[Any, str]]()
    if LR in recipe.auto:
        choices[LR] = learning_rate(section.base)
    if devices:
        keys = set(recipe.auto) - ({ROWS} if recipe.keep != "best" else set())
        fixed = {key: value for key, value in UNSEEN.items() if key in keys}
        choices = {key: (value, "the text is on devices") for key, value in fixed.items()} | choices
    else:
        _choose_by_text(recipe, section, choices)
    values = {key: value for key, (value, _) in choices.items()}
    parts = [f"{key} {v:g} ({why})" for key, (v, why) in choices.items() if v is not None]
    line = f"chosen: {', '.join(parts)}" if parts else ""
    return changed(recipe, values | {"auto": []}), line


def _choose_by_text(
    recipe: Recipe, section: LanguageSection, choices: dict[str, tuple[Any, str]]
) -> None:
    """Add the values that depend on the clients' texts and on this machine. Raises Refused."""
    rounds, given = recipe.build_method().rounds, recipe.model_dump(mode="json")
    texts, device = texts_of(recipe), pick_device(section.device)

    def value(key: str, choice: tuple[Any, str]) -> Any:
        if key not in recipe.auto:
            return dotted.value_at(given, key)
        choices[key] = choice
        return choice[0]

    limit = int(configuration(section.base).max_position_embeddings)
    context = value(CONTEXT, context_of(texts, limit))
    batch = value(BATCH, batch_of(texts, context))
    step = memory_step(section, pick_dtype(section.dtype, device), device, context)
    rows = rows_that_fit(step, room(device), section.checkpointing)
    fits, part = (None, "it fits"), (_power_below(rows), "limited by memory")
    value(MICRO_BATCH, fits if rows >= batch else part)
    steps = None
    if rounds and not recipe.method.get("local_epochs"):
        most = "at most " if recipe.limit else ""
        steps = value(STEPS, steps_of(texts, context, batch, rounds, most))
    if rounds and recipe.keep == "best":
        value(ROWS, rows_of(steps or FEWEST, batch, recipe.evaluate_every))


def _language(recipe: Recipe) -> LanguageSection:
    """Return the model section of a recipe of texts. Raises RecipeError for others."""
    if not isinstance(recipe.model, LanguageSection):
        problem = f"{recipe.auto[0]}: auto is for language models only; give a number"
        raise RecipeError(f"recipe {recipe.name}", [problem])
    return recipe.model


def choices_before(folder: Path | None, keys: Sequence[str]) -> dict[str, Any]:
    """Return what a run in a folder chose for these fields, as far as its rows that have begun have
    them: {} before any has.
    """
    paths = [] if folder is None else [folder / "recipe.yaml", *folder.glob("*/*/recipe.yaml")]
    chosen: dict[str, Any] = {}
    for path in filter(Path.is_file, sorted(paths, key=lambda p: (-len(p.parts), p))):
        row = recipes.read(path)
        values = {key: dotted.value_at(row, key, ...) for key in keys}
        chosen |= {key: value for key, value in values.items() if value is not ...}
    return chosen


# weights of blocks: smaller bases stay fp32 on every CPU, so that their figures are the same
SMALL = 50_000_000
LESS = 0.75  # of fp32's time, from which on bf16 is taken: a step is not products alone
_DTYPE = "model.dtype"
_TOKENS, _REPEATS = 128, 3
_LARGEST = 2**22  # weights of a layer that is measured, which has fewer outputs otherwise


def with_dtype(recipe: Recipe, folder: Path | None = None) -> tuple[Recipe, str]:
    """Return a recipe with bf16 in place of `auto` where this CPU computes its base so faster, fp32
    where it was measured and does not, and a line about it. Raises Refused without the base. A run
    resumed in `folder` keeps its earlier choice.
    """
    section = recipe.model
    if not isinstance(section, LanguageSection) or section.dtype != "auto":
        return recipe, ""
    if before := choices_before(folder, [_DTYPE]):
        return changed(recipe, before), ""
    able = pick_device(section.device) == "cpu" and devices.has_bf16("cpu")
    if not able or section.quantise is not None or section.base == EMBEDDED:
        return recipe, ""
    layers = Architecture.from_base(section.base).linears
    if sum(layer.inputs * layer.outputs for layer in layers) < SMALL:
        return recipe, ""
    share = _kept(*max((layer.inputs * layer.outputs, layer.inputs) for layer in layers))
    dtype = "bf16" if share < LESS else "fp32"
    line = f"{_DTYPE} {dtype}: here products in bf16 take {share:.2f} of their time in fp32"
    return changed(recipe, {_DTYPE: dtype}), line


def _kept(*layer: int) -> float:
    """Return what `measure` does, from the cache if this machine has measured such a layer."""
    about = {"processor": devices.processor(), "torch": torch.__version__, "layer": layer}
    key = blake2b(repr(about).encode(), digest_size=8).hexdigest()
    path = default_cache() / f"dtype-{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json_of(read_text(path))["share"])
    share = measure(*layer)
    with suppress(SaveError):  # otherwise the next run measures again
        write_json(path, {"share": share, **about})
    return share


def measure(weights: int, inputs: int) -> float:
    """Return the time of a frozen layer's products in bf16 over that in fp32: of its inputs, and of
    its outputs' gradients.
    """
    times: dict[str, list[float]] = {name: [] for name in DTYPES}
    for _ in range(1 + _REPEATS):  # in turns, as the machine may be shared; first to warm up
        for name, dtype in DTYPES.items():
            weight = torch.ones(max(min(weights, _LARGEST) // inputs, 1), inputs, dtype=dtype)
            x, grad = weight.new_ones(_TOKENS, inputs), weight.new_ones(_TOKENS, len(weight))
            begun = time.perf_counter()
            _ = x @ weight.T, grad @ weight
            times[name].append(time.perf_counter() - begun)
    return median(times["bf16"][1:]) / median(times["fp32"][1:])
