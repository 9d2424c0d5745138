"""The outcome of a search for settings: a table in a terminal, and `tune.html` with pictures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from coterie.core.files import write_atomically
from coterie.core.metrics import best as best_of
from coterie.core.metrics import direction
from coterie.core.result import ROUNDS, MetricInfo, Tried, TunedRow, Tuning
from coterie.core.result.tuning import name_of, value, written
from coterie.methods import METHODS
from coterie.reports import chart, parts
from coterie.reports.chart import Axes, Line, Style
from coterie.reports.tables import fitted

TUNED_PAGE = "tune.html"
# by number of rounds, the most first
_COLOURS = (parts.BLUE, parts.GREEN, parts.ORANGE, parts.PINK, parts.SKY, parts.BROWN, parts.GREY)
_CHOSEN = Style(parts.VERMILION, number=3)
PICTURE = (
    "<p>How well each value did on validation. A line joins runs of equal length, and has for each "
    "value the best that was reached with it, whatever the other fields were; in the panel of "
    "rounds it has the best of each length. Where a line is best in its middle, the range was wide "
    "enough. The chosen settings are marked; runs that diverged are not drawn.</p>"
)

READING = (
    "as good: how many other settings the validation data cannot tell from the chosen ones, in "
    "runs of as many rounds: within two standard errors of the differences by client and seed.",
    "iterations: local iterations of all runs together.",
)


def settings(row: TunedRow) -> str:
    """Return the chosen settings of a row in one line."""
    return written({**row.chosen, ROUNDS: row.rounds})


def lies(row: TunedRow) -> str:
    """Return whether the best lies within the range that was tried, or at an end of it."""
    if row.valid is None:
        return ""
    edges = ", ".join(map(name_of, row.at_edge))
    return f"at the end of its range: {edges}" if edges else "within its range"


def terminal(tuning: Tuning, width: int = 80) -> Table:
    """Return the table for a terminal, with a line for each method."""
    metric = tuning.metric
    title = f"settings chosen on validation; {metric}, {direction(metric)}"
    header = ("method", "validation", "chosen", "as good", "runs", "iterations")
    lines = [(METHODS[row.method].title, *_cells(row)) for row in tuning.rows]
    return fitted(title, header, lines, width, text=(0, 2))


def _cells(row: TunedRow) -> tuple[str, ...]:
    if row.valid is None:
        return "", "trains nothing", "", "", ""
    counts = (f"{row.alike:,}", f"{row.runs:,}", f"{row.iterations:,}")
    chosen = f"{settings(row)} ({lies(row)})" if row.at_edge else settings(row)
    return parts.figure(row.valid), chosen, *counts


def write_tuning(folder: Path, tuning: Tuning, description: str) -> None:
    """Write `tune.html` into the folder of a search. Raises SaveError."""
    computed = parts.computed_with(tuning.machine, tuning.versions)
    about = f"seeds {', '.join(map(str, tuning.seeds))}{computed}"
    which = f"{str(tuning.metric).capitalize()}, averaged over clients; {direction(tuning.metric)}."
    how = f"<p>{parts.escape(which)}</p><p>{parts.escape(tuning.effort)}</p>"
    reading = "".join(f"<p class=note>{parts.escape(note)}</p>" for note in READING)
    below = reading + parts.notes(tuning.notes)
    contents = [
        parts.section("chosen", "What was chosen", how, _table(tuning), below),
        *(_picture(k, row, tuning.metric) for k, row in enumerate(tuning.rows) if row.tried),
    ]
    title = f"{tuning.recipe}: settings of {len(tuning.rows)} methods"
    shown = parts.page(title, parts.introduction(description, about), "".join(contents))
    write_atomically(folder / TUNED_PAGE, shown)


def _table(tuning: Tuning) -> str:
    rows = tuning.rows
    every = dict.fromkeys(key for row in rows for key in row.chosen)
    keys = [key for key in every if key != ROUNDS]
    known = [row.valid is not None for row in rows]

    def column(values: Iterable[str]) -> list[str]:
        return [text if scored else "" for text, scored in zip(values, known, strict=True)]

    columns: dict[str, Sequence[parts.Cell | str]] = {
        "method": [METHODS[row.method].title for row in rows],
        **{
            name_of(key): [value(row.chosen[key]) if key in row.chosen else "" for row in rows]
            for key in keys
        },
        "rounds": column(f"{row.rounds:,}" for row in rows),
        "validation": column("" if row.valid is None else parts.figure(row.valid) for row in rows),
        "as good": column(f"{row.alike:,}" for row in rows),
        "best": [lies(row) for row in rows],
        "tried": column(f"{row.candidates:,}" for row in rows),
        "runs": column(f"{row.runs:,}" for row in rows),
        "iterations": parts.bars([row.iterations if row.tried else None for row in rows], ",.0f"),
        "recipe": [row.recipe for row in rows],
    }
    return parts.by_columns(columns)


def _picture(k: int, row: TunedRow, metric: MetricInfo) -> str:
    """Return the section of a method: a panel for each field, and every trial in a table."""
    rounds = sorted({trial.rounds for trial in row.tried}, reverse=True)
    styles = {n: Style(_COLOURS[i % len(_COLOURS)], i) for i, n in enumerate(rounds)}
    tried = [trial for trial in row.tried if trial.valid is not None and math.isfinite(trial.valid)]
    panels = [
        _panel(key, tried, row, styles, metric)
        for key in row.chosen
        if _drawn(key, [trial.settings[key] for trial in row.tried])
    ]
    if len(rounds) > 1:
        panels.append(_panel(ROUNDS, tried, row, styles, metric))
    samples = [(style.sample, f"{n:,} rounds") for n, style in styles.items()]
    return parts.section(
        f"method-{k}",
        METHODS[row.method].title,
        PICTURE if k == 0 else "",
        parts.legend([*samples, (_CHOSEN.sample, f"chosen: {settings(row)}")]),
        chart.grid(panels),
        parts.folded(f"All {len(row.tried)} trials", _trials(row, metric)),
    )


def _drawn(key: str, values: Sequence[Any]) -> bool:
    """Return whether a field has a panel: several numbers, none below 0; rounds have their own."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return key != ROUNDS and numbers and min(values) >= 0 and len(set(values)) > 1


def _panel(
    key: str, tried: Sequence[Tried], row: TunedRow, styles: Mapping[int, Style], metric: MetricInfo
) -> str:
    """Return the panel of one field."""

    def of(trial: Tried) -> float:
        return float(trial.rounds if key == ROUNDS else trial.settings[key])

    lines = []
    groups = (
        {0: tried} if key == ROUNDS else {n: [t for t in tried if t.rounds == n] for n in styles}
    )
    for n, group in groups.items():
        top: dict[float, list[float]] = {}
        for trial in group:
            top.setdefault(of(trial), []).append(trial.valid or 0.0)
        points = [(x, best_of(scores, metric)) for x, scores in sorted(top.items())]
        name = "best" if key == ROUNDS else f"{n:,} rounds"
        if points:
            lines.append(Line(points, name, styles.get(n, Style(parts.GREY))))
    if row.valid is not None:
        at = row.rounds if key == ROUNDS else row.chosen[key]
        lines.append(Line([(float(at), row.valid)], "chosen", _CHOSEN))
    values = [y for line in lines for _, y in line.points]
    log = metric.lower_is_better and min(values) > 0 and max(values) / min(values) > chart.RATIO
    ratios = min(x for line in lines for x, _ in line.points) > 0
    title, y = name_of(key), str(metric) + ", logarithmic" * log
    across: Literal["ratios", "values"] = "ratios" if ratios else "values"
    axes = Axes(title, y, log=log, across=across, ticks=sorted(styles) if key == ROUNDS else ())
    return parts.captioned(title, "", chart.panel(title, lines, axes))


def _trials(row: TunedRow, metric: MetricInfo) -> str:
    keys = [key for key in row.chosen if key != ROUNDS]
    lines = []
    for trial in row.tried:
        stage = "beyond the range" if trial.rung is None else f"stage {trial.rung + 1}"
        score = trial.problem or parts.figure(trial.valid if trial.valid is not None else math.inf)
        lines.append(
            [stage, *(value(trial.settings[key]) for key in keys), f"{trial.rounds:,}", score]
        )
    chosen = [trial.settings == row.chosen and trial.rounds == row.rounds for trial in row.tried]
    return parts.table(["", *map(name_of, keys), "rounds", str(metric)], lines, chosen.index(True))
