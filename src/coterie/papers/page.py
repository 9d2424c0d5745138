"""The pages of a reproduction: measured and published numbers, verdicts and figures."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from coterie.core.files import write_atomically
from coterie.core.metrics import direction, prediction, sort_key
from coterie.papers.pictures import _name, _picture
from coterie.papers.reproduced import Cell, Reproduced
from coterie.papers.tables import Picture
from coterie.reports.parts import (
    bars,
    by_columns,
    computed_with,
    escape,
    figure,
    page,
    plus_minus,
    prose,
    section,
    verdicts,
)
from coterie.reports.tables import fitted

INTERVALS = (
    "Intervals are Student's 95 % intervals over seeds of the difference between runs of the same "
    "seed; a statement whose interval reaches across its bound is undecided."
)
_BEST = "chosen by the test data themselves, as in the paper, of the mean"
_LEADS = {
    "mean": "Mean",
    "best": f"Best of all evaluations, {_BEST}",
    "best_of_last_ten": f"Best of the last ten evaluations, {_BEST}",
    "gate_error": "Samples whose expert's anchor does not have their class: mean",
}


def notes(reproduced: Reproduced) -> list[str]:
    """Return notes for a fair comparison, and the statements that could not be judged."""
    count = reproduced.unjudged
    missing = f"Statements that are not judged, as not all they are about was run: {count}."
    return [*reproduced.notes, *([missing] if count else [])]


def statements_of(reproduced: Reproduced) -> Iterator[tuple[bool | None, str, str]]:
    """Return the paper's statements: whether each holds, or None if that is open; the statement
    with its place in the paper; and the measured numbers.
    """
    for s in reproduced.statements:
        unfinished = "unfinished: " if s.unfinished else ""
        says = f"{unfinished}{reproduced.columns[s.column]}: {s.says} ({s.source})"
        yield s.state, says, s.measured


def _figures(reproduced: Reproduced, column: str) -> dict[str, list[str]]:
    """Return the columns of a table that pages show before the costs; some are empty texts only."""
    cells = reproduced.of(column)
    figures = {
        "row": [_name(reproduced, cell) for cell in cells],
        "measured": [plus_minus(cell.mean, cell.std or None) for cell in cells],
        "paper": [
            "" if cell.published is None else plus_minus(cell.published, cell.published_std or None)
            for cell in cells
        ],
    }
    if not cells[0].groups:  # unseen clients only have what the server sent
        figures["synced"] = [figure(cell.mean_synced) for cell in cells]
    return figures | _beside(cells)


def _lead(reproduced: Reproduced, column: str) -> str:
    metric = reproduced.metrics[column]
    return f"{_LEADS[reproduced.shows]} {metric} over clients; {direction(metric)}."


def _beside(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the known figures of a column's cells beside the metric."""
    columns = {
        group: [plus_minus(cell.mean_of(group), cell.std_of(group) or None) for cell in cells]
        for group in cells[0].groups or ()
    }
    groups = bool(cells[0].groups)
    kinds = [
        ("Imp.%", [cell.improved for cell in cells], 0),
        ("Imp.%, paper", [cell.published_improved for cell in cells], 0),
        ("loss", [cell.loss for cell in cells], 3),
        # over all clients, groups would be mixed
        ("± between clients", [None if groups else cell.between_clients for cell in cells], 2),
        ("W error", [cell.weights_error for cell in cells], 2),
        ("best", [cell.best if groups else None for cell in cells], 2),
        ("best of ten", [cell.best_of_last_ten if groups else None for cell in cells], 2),
        ("gate, %", [cell.gate_accuracy for cell in cells], 2),
    ]
    return columns | {
        name: ["" if value is None else figure(value, digits) for value in values]
        for name, values, digits in kinds
        if any(value is not None for value in values)
    }


def _costs(cells: Sequence[Cell], what: str) -> dict[str, tuple[list[float | None], str, float]]:
    """Return the columns on costs: the figures, their form, and the unit that divides them."""
    return {
        "parameters": ([cell.trainable_parameters for cell in cells], ",.0f", 1),
        "active": ([cell.active_parameters for cell in cells], ",.0f", 1),
        f"MFLOPs/{what}": ([cell.flops_per_token for cell in cells], ".2f", 1e6),
        "kB up": ([cell.bytes_up_per_round for cell in cells], ",.0f", 1000),
        "kB down": ([cell.bytes_down_per_round for cell in cells], ",.0f", 1000),
        "s": ([cell.wall_s for cell in cells], ".0f", 1),
    }


def terminal(reproduced: Reproduced, width: int = 80) -> list[Table]:
    """Return tables of at most `width` characters: one of each column, and of what is beside."""
    shown = []
    for c, title in reproduced.columns.items():
        cells, metric = reproduced.of(c), reproduced.metrics[c]
        columns, beside = _figures(reproduced, c), _beside(cells)
        names = [name for name in ("row", "measured", "paper") if any(columns[name])]
        lines = [
            (
                *(columns[name][k] for name in names),
                f"{cell.trainable_parameters / 1000:,.0f} k",
                f"{cell.flops_per_token / 1e6:.2f}",
                f"{cell.bytes_up_per_round / 1000:,.0f}, {cell.bytes_down_per_round / 1000:,.0f}",
                f"{cell.wall_s:.0f}",
            )
            for k, cell in enumerate(cells)
        ]
        header = (*names, "params", "MFLOPs", "kB up, down", "s")
        shown.append(fitted(f"{title}: {metric}, {direction(metric)}", header, lines, width))
        if beside.keys() & {"Imp.%, paper", "W error", "gate, %"} or not metric.lower_is_better:
            values = zip(columns["row"], *beside.values(), strict=True)
            shown.append(fitted(f"{title}, beside the mean", ("row", *beside), values, width))
    return shown


def markdown(reproduced: Reproduced) -> str:
    """Return the whole reproduction as one Markdown page."""
    lines = [f"# {reproduced.title}", "", _about(reproduced), ""]
    for c, title in reproduced.columns.items():
        cells, what = reproduced.of(c), prediction(reproduced.metrics[c])
        columns = _figures(reproduced, c) | {
            name: ["" if value is None else f"{value / unit:{form}}" for value in values]
            for name, (values, form, unit) in _costs(cells, what).items()
        }
        lines += [f"## {title}", "", _lead(reproduced, c), ""]
        lines += [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
        lines += [f"| {' | '.join(cells_)} |" for cells_ in zip(*columns.values(), strict=True)]
        if c in reproduced.order:
            tau = f"{reproduced.order[c]:.2f}"
            lines += ["", f"Order of the rows against the paper's: Kendall's tau {tau}."]
        lines.append("")
    if reproduced.statements:
        lines += ["## What the paper says", "", INTERVALS, ""]
        lines += ["| verdict | statement | on | measured |", "| --- | --- | --- | --- |"]
        for s in reproduced.statements:
            column = reproduced.columns[s.column]
            lines.append(f"| {s.word} | {s.says} ({s.source}) | {column} | {s.measured} |")
        lines.append("")
    lines += [f"- {note}" for note in notes(reproduced)]
    return "\n".join(lines).rstrip() + "\n"


def _about(reproduced: Reproduced) -> str:
    where = computed_with(reproduced.machine, reproduced.versions).removeprefix(", ")
    changed = f", with {', '.join(reproduced.overrides)}" if reproduced.overrides else ""
    options = f"--scale {reproduced.scale} --seeds {len(reproduced.seeds)}"
    command = " ".join([f"coterie reproduce {reproduced.name} {options}", *reproduced.part])
    metrics = dict.fromkeys(f"{of} ({direction(of)})" for of in reproduced.metrics.values())
    return (
        f"`{command}`{changed}. Mean {' or '.join(metrics)} "
        f"over clients, mean ± deviation over seeds {reproduced.seeds}; {reproduced.scored}. Bytes "
        f"are per client and round, seconds those of a run with all clients. {where}."
    )


def write_page(path: Path, reproduced: Reproduced, pictures: Sequence[Picture], runs: Path) -> None:
    """Write one self-contained HTML file; `pictures` are drawn from `runs`. Raises SaveError."""
    parts = [
        section(f"picture-{k}", *_picture(picture, reproduced, runs))
        for k, picture in enumerate(pictures)
    ]
    for c, title in reproduced.columns.items():
        cells, metric = reproduced.of(c), reproduced.metrics[c]
        best = min(range(len(cells)), key=lambda k: sort_key(cells[k].mean, metric))
        columns = {name: texts for name, texts in _figures(reproduced, c).items() if any(texts)} | {
            name.replace("/", " per "): bars(*costs)  # which may wrap
            for name, costs in _costs(cells, prediction(metric)).items()
        }
        about = f"<p>{escape(_lead(reproduced, c))}</p>"
        order = ""
        if c in reproduced.order:
            order = f"<p>Order against the paper's: Kendall's tau {reproduced.order[c]:.2f}.</p>"
        parts.append(section(f"column-{c}", title, about, by_columns(columns, best), order))
    if reproduced.statements:
        intervals = f"<p class=note>{escape(INTERVALS)}</p>"
        judged = verdicts(statements_of(reproduced))
        parts.append(section("statements", "What the paper says", intervals, judged))
    noted = "".join(f"<p class=note>{prose(note)}</p>" for note in notes(reproduced))
    parts += [section("notes", "Notes", noted)] if noted else []
    header = f"<p class=about>{escape(_about(reproduced).replace('`', ''))}</p>"
    write_atomically(path, page(reproduced.title, header, "".join(parts)))
