"""Settings with which a comparison ends in the time that one has."""

import time
from bisect import bisect_right
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from coterie.core.errors import Refused
from coterie.methods import Method
from coterie.runs.estimate import Speed, estimates, share_of, word
from coterie.runs.problems.auto import (
    FEWEST,
    ROUNDS,
    SHORTEST,
    SMALLEST_BATCH,
    choices_before,
    resolved,
    rows_of,
    with_dtype,
)
from coterie.runs.recipes.dotted import BATCH, CONTEXT, ROWS, STEPS
from coterie.runs.recipes.recipe import Recipe, changed

SPARE = 0.9  # of the time that is planned with; the rest is for loading, models and the report
LEAST_ROUNDS = 3
LONG_S = 3600.0  # a run that takes longer is told how it could take less
MOST_SCORED = 0.2  # of the time for the last scores
FINAL = "final_rows"
CHOSEN = ("method.rounds", STEPS, BATCH, CONTEXT, ROWS, FINAL, "words")
MOST_WORDS = 0.1  # of the time for them


def planned(
    recipe: Recipe, folder: Path | None = None, *, devices: bool = False
) -> tuple[Recipe, list[str]]:
    """Return a recipe with a value for each `auto` field, of a recipe with `time` so that it ends
    in that time on this machine, and sentences on what was chosen. Raises Refused. A run resumed in
    `folder` keeps its earlier choices.
    """
    begun = time.monotonic()
    recipe, precision = (recipe, "") if devices else with_dtype(recipe, folder)
    chosen, line = resolved(recipe, folder, devices=devices)
    lines = [line for line in (precision, line) if line]
    if recipe.time is None or devices:
        return chosen, lines
    if before := choices_before(folder, CHOSEN):
        chosen = changed(chosen, before)
    if "method.rounds" in before:
        return chosen, lines
    fitting, line = _in_time(chosen, {*recipe.auto} - before.keys(), recipe.time, begun)
    return fitting, [*lines, line]


def advice(recipe: Recipe, seconds: float, once: float) -> str | None:
    """Return what would bring a run that takes more than an hour, `once` of it after the last
    rounds, below; None if it does not take as long.
    """
    if seconds <= LONG_S or recipe.time is not None:
        return None
    method, about = recipe.build_method(), f"about {seconds / 3600:.1f} hours"
    if once >= (left := SPARE * LONG_S):
        scores = f"{once / 3600:.1f} of them for scores at the end"
        return f"{about}, {scores}: fewer test texts or a smaller base take less"
    whole = method.rounds * method.local_steps
    iterations = int((left - once) / (seconds - once) * whole)
    here = f"about {iterations} iterations of a client in place of {whole} would take one"
    return f"{about}: {here} (`coterie run RECIPE --time 1h` chooses what ends in an hour)"


def _in_time(
    recipe: Recipe, free: Collection[str], limit: float, begun: float
) -> tuple[Recipe, str]:
    """Return a recipe that ends within `limit` s of `begun`, and a sentence. Raises Refused."""
    speed, before, most_of = Speed(), None, recipe.build_method()
    # rounds and iterations cost in proportion; smaller batches and windows do not: once more
    while before is None or _rows(recipe) != _rows(before):
        rows, again, before = list(estimates(recipe, speed)), before is not None, recipe
        left = SPARE * limit - (time.monotonic() - begun)
        costs = [cost for _, cost in rows]
        seconds, once = (sum(getattr(cost, name) for cost in costs) for name in ("seconds", "once"))
        training, typed = seconds - once, 0.0
        if recipe.words and (words := sum(word(prepared) for prepared, _ in rows)):
            fewer = max(min(recipe.words, int(MOST_WORDS * left / words)), 0)
            once, typed = once - words * (recipe.words - fewer), words * fewer
            recipe = changed(recipe, {"words": fewer or None})
        scores, most = once - typed, max(MOST_SCORED * left, 0.0)
        if scores > most and recipe.evaluate_rows and not recipe.final_rows:
            sets = rows[-1][0].site.data.values()
            largest = max(max(data.valid.windows, data.test.windows) for data in sets)
            share, least = partial(share_of, rows[-1][0]), recipe.evaluate_rows + 1
            final = bisect_right(range(largest), most / scores, least, key=share) - 1
            recipe, once = changed(recipe, {FINAL: final}), typed + scores * share(final)
        if once >= left:
            raise Refused(
                f"time: {limit:g} s are too few: loading and the last scores take about "
                f"{(once + time.monotonic() - begun) / SPARE:.0f} s",
                "Give more time, less text, a smaller base, or fewer methods (compare_with).",
            )
        if again or training + once > left:
            recipe = _smaller(recipe, free, most_of, left - once, training)
        if again:
            break
    done, whole = (r.build_method().rounds * r.build_method().local_steps for r in (recipe, before))
    foreseen = once + training * done / max(whole, 1) + time.monotonic() - begun
    return recipe, _sentence(recipe, limit, foreseen)


def _smaller(
    recipe: Recipe, free: Collection[str], most: Method, left: float, training: float
) -> Recipe:
    """Return a recipe that trains for about `left` s in place of `training`. Raises Refused."""
    method, (batch, context) = recipe.build_method(), _rows(recipe)
    whole = method.rounds * method.local_steps
    iterations, smaller = left / training * whole, 1
    # an epoch has as many rows, whatever a batch and a window are
    while method.local_epochs is None and iterations < FEWEST:
        if BATCH in free and batch > SMALLEST_BATCH:
            batch //= 2
        elif CONTEXT in free and context is not None and context > SHORTEST:
            context //= 2
        else:
            break
        iterations, smaller = 2 * iterations, 2 * smaller
    steps, few, least = most.local_steps, min(ROUNDS, most.rounds), min(LEAST_ROUNDS, most.rounds)
    if STEPS in free and method.local_epochs is None and iterations < few * steps:
        steps = max(int(iterations / few), 1)
    rounds = min(int(iterations / steps), most.rounds)
    if rounds < least:
        seconds = training * least * steps / (whole * smaller)
        raise Refused(
            f"time: {recipe.time:g} s are too few: {least} rounds take about "
            f"{seconds / SPARE:.0f} s on this machine, besides loading and the last scores",
            "Give more time, less text, a smaller base, or fewer methods (compare_with).",
        )
    values: dict[str, Any] = {"method.rounds": rounds, STEPS: steps, BATCH: batch}
    if context is not None:
        values[CONTEXT] = context
    if ROWS in free and recipe.evaluate_rows is not None:
        values[ROWS] = rows_of(steps, batch, recipe.evaluate_every)[0]
    return changed(recipe, values)


def _rows(recipe: Recipe) -> tuple[int, int | None]:
    """Return the rows of a batch, and the length of a window; None without text."""
    return recipe.training.batch_size, getattr(recipe.model, "context", None)


def _sentence(recipe: Recipe, limit: float, foreseen: float) -> str:
    """Return a sentence on what is done in the time."""
    method, (batch, context) = recipe.build_method(), _rows(recipe)
    windows = "" if context is None else f" of {context} tokens"
    every, rows = recipe.evaluate_every, recipe.evaluate_rows
    scored = f"every {every} rounds" if every > 1 else "every round" if every else "at the end"
    end = f"{recipe.final_rows}" if recipe.final_rows else "everything"
    on = f" on {rows} rows of each set, at the end on {end}" if rows else " on everything"
    epochs, steps = method.local_epochs, method.local_steps
    length = f"{steps} iterations" if epochs is None else f"{epochs:g} epochs"
    each = f"{method.rounds} rounds of {length} on {batch} rows{windows}"
    about = f"about {foreseen / 60:.1f} minutes"
    return f"in {limit / 60:g} minutes: {each}, scored {scored}{on}; {about}"
