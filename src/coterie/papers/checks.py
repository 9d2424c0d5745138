"""Checks of a paper's statements on the measured numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from coterie.core import metrics
from coterie.core.result import MetricInfo, Result
from coterie.papers.found import Cell, Verdict
from coterie.papers.tables import (
    Better,
    Gate,
    Improved,
    Lower,
    Near,
    Routers,
    Statement,
    Weights,
    spoken_of,
)
from coterie.reports.curves import router_series
from coterie.runs.metrics import METRICS


def _verdicts(statement: Statement, cells: Sequence[Cell], folder: Path) -> Iterator[Verdict]:
    """Yield a verdict for each of the statement's columns in which all its rows were run."""
    for c in statement.columns:
        own = {cell.row: cell for cell in cells if cell.column == c}
        if not {*spoken_of(statement)} <= own.keys():
            continue
        if (verdict := _CHECKS[type(statement)](statement, own, folder)) is None:
            continue
        holds, detail = verdict
        yield Verdict(statement.says, statement.source, c, holds, detail)


def _value(cell: Cell, statement: Lower | Better | Near) -> float:
    if statement.clients:
        return metrics.mean(cell.clients[i] for i in statement.clients)
    return cell.mean_of(statement.group or "")


def _against(
    cells: Mapping[str, Cell],
    lower: Mapping[str, float],
    higher: Mapping[str, float],
    by: float = 0,
) -> tuple[bool, str]:
    """Whether all of some values are below all of others, and by at least so much; with the
    values, in the words of a table.
    """
    top, bottom = max(lower, key=lambda r: lower[r]), min(higher, key=lambda r: higher[r])
    gap, noise = higher[bottom] - lower[top], max(cells[top].std, cells[bottom].std)
    return gap > 0 and gap >= by, ", closer than a standard deviation" if abs(gap) < noise else ""


def _told(cells: Mapping[str, Cell], *sides: Mapping[str, float]) -> str:
    return " against ".join(
        ", ".join(f"{cells[r].title} {value:.2f}" for r, value in side.items()) for side in sides
    )


def _lower(statement: Lower, cells: Mapping[str, Cell], folder: Path) -> tuple[bool, str]:
    low = {r: _value(cells[r], statement) for r in statement.lower}
    high = {r: _value(cells[r], statement) for r in statement.than}
    holds, close = _against(cells, low, high)
    return holds, _told(cells, low, high) + close


def _better(statement: Better, cells: Mapping[str, Cell], folder: Path) -> tuple[bool, str]:
    good = {r: _value(cells[r], statement) for r in statement.better}
    bad = {r: _value(cells[r], statement) for r in statement.than}
    lower_is_better = _metric(cells).lower_is_better
    holds, close = _against(
        cells, *((good, bad) if lower_is_better else (bad, good)), by=statement.by
    )
    return holds, _told(cells, good, bad) + (
        f" (by at least {statement.by:g})" if statement.by else ""
    ) + close


def _near(statement: Near, cells: Mapping[str, Cell], folder: Path) -> tuple[bool, str]:
    metric = _metric(cells)
    values = {r: _value(cells[r], statement) for r in (statement.row, *statement.best_of)}
    best = min(statement.best_of, key=lambda r: metrics.sort_key(values[r], metric))
    difference = values[statement.row] - values[best]
    form, far = ("+.2f", difference) if statement.points else ("+.1%", difference / values[best])
    limit = statement.within if metric.lower_is_better else -statement.within
    told = (
        f"{cells[statement.row].title} {values[statement.row]:.2f}, {far:{form}} against "
        f"{cells[best].title}"
    )
    bound = (
        f"at {'most' if metric.lower_is_better else 'least'} "
        f"{limit:{'+g' if statement.points else '+.0%'}}"
    )
    return metrics.sort_key(far, metric) <= statement.within, f"{told} ({bound})"


def _metric(cells: Mapping[str, Cell]) -> MetricInfo:
    return next(iter(cells.values())).metric


def _weights(
    statement: Weights, cells: Mapping[str, Cell], folder: Path
) -> tuple[bool, str] | None:
    error = cells[statement.row].weights_error
    if error is None:
        return None
    return (
        error <= statement.at_most,
        f"W error of {cells[statement.row].title} {error:.3f} (at most {statement.at_most:g})",
    )


def _improved(
    statement: Improved, cells: Mapping[str, Cell], folder: Path
) -> tuple[bool, str] | None:
    share = cells[statement.row].improved
    if share is None:
        return None
    return (
        share >= statement.at_least,
        f"Imp.% of {cells[statement.row].title} {share:.0f} (at least {statement.at_least:g})",
    )


def _gate(statement: Gate, cells: Mapping[str, Cell], folder: Path) -> tuple[bool, str] | None:
    right = cells[statement.row].gate_accuracy
    if right is None:
        return None
    return (
        right >= statement.at_least,
        f"gate accuracy of {cells[statement.row].title} {right:.1f} (at least "
        f"{statement.at_least:g})",
    )


def _routers(statement: Routers, cells: Mapping[str, Cell], folder: Path) -> tuple[bool, str]:
    cell = cells[statement.row]
    clients = Result.read(folder / cell.folders[0]).clients
    series = router_series(folder / cell.folders[0] / METRICS)
    generalist = [
        metrics.mean(
            sum(weights[: clients[i].generalists])
            for i, rounds in series.items()
            for weights in rounds[at][1]
        )
        for at in (0, -1)
    ]
    holds = generalist[1] < (generalist[0] if statement.generalist == "falls" else 0.5)
    return (
        holds,
        f"mean weight of the generalist {generalist[0]:.3f} in the first round, "
        f"{generalist[1]:.3f} in the last",
    )


_CHECKS: Mapping[type, Callable[..., tuple[bool, str] | None]] = {
    Lower: _lower,
    Better: _better,
    Near: _near,
    Weights: _weights,
    Improved: _improved,
    Gate: _gate,
    Routers: _routers,
}
