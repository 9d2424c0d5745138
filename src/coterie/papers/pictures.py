"""The papers' figures, drawn from results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coterie.core.result import Result
from coterie.papers.reproduced import Cell, Reproduced
from coterie.papers.tables import Picture
from coterie.reports import chart, classes, collaboration, experts, marks
from coterie.reports.chart import Line, Style
from coterie.reports.collaboration import Weights
from coterie.reports.curves import Value, group_test, of_iteration, of_round, router_panels, test_of
from coterie.reports.experts import Choices
from coterie.reports.parts import COLOURS, escape, legend, thinned, unseen

POINTS = 120  # of a curve, at most
Parts = tuple[str, ...]  # of a picture: its title, and HTML


def _choice(cell: Cell) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in cell.choice.items())


def _name(reproduced: Reproduced, cell: Cell) -> str:
    chosen = _choice(cell)
    return str(reproduced.rows[cell.row]) + (f" ({chosen})" if chosen else "")


def _picture(picture: Picture, reproduced: Reproduced, runs: Path) -> Parts:
    """Title and parts of one picture."""
    cells = [
        cell
        for cell in reproduced.cells
        if (not picture.rows or cell.row in picture.rows)
        and (not picture.columns or cell.column in picture.columns)
    ]
    if not cells:
        return ("",)
    title, *parts = _KINDS[picture.kind](picture, cells, reproduced, runs)
    return (picture.title or title, *parts)


def _headed(reproduced: Reproduced, cell: Cell, *parts: str) -> list[str]:
    """Parts of one cell under its name; nothing without parts."""
    heading = (
        f"<h3>{escape(reproduced.rows[cell.row])}, {escape(reproduced.columns[cell.column])}</h3>"
    )
    return [heading, *parts] if any(parts) else []


def _routers(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    parts: list[str] = []
    for cell in cells:
        clients = Result.read(runs / cell.folders[0]).clients
        parts += _headed(
            reproduced, cell, *router_panels(runs / cell.folders[0] / "metrics.jsonl", clients)
        )
    return ("Router scores over training", *parts)


def _weights_of(cell: Cell, runs: Path) -> Weights | None:
    return Weights.of(cell.title, Result.read(runs / cell.folders[0]))


def _weights(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    """W of each row at some iterations."""
    parts: list[str] = []
    for cell in cells:
        if weights := _weights_of(cell, runs):
            parts += _headed(
                reproduced,
                cell,
                collaboration.at_stages(weights, picture.iterations),
                collaboration.scale(weights.top),
            )
    return ("Collaboration weights at stages of training, first seed", *parts)


def _domains(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    """Return a client's weights for each other one."""
    parts: list[str] = []
    for cell in cells:
        if weights := _weights_of(cell, runs):
            parts += _headed(reproduced, cell, collaboration.domains(weights, picture.clients))
    whose = f" of {', '.join(picture.clients)}" if picture.clients else ""
    return (f"Collaboration weights{whose} over training, first seed", *parts)


def _labels(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    return (
        "Who has which classes",
        *_each(cells, reproduced, runs, lambda title, result: classes.distribution(result)),
    )


def _k_means(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    return (
        "Clients clustered by their classes",
        *_each(cells, reproduced, runs, lambda title, result: classes.clustering(result)),
    )


def _experts(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    def curves(title: str, result: Result) -> str:
        choices = Choices.of(title, result)
        return experts.expert_curves(choices) if choices else ""

    return (
        "Accuracy of each expert over rounds, first seed",
        *_each(cells, reproduced, runs, curves),
    )


def _gate(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    def decided(title: str, result: Result) -> str:
        choices = Choices.of(title, result)
        return experts.choice_maps([choices]) + experts.decisions(title, result) if choices else ""

    return ("Decisions of the gate, first seed", *_each(cells, reproduced, runs, decided))


def _each(
    cells: Sequence[Cell], reproduced: Reproduced, runs: Path, draw: Callable[[str, Result], str]
) -> list[str]:
    """Return what is drawn of the result of each cell's first seed, by the title of its row, under
    the cell's name.
    """
    drawn = ((cell, draw(cell.title, Result.read(runs / cell.folders[0]))) for cell in cells)
    return [part for cell, shown in drawn for part in _headed(reproduced, cell, shown)]


def _styles(cells: Sequence[Cell]) -> dict[str, Style]:
    """Return a look for each row; without markers where there are many points."""
    points = max(len(cell.evaluations) for cell in cells)
    rows = dict.fromkeys(cell.row for cell in cells)
    return {
        r: Style(COLOURS[k % len(COLOURS)], k, marked=points <= chart.MARKED)
        for k, r in enumerate(rows)
    }


def _curves(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    """Return the test metric of each client, or its mean over clients, over training; a row that
    trains nothing is a level line.

    Training is counted in local iterations, or in rounds where clients are scored that take part in
    none: a panel for each group of them.
    """
    styles = _styles(cells)
    charts: dict[str, list[Line]] = {}
    kinds: dict[str, str] = {}  # the column of each panel: only within one are panels compared
    count, axis = (of_round, "rounds") if cells[0].groups else (of_iteration, "local iterations")
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
    names = {str(cell.metric): None for cell in cells}
    name = ", ".join(names)
    whose = f" of {', '.join(picture.clients)}" if picture.clients else ""
    drawn = chart.panels(charts, axis, name, broad=picture.kind == "curves", kinds=kinds)
    return (f"{name.capitalize()}{whose} over training, first seed", samples, drawn)


def _bars(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    """Return the mean of each row, a group of bars for each column."""
    rows = list(dict.fromkeys(cell.row for cell in cells))
    colours = {r: COLOURS[k % len(COLOURS)] for k, r in enumerate(rows)}
    groups = {
        reproduced.columns[c]: [
            marks.Bar(cell.mean, cell.std, reproduced.rows[cell.row], colours[cell.row])
            for cell in cells
            if cell.column == c
        ]
        for c in dict.fromkeys(cell.column for cell in cells)
    }
    samples = legend(
        (f'<i class="swatch" style="background:{colours[r]}"></i>', reproduced.rows[r])
        for r in rows
    )
    name = str(cells[0].metric)
    return (f"Mean {name}", samples, marks.bars(groups, name))


def _sweep(picture: Picture, cells: Sequence[Cell], reproduced: Reproduced, runs: Path) -> Parts:
    """One line for each tau, over s."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for cell in cells:
        lines.setdefault(cell.settings["router_every"], []).append(
            (cell.settings["router_steps"], cell.mean)
        )
    styles = {tau: Style(COLOURS[k % len(COLOURS)], k) for k, tau in enumerate(sorted(lines))}
    drawn = [Line(sorted(points), f"tau {tau}", styles[tau]) for tau, points in lines.items()]
    samples = legend((styles[tau].sample, f"tau {tau}") for tau in sorted(lines))
    panel = chart.panels(
        {next(iter(reproduced.columns.values())): drawn},
        "s, router steps per update",
        f"mean {cells[0].metric}",
    )
    return (
        f"Mean {cells[0].metric} by how often and how long routers learn",
        samples,
        panel,
    )


_KINDS: Mapping[str, Callable[[Picture, Sequence[Cell], Reproduced, Path], Parts]] = {
    "clients": _curves,
    "mean": _curves,
    "curves": _curves,
    "routers": _routers,
    "sweep": _sweep,
    "weights": _weights,
    "domains": _domains,
    "bars": _bars,
    "labels": _labels,
    "k-means": _k_means,
    "experts": _experts,
    "gate": _gate,
}
