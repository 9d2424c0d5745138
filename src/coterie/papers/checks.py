"""Checks of a paper's statements: measured figures must lie on one side of a bound."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from coterie.core import metrics
from coterie.core.result import MetricInfo
from coterie.papers.reproduced import Cell, SeedFigures, Verdict
from coterie.papers.tables import (
    Better,
    Compared,
    Favours,
    Gate,
    Improved,
    Lower,
    Near,
    Replaceable,
    Routers,
    Statement,
    Weights,
    spoken_of,
    with_other_rows,
)

LEVEL = 0.95  # of an interval


@dataclass(frozen=True)
class Condition:
    """Figures of which a statement says that their mean lies on one side of a bound.

    A figure is of one seed, and of two rows it is the difference of that seed's runs, which see the
    same texts: what a seed does to both cancels.
    """

    name: str  # what the figures are, in words
    per_seed: Sequence[float]
    bound: float = 0.0
    above: bool = True  # whether the figures must lie above the bound, otherwise below
    strict: bool = True  # whether the bound itself is on the wrong side
    form: Literal["", "%"] = ""  # the unit
    # for how many pairs of client and seed it holds, and of how many; None: not compared
    wins: tuple[int, int] | None = None

    @cached_property
    def mean(self) -> float:
        """The mean of the figures."""
        return metrics.mean(self.per_seed)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The ends of Student's interval for the mean over seeds; None for a single seed."""
        count = len(self.per_seed)
        if count < 2 or not all(map(math.isfinite, self.per_seed)):
            return None
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, count - 1))
        half *= metrics.deviation(list(self.per_seed)) / math.sqrt(count)
        return self.mean - half, self.mean + half

    @property
    def holds(self) -> bool:
        """Whether the mean lies on the right side."""
        return self._right(self.mean)

    @property
    def surely(self) -> bool | None:
        """Whether the whole interval lies on the right side; None if the bound is in it."""
        if self.interval is None:
            return None
        ends = {self._right(end) for end in self.interval}
        return ends.pop() if len(ends) == 1 else None

    @property
    def margin(self) -> float:
        """The distance of the mean from the bound, negative on the wrong side."""
        return self.mean - self.bound if self.above else self.bound - self.mean

    def in_words(self) -> str:
        """Return the figure with its interval, in words."""
        text = f"{self.name} {self._figure(self.mean)}"
        if self.interval is not None:
            low, high = map(self._figure, self.interval)
            text += f" (interval {low} to {high})"
        if self.wins is not None:
            text += f", for {self.wins[0]} of {self.wins[1]} clients and seeds"
        return text

    def _right(self, value: float) -> bool:
        margin = value - self.bound if self.above else self.bound - value
        return margin > 0 or (margin == 0 and not self.strict)

    def _figure(self, value: float) -> str:
        small = max(map(abs, self.per_seed)) < 1
        return f"{value:+.{3 if small else 2}f}{' %' if self.form else ''}"


@dataclass(frozen=True)
class Judgement:
    """Conditions of a statement that must all hold. It holds if it surely does in every condition,
    each at its own level: that all are true by chance is less likely than that one is. It does not
    hold if it surely fails in one.
    """

    conditions: Sequence[Condition]

    @property
    def holds(self) -> bool:
        """Whether all means lie on the right side."""
        return all(one.holds for one in self.conditions)

    @property
    def surely(self) -> bool | None:
        """Whether the statement holds beyond the variation over seeds; None if that is open."""
        answers = [one.surely for one in self.conditions]
        if False in answers:
            return False
        return True if all(answers) else None

    @property
    def decisive(self) -> Condition:
        """The condition that decides: the one that fails or is closest to it."""
        order = {False: 0, None: 1, True: 2}
        return min(self.conditions, key=lambda one: (order[one.surely], one.margin))


Cells = Mapping[str, Cell]  # of a column, by row
Measured = tuple[Judgement, str]  # and the measured numbers in words


def _verdicts(statement: Statement, cells: Sequence[Cell]) -> Iterator[Verdict]:
    """Yield a verdict for each of the statement's columns in which all its rows were run."""
    for c in statement.columns:
        of_column = {cell.row: cell for cell in cells if cell.column == c}
        if (judgements := _judged(statement, of_column)) is None:
            continue
        judgement, detail = judgements
        decisive = judgement.decisive
        yield Verdict(
            statement.says,
            statement.source,
            c,
            judgement.holds,
            judgement.surely,
            detail,
            decisive.in_words() if decisive.interval else "",
            None if judgement.holds else _only_with(statement, of_column),
        )


def _judged(statement: Statement, cells: Cells) -> Measured | None:
    """Judge a statement on the rows of a column; None if a figure is missing."""
    if not {*spoken_of(statement)} <= cells.keys():
        return None
    return _CHECKS[type(statement)](statement, cells)


def _only_with(statement: Statement, cells: Cells) -> str | None:
    """Return the first of the statement's other rows that it holds with."""
    if not isinstance(statement, Replaceable):
        return None
    for name, rows in statement.only_with.items():
        judgements = _judged(with_other_rows(statement, rows), cells)
        if judgements is None:
            continue
        judgement, _ = judgements
        single = judgement.decisive.interval is None
        if judgement.surely or (single and judgement.holds):
            return name
    return None


def _values(cell: Cell, statement: Compared) -> list[float]:
    """Return the figures of a row that a statement compares, seed by seed."""

    def of(seed: SeedFigures) -> float:
        if statement.clients:
            return metrics.mean(seed.clients[i] for i in statement.clients)
        return (seed.groups or {})[statement.group] if statement.group else seed.mean

    return [of(seed) for seed in cell.seeds]


def _in_words(statement: Compared, cells: Cells, *sides: Sequence[str]) -> str:
    def value(row: str) -> str:
        return f"{cells[row].title} {metrics.mean(_values(cells[row], statement)):.2f}"

    return " against ".join(", ".join(map(value, side)) for side in sides)


def _gains(statement: Lower | Better, good: Cell, bad: Cell, lower_is_better: bool) -> Condition:
    """Return by how much one row is better than another, seed by seed."""
    sign = 1 if lower_is_better else -1
    pairs = zip(_values(good, statement), _values(bad, statement), strict=True)
    return Condition(
        f"gain of {good.title} over {bad.title}",
        [sign * (theirs - ours) for ours, theirs in pairs],
        statement.by if isinstance(statement, Better) else 0.0,
        strict=not (isinstance(statement, Better) and statement.by),
        wins=None if statement.group else _wins(statement, good, bad, sign),
    )


def _wins(statement: Compared, good: Cell, bad: Cell, sign: int) -> tuple[int, int] | None:
    """Return for how many clients and seeds one row is better than another, and of how many."""
    pairs: list[float] = []
    for ours, theirs in zip(good.seeds, bad.seeds, strict=True):
        known = ours.clients.keys() & theirs.clients.keys()
        compared = [i for i in statement.clients or ours.clients if i in known]
        pairs += [sign * (theirs.clients[i] - ours.clients[i]) for i in compared]
    return (sum(gain > 0 for gain in pairs), len(pairs)) if pairs else None


def _ordered(
    statement: Lower | Better,
    cells: Cells,
    good: Sequence[str],
    bad: Sequence[str],
    lower_is_better: bool,
) -> Measured:
    conditions = [_gains(statement, cells[a], cells[b], lower_is_better) for a in good for b in bad]
    return Judgement(conditions), _in_words(statement, cells, good, bad)


def _lower(statement: Lower, cells: Cells) -> Measured:
    return _ordered(statement, cells, statement.lower, statement.than, lower_is_better=True)


def _better(statement: Better, cells: Cells) -> Measured:
    lower_is_better = _metric(cells).lower_is_better
    judgement, text = _ordered(statement, cells, statement.better, statement.than, lower_is_better)
    return judgement, text + (f" (by at least {statement.by:g})" if statement.by else "")


def _near(statement: Near, cells: Cells) -> Measured:
    metric = _metric(cells)
    values = {r: _values(cells[r], statement) for r in (statement.row, *statement.best_of)}
    means = {r: metrics.mean(of_row) for r, of_row in values.items()}
    best = min(statement.best_of, key=lambda r: metrics.sort_key(means[r], metric))
    title, other = cells[statement.row].title, cells[best].title
    scale = 1 if statement.points else 100
    limit = scale * (statement.within if metric.lower_is_better else -statement.within)
    sign = "" if statement.points else " %"
    condition = Condition(
        f"{title} against {other}",
        [
            (of_row - theirs) if statement.points else 100 * (of_row - theirs) / theirs
            for of_row, theirs in zip(values[statement.row], values[best], strict=True)
        ],
        limit,
        above=not metric.lower_is_better,
        strict=False,
        form="" if statement.points else "%",
    )
    most = "most" if metric.lower_is_better else "least"
    text = (
        f"{title} {means[statement.row]:.2f}, {condition.mean:+.2f}{sign} against {other} "
        f"(at {most} {limit:+g}{sign})"
    )
    return Judgement([condition]), text


def _metric(cells: Cells) -> MetricInfo:
    return next(iter(cells.values())).metric


def _one(statement: Weights | Improved | Gate, cells: Cells) -> Measured | None:
    """Judge a figure of a single row; None if a seed lacks it."""
    seeds = cells[statement.row].seeds
    if isinstance(statement, Weights):
        name, values, digits = "W error", [seed.weights_error for seed in seeds], 3
    elif isinstance(statement, Improved):
        name, values, digits = "Imp.%", [seed.improved for seed in seeds], 0
    else:
        name, values, digits = "gate accuracy", [seed.gate_accuracy for seed in seeds], 1
    above = not isinstance(statement, Weights)
    bound = statement.at_most if isinstance(statement, Weights) else statement.at_least
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    name = f"{name} of {cells[statement.row].title}"
    condition = Condition(name, known, bound, above, strict=False)
    limit = f"at {'least' if above else 'most'} {bound:g}"
    return Judgement([condition]), f"{name} {condition.mean:.{digits}f} ({limit})"


def _routers(statement: Routers, cells: Cells) -> Measured | None:
    generalists = [seed.generalist for seed in cells[statement.row].seeds]
    known = [pair for pair in generalists if pair is not None]
    if len(known) < len(generalists):
        return None
    first, last = (metrics.mean(pair[at] for pair in known) for at in (0, 1))
    if statement.generalist == "falls":
        condition = Condition("change of its weight", [b - a for a, b in known], above=False)
    else:
        condition = Condition("its weight at the end", [b for _, b in known], 0.5, above=False)
    return (
        Judgement([condition]),
        f"mean weight of the generalist {first:.3f} in the first round, {last:.3f} in the last",
    )


def _favours(statement: Favours, cells: Cells) -> Measured | None:
    cell, one, most = cells[statement.row], statement.client, statement.most
    known = [seed.weights[one] for seed in cell.seeds if seed.weights]
    if len(known) < len(cell.seeds):
        return None
    conditions = [
        Condition(
            f"weight for {most} above that for {i} by",
            [of_seed[most] - of_seed[i] for of_seed in known],
        )
        for i in known[0]
        if i != most
    ]
    means = {i: metrics.mean(of_seed[i] for of_seed in known) for i in known[0]}
    text = ", ".join(f"{i} {mean:.3f}" for i, mean in means.items())
    return Judgement(conditions), f"mean weights of {one}: {text}"


_CHECKS: Mapping[type, Callable[..., Measured | None]] = {
    Lower: _lower,
    Better: _better,
    Near: _near,
    Weights: _one,
    Improved: _one,
    Gate: _one,
    Routers: _routers,
    Favours: _favours,
}
