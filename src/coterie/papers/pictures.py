"""The papers' figures, drawn from results."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path

from coterie.core.result import Result
from coterie.papers.reproduced import Cell, Reproduced
from coterie.papers.tables import Picture
from coterie.reports import chart, collaboration, experts, marks
from coterie.reports.chart import Line, look_of
from coterie.reports.collaboration import Weights
from coterie.reports.curves import Value, counted, group_test, router_panels, test_of
from coterie.reports.experts import Choices
from coterie.reports.parts import escape, legend, plus_minus, thinned, unseen
from coterie.runs.folder.metrics import METRICS

POINTS = 120  # of a curve, at most
Parts = tuple[str, ...]  # of a picture: its title, and HTML


def _name(reproduced: Reproduced, cell: Cell) -> str:
    """Return the title of a row, with the settings that were chosen for it."""
    chosen = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in cell.choice.items())
    return reproduced.rows[cell.row] + (f" ({chosen})" if chosen else "")


def _picture(picture: Picture, reproduced: Reproduced, runs: Path) -> Parts:
    """Return the title and the parts of one picture."""
    cells = [
        cell
        for cell in reproduced.cells
        if (not picture.rows or cell.row in picture.rows)
        and (not picture.columns or cell.column in picture.columns)
    ]
    if not cells:
        return ("",)
    whose = f" of {', '.join(picture.clients)}" if picture.clients else ""
    if picture.kind in _OF_CELLS:
        title, draw = _OF_CELLS[picture.kind]
        parts: list[str] = []
        for cell in cells:
            names = reproduced.rows[cell.row], reproduced.columns[cell.column]
            drawn = draw(picture, cell.title, runs / cell.folders[0])
            parts += [f"<h3>{escape(', '.join(names))}</h3>", *drawn] if any(drawn) else []
    else:
        title, *parts = _OF_ALL[picture.kind](picture, cells, reproduced)
    return (picture.title or title.format(whose=whose), *parts)


def _weights(picture: Picture, title: str, folder: Path) -> Parts:
    """Return W at some iterations."""
    if (weights := Weights.of(title, Result.read(folder))) is None:
        return ()
    return (collaboration.at_stages(weights, picture.iterations), collaboration.scale(weights.top))


def _domains(picture: Picture, title: str, folder: Path) -> Parts:
    """Return clients' weights for each other over training."""
    weights = Weights.of(title, Result.read(folder))
    return (collaboration.domains(weights, picture.clients),) if weights else ()


def _experts(picture: Picture, title: str, folder: Path) -> Parts:
    choices = Choices.of(title, Result.read(folder))
    return (experts.expert_curves(choices),) if choices else ()


def _gate(picture: Picture, title: str, folder: Path) -> Parts:
    result = Result.read(folder)
    if (choices := Choices.of(title, result)) is None:
        return ()
    return (experts.choice_maps([choices]), experts.decisions(title, result))


# the title of a picture, and what it shows of the run of each cell's first seed, by the title of
# the cell's row and the run's folder
_OF_CELLS: Mapping[str, tuple[str, Callable[[Picture, str, Path], Parts]]] = {
    "routers": (
        "Router scores over training",
        lambda _, title, folder: router_panels(folder / METRICS, Result.read(folder).clients),
    ),
    "weights": ("Collaboration weights at stages of training, first seed", _weights),
    "domains": ("Collaboration weights{whose} over training, first seed", _domains),
    "labels": (
        "Who has which classes",
        lambda _, title, folder: (experts.distribution(Result.read(folder)),),
    ),
    "k-means": (
        "Clients clustered by their classes",
        lambda _, title, folder: (experts.clustering(Result.read(folder)),),
    ),
    "experts": ("Accuracy of each expert over rounds, first seed", _experts),
    "gate": ("Decisions of the gate, first seed", _gate),
}


def _curves(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced) -> Parts:
    """Return the test metric of each client, or its mean over clients, over training; a row that
    trains nothing is a level line. Training is counted in local iterations, or in rounds if clients
    that take part in none are scored: a panel for each group of them.
    """
    rows = dict.fromkeys(cell.row for cell in cells)
    marked = max(len(cell.evaluations) for cell in cells) <= chart.MARKED
    styles = {r: look_of(k, marked) for k, r in enumerate(rows)}
    charts: dict[str, list[Line]] = {}
    kinds: dict[str, str] = {}  # the column of each panel: only within one are panels compared
    count, axis = counted(bool(cells[0].groups))
    ends = {
        cell.column: max(count(c.evaluations[-1]) for c in cells if c.column == cell.column)
        for cell in cells
    }

    def line(cell: Cell, value: Value) -> Line:
        points = [(count(e), value(e)) for e in thinned(cell.evaluations, POINTS)]
        level = [(0, points[0][1]), (ends[cell.column], points[0][1])]
        return Line(points if points[-1][0] else level, reproduced.rows[cell.row], styles[cell.row])

    for cell in cells:
        title = reproduced.columns[cell.column]
        if picture.kind in ("mean", "curves"):
            values = {
                f"{title}, {unseen(group)}": group_test(group) for group in cell.groups or ()
            } or {title: group_test("")}
            for panel, value in values.items():
                kinds[panel] = title
                charts.setdefault(panel, []).append(line(cell, value))
            continue
        for i in picture.clients or cell.clients:
            kinds[f"{title}: {i}"] = title
            charts.setdefault(f"{title}: {i}", []).append(line(cell, test_of(i)))
    samples = legend((styles[r].sample, reproduced.rows[r]) for r in styles)
    name = ", ".join(dict.fromkeys(str(cell.metric) for cell in cells))
    drawn = chart.panels(charts, axis, name, broad=picture.kind == "curves", kinds=kinds)
    return (f"{name.capitalize()}{{whose}} over training, first seed", samples, drawn)


def _bars(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced) -> Parts:
    """Return the mean of each row with its deviation over seeds, column by column, from 0."""
    rows, shown = list(dict.fromkeys(cell.row for cell in cells)), {}
    for cell in (cell for cell in cells if isfinite(cell.mean)):
        title = f"{reproduced.columns[cell.column]}, {reproduced.rows[cell.row]}"
        tooltip = f"{title}: {plus_minus(cell.mean, cell.std or None)}"
        colour = look_of(rows.index(cell.row)).colour
        low, high = cell.mean - cell.std, cell.mean + cell.std
        shown[title] = marks.Interval(cell.mean, low, high, tooltip, colour)
    name, most = str(cells[0].metric), max((row.high for row in shown.values()), default=1.0)
    return (f"Mean {name}", marks.intervals(shown, name, (0, 1.04 * most)))


def _sweep(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced) -> Parts:
    """Return a line for each tau, over s."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for cell in cells:
        lines.setdefault(cell.settings["router_every"], []).append(
            (cell.settings["router_steps"], cell.mean)
        )
    drawn = [
        Line(sorted(points), f"tau {tau}", look_of(k))
        for k, (tau, points) in enumerate(sorted(lines.items()))
    ]
    charts = {next(iter(reproduced.columns.values())): drawn}
    panel = chart.panels(charts, "s, router steps per update", f"mean {cells[0].metric}")
    title = f"Mean {cells[0].metric} by how often and how long routers learn"
    return (title, chart.samples(drawn), panel)


_OF_ALL: Mapping[str, Callable[[Picture, Sequence[Cell], Reproduced], Parts]] = {
    "clients": _curves,
    "mean": _curves,
    "curves": _curves,
    "sweep": _sweep,
    "bars": _bars,
}
