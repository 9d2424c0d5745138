"""Checks of a paper's statements on the measured rows of a table, and how finished these are."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from coterie.core import metrics
from coterie.papers.figures import LAST, Condition, Judgement, SeedFigures
from coterie.papers.reproduced import Cell, Verdict
from coterie.papers.tables import (
    FIGURES,
    Better,
    Figure,
    Near,
    Statement,
    compared_with,
    named,
    spoken_of,
    with_other_rows,
)

# Of a change in the last fifth: of a metric in percent, of others as a share of the value, and of
# weights and shares; below it, a row is finished.
POINTS, SHARE, WEIGHT = 0.5, 0.01, 0.01

Cells = Mapping[str, Cell]  # of a column, by row
Measured = tuple[Judgement, str]  # and the measured numbers in words


def _verdicts(statement: Statement, cells: Sequence[Cell]) -> Iterator[Verdict]:
    """Yield a verdict for each of the statement's columns in which all its rows were run."""
    for c in statement.columns:
        columns = [
            {cell.row: cell for cell in cells if cell.column == column}
            for column in (c, statement.beside or c)
        ]
        if (judged := _judged(statement, *columns)) is None:
            continue
        judgement, detail = judged
        decisive = judgement.decisive
        yield Verdict(
            statement.says,
            statement.source,
            c,
            judgement.holds,
            judgement.surely,
            detail,
            decisive.in_words() if decisive.interval else "",
            None if judgement.holds else _only_with(statement, *columns),
            judgement.unfinished,
            _progress(statement, *columns),
        )


def _judged(statement: Statement, cells: Cells, others: Cells) -> Measured | None:
    """Judge a statement on a column and the one beside it; None if a row or figure is missing."""
    known = {*spoken_of(statement)} <= cells.keys()
    if not known or not {*compared_with(statement)} <= others.keys():
        return None
    if isinstance(statement, Figure):
        return _figure(statement, cells)
    ours, theirs = (
        [_Side(of[row], statement, of.get(statement.minus or "")) for row in rows]
        for of, rows in (
            (cells, named(statement, "better", "rows")),
            (others, named(statement, "than", "best_of")),
        )
    )
    if isinstance(statement, Near):
        return _near(statement, ours, theirs)
    return _better(statement, ours, theirs)


def _only_with(statement: Statement, cells: Cells, others: Cells) -> str | None:
    """Return the first of the statement's other rows that it holds with."""
    for name, rows in statement.only_with.items():
        judged = _judged(with_other_rows(statement, rows), cells, others)
        if judged is not None and judged[0].state and not judged[0].unfinished:
            return name
    return None


@dataclass(frozen=True)
class _Side:
    """A row on one side of a comparison: its values, and how it still improves."""

    cell: Cell
    statement: Statement
    minus: Cell | None = None

    def value(self, seed: SeedFigures) -> float:
        """Return the figure of a seed that is compared."""
        if self.statement.clients:
            return metrics.mean(seed.clients[i] for i in self.statement.clients)
        group = self.statement.group
        return (seed.groups or {})[group] if group else seed.mean

    @cached_property
    def values(self) -> list[float]:
        """The figures, seed by seed."""
        values = [self.value(seed) for seed in self.cell.seeds]
        if self.minus is None:
            return values
        return [v - self.value(of) for v, of in zip(values, self.minus.seeds, strict=True)]

    @property
    def mean(self) -> float:
        return metrics.mean(self.values)

    @cached_property
    def pace(self) -> list[float] | None:
        """Their change in the last fifth of the runs, seed by seed; None if unknown."""
        pairs = [(now, was) for now in self.cell.seeds if (was := now.earlier) is not None]
        changes = [(self.value(b) - self.value(a)) * LAST / (1 - a.share) for b, a in pairs]
        return changes if len(changes) == len(self.cell.seeds) else None

    @property
    def change(self) -> float:
        """Its mean; 0 if that is no improvement to speak of: not above a threshold and the
        deviation over seeds.
        """
        metric, mean = self.cell.metric, metrics.mean(self.pace or [0.0])
        limit = POINTS if metric.unit == "%" else SHARE * abs(self.mean)
        improves = metrics.better(mean, 0, metric) and abs(mean) > limit
        return mean if improves and _beyond_seeds(self.pace or []) else 0.0


def _beyond_seeds(changes: list[float]) -> bool:
    return abs(metrics.mean(changes)) > metrics.deviation(changes)


def _move(plus: _Side, minus: _Side, unit: float = 1.0) -> float:
    """Return how far two rows' difference moved in the last fifth, if they still improve, or 0."""
    if not (plus.change or minus.change):
        return 0.0
    paces = (side.pace or [0.0] * len(side.values) for side in (plus, minus))
    changes = [unit * (a - b) for a, b in zip(*paces, strict=True)]
    return metrics.mean(changes) if _beyond_seeds(changes) else 0.0


def _better(statement: Better, good: Sequence[_Side], bad: Sequence[_Side]) -> Measured:
    sign = 1 if good[0].cell.metric.lower_is_better else -1
    conditions = [
        Condition(
            f"gain of {a.cell.title} over {b.cell.title}",
            [sign * (theirs - ours) for ours, theirs in zip(a.values, b.values, strict=True)],
            statement.by,
            strict=not statement.by,
            wins=None if statement.group or statement.beside else _wins(statement, a, b, sign),
            move=_move(b, a, sign),
        )
        for a in good
        for b in bad
    ]
    sides = (", ".join(f"{row.cell.title} {row.mean:.2f}" for row in side) for side in (good, bad))
    by = f" (by at least {statement.by:g})" if statement.by else ""
    return Judgement(conditions), " against ".join(sides) + by


def _wins(statement: Statement, good: _Side, bad: _Side, sign: int) -> tuple[int, int] | None:
    """Return for how many clients and seeds one row is better than another, and of how many."""
    pairs: list[float] = []
    for ours, theirs in zip(good.cell.seeds, bad.cell.seeds, strict=True):
        known = ours.clients.keys() & theirs.clients.keys()
        compared = [i for i in statement.clients or ours.clients if i in known]
        pairs += [sign * (theirs.clients[i] - ours.clients[i]) for i in compared]
    return (sum(gain > 0 for gain in pairs), len(pairs)) if pairs else None


def _near(statement: Near, rows: Sequence[_Side], best_of: Sequence[_Side]) -> Measured:
    metric = rows[0].cell.metric
    best = min(best_of, key=lambda side: metrics.sort_key(side.mean, metric))
    units = [1.0 if statement.points else 100 / theirs for theirs in best.values]
    form: Literal["", "%"] = "" if statement.points else "%"
    scale = 1 if statement.points else 100
    low, high = (scale * (statement.about + sign * statement.within) for sign in (-1, 1))
    if statement.only_worse is not None:
        low, high = (-math.inf, high) if metric.lower_is_better else (low, math.inf)
    conditions = [
        Condition(
            f"{row.cell.title} against {best.cell.title}",
            [u * (a - b) for u, a, b in zip(units, row.values, best.values, strict=True)],
            low,
            high,
            form=form,
            move=_move(row, best, metrics.mean(units)),
        )
        for row in rows
    ]
    unit = f" {form}" if form else ""
    differences = ", ".join(
        f"{row.cell.title} {row.mean:.2f}, {one.mean:+.2f}{unit}"
        for row, one in zip(rows, conditions, strict=True)
    )
    bounds = _bounds(low, high) + unit
    return Judgement(conditions), f"{differences} against {best.cell.title} ({bounds})"


def _bounds(low: float, high: float) -> str:
    known = (("at least", low), ("at most", high))
    return ", ".join(f"{side} {bound:g}" for side, bound in known if math.isfinite(bound))


def _figure(statement: Figure, cells: Cells) -> Measured | None:
    cell, name = cells[statement.row], statement.figure
    other = cells[statement.against] if statement.against else None

    def figures(earlier: bool) -> list[float]:
        sides = [
            [
                _value(statement, of, (seed.earlier if earlier else None) or seed, k, cells)
                for k, seed in enumerate(of.seeds)
            ]
            for of in (cell, other or cell)
        ]
        pairs = zip(*sides, strict=True)
        return [100 * (a - b) / b for a, b in pairs] if other else sides[0]

    now = figures(earlier=False)
    if any(map(math.isnan, now)):
        return None
    changes = [b - a for a, b in zip(figures(earlier=True), now, strict=True)]
    change, past = metrics.mean(changes), statement.since
    limit = WEIGHT if name in ("weights_error", "generalist", "generalist_change") else POINTS
    moves = past is None and name != "reached"
    moves = moves and abs(change) > limit and _beyond_seeds(changes)
    title = f"{FIGURES[name.split()[0]]} of {cell.title}"
    if past is not None:
        title += f" from {100 * past:g} % of the run on"
    if other is not None:
        title += f", against {other.title}"
    low, high = statement.at_least, statement.at_most
    move = change if moves else 0.0
    condition = Condition(
        title, now, low, high, statement.strict, form="%" if other else "", move=move
    )
    unit, strict = " %" if other else "", ", not equal" * statement.strict
    bounds = _bounds(low, high)
    return Judgement([condition]), f"{title} {condition.mean:.4g}{unit} ({bounds}{strict})"


def _value(statement: Figure, cell: Cell, seed: SeedFigures, k: int, cells: Cells) -> float:
    """Return a figure of a row's k-th seed; nan if the run does not have it."""
    if statement.figure == "reached":
        level = statement.level
        goal = cells[level].seeds[k].mean if isinstance(level, str) else level
        shares = (s for s, mean, _ in seed.course if not metrics.better(goal, mean, cell.metric))
        return 100 * next(shares, 1.0) if len(seed.course) > 1 else math.nan
    if statement.since is None:
        return seed.figures.get(statement.figure, math.nan)
    errors = [error for share, _, error in seed.course if share >= statement.since - 1e-9]
    return max((math.nan if error is None else error for error in errors), default=math.nan)


def _progress(statement: Statement, cells: Cells, others: Cells) -> str:
    """Return how finished the runs of a statement's rows were, in words."""
    rows = {(cells[row].column, row): cells[row] for row in spoken_of(statement)}
    rows |= {(others[row].column, row): others[row] for row in compared_with(statement)}
    sides = [_Side(cell, statement) for cell in rows.values()]
    rising = [f"{side.cell.title} {side.change:+.2f}" for side in sides if side.change]
    unknown = [side.cell.title for side in sides if side.pace is None]
    parts = [
        f"in the last fifth {', '.join(rising)}" if rising else "",
        f"last fifth unknown of {', '.join(unknown)}" if unknown else "",
    ]
    return "; ".join(filter(None, parts)) or "no row still improves"
