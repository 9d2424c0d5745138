"""The pages of a reproduction: measured and published numbers, verdicts and figures."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from coterie.core.files import write_atomically
from coterie.core.metrics import direction, prediction, sort_key
from coterie.core.result import MetricInfo
from coterie.papers.pictures import _name, _picture
from coterie.papers.reproduced import Cell, Reproduced
from coterie.papers.tables import Picture
from coterie.reports.parts import bars, escape, figure, page, prose, section, table, verdicts

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


def plus_minus(mean: float | None, std: float | None, digits: int = 2) -> str:
    """Return a mean, and its deviation where there is one."""
    if mean is None:
        return ""
    return figure(mean, digits) + (f" ± {figure(std, digits)}" if std else "")


def _measured(reproduced: Reproduced, cell: Cell) -> str:
    return plus_minus(cell.mean, cell.std if len(reproduced.seeds) > 1 else None)


def notes(reproduced: Reproduced) -> list[str]:
    """Return notes for a fair comparison, and the statements that could not be judged."""
    count = reproduced.unjudged
    one, many = (
        "statement of the paper is not judged: not all that it speaks",
        "statements of the paper are not judged: not all that they speak",
    )
    return [
        *reproduced.notes,
        *([f"{count} {one if count == 1 else many} of was run."] if count else []),
    ]


def said(reproduced: Reproduced) -> Iterator[tuple[bool | None, str, str]]:
    """Return the paper's statements: whether each holds, or None if that is open; the statement
    with its place in the paper; and the measured numbers.
    """
    for s in reproduced.statements:
        yield (
            s.state,
            f"{reproduced.columns[s.column]}: {s.says} ({s.source})",
            s.measured,
        )


def _metric(reproduced: Reproduced, column: str) -> MetricInfo:
    return reproduced.metrics[column]


def _has_published(cells: Sequence[Cell]) -> bool:
    return any(cell.published is not None for cell in cells)


def _percent(value: float) -> str:
    return f"{value:.0f}"


def _synced(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the metric after one more synchronisation; unseen clients only have what the server
    sent.
    """
    return {} if cells[0].groups else {"synced": [figure(cell.mean_synced) for cell in cells]}


def _lead(reproduced: Reproduced, column: str) -> str:
    metric = _metric(reproduced, column)
    return f"{_LEADS[reproduced.shows]} {metric} over clients; {direction(metric)}."


def _beside(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return what is known of the cells of a column beside the metric: Imp.%, measured and the
    paper's, loss, spread, W error, unseen clients.
    """
    kinds: dict[str, tuple[Callable[[Cell], float | None], Callable[[float], str]]] = {
        "Imp.%": (lambda cell: cell.improved, _percent),
        "Imp.%, paper": (lambda cell: cell.published_improved, _percent),
        "loss": (lambda cell: cell.loss, lambda value: figure(value, 3)),
        "± between clients": (lambda cell: cell.between_clients, figure),
        "W error": (lambda cell: cell.weights_error, figure),
        "best": (lambda cell: cell.best, figure),
        "best of ten": (lambda cell: cell.best_of_last_ten, figure),
        "gate, %": (lambda cell: cell.gate_accuracy, figure),
    }
    if groups := cells[0].groups:  # the spread would mix them
        del kinds["± between clients"]
    else:
        del kinds["best"], kinds["best of ten"]
    lines = {
        group: [plus_minus(cell.mean_of(group), cell.std_of(group)) for cell in cells]
        for group in groups or ()
    }
    for name, (of, form) in kinds.items():
        values = [of(cell) for cell in cells]
        if any(value is not None for value in values):
            lines[name] = ["" if value is None else form(value) for value in values]
    return lines


def terminal(reproduced: Reproduced) -> list[Table]:
    """Tables that fit 80 columns, one for each column, and a second one for classifiers and
    where the paper tells more than the metric.
    """
    shown = []
    for c, title in reproduced.columns.items():
        cells = reproduced.of(c)
        paper, beside = _has_published(cells), _beside(cells)
        metric = f"{title}: {_metric(reproduced, c)}, {direction(_metric(reproduced, c))}"
        one = _plain(
            metric,
            (
                "row",
                "measured",
                *(("paper",) if paper else ()),
                "params",
                "MFLOPs",
                "kB up, down",
                "s",
            ),
        )
        for cell in cells:
            traffic = ", ".join(
                f"{count / 1000:,.0f}"
                for count in (cell.bytes_up_per_round, cell.bytes_down_per_round)
            )
            work, size = (
                f"{cell.flops_per_token / 1e6:.2f}",
                f"{cell.trainable_parameters / 1000:,.0f} k",
            )
            published = (plus_minus(cell.published, cell.published_std),) if paper else ()
            one.add_row(
                _name(reproduced, cell),
                _measured(reproduced, cell),
                *published,
                size,
                work,
                traffic,
                f"{cell.wall_s:.0f}",
            )
        shown.append(one)
        if (
            beside.keys() & {"Imp.%, paper", "W error", "gate, %"}
            or not _metric(reproduced, c).lower_is_better
        ):
            two = _plain(f"{title}, beside the mean", ("row", *beside))
            for cell, *values in zip(cells, *beside.values(), strict=True):
                two.add_row(_name(reproduced, cell), *values)
            shown.append(two)
    return shown


def _plain(title: str, header: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for k, name in enumerate(header):
        shown.add_column(name, justify="right" if k else "left", no_wrap=k > 0, overflow="fold")
    return shown


def markdown(reproduced: Reproduced) -> str:
    """Return the whole reproduction as one Markdown page."""
    lines = [f"# {reproduced.title}", "", _about(reproduced), ""]
    for c, title in reproduced.columns.items():
        cells = reproduced.of(c)
        columns = {
            "row": [_name(reproduced, cell) for cell in cells],
            "measured": [_measured(reproduced, cell) for cell in cells],
            "paper": [plus_minus(cell.published, cell.published_std) for cell in cells],
            **_synced(cells),
            **_beside(cells),
            "parameters": [f"{cell.trainable_parameters:,}" for cell in cells],
            "active": [
                "" if cell.active_parameters is None else f"{cell.active_parameters:,}"
                for cell in cells
            ],
            f"MFLOPs/{prediction(_metric(reproduced, c))}": [
                f"{cell.flops_per_token / 1e6:.2f}" for cell in cells
            ],
            "kB up": [f"{cell.bytes_up_per_round / 1000:,.0f}" for cell in cells],
            "kB down": [f"{cell.bytes_down_per_round / 1000:,.0f}" for cell in cells],
            "s": [f"{cell.wall_s:.0f}" for cell in cells],
        }
        lines += [f"## {title}", "", _lead(reproduced, c), ""]
        lines += [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
        lines += [f"| {' | '.join(cells_)} |" for cells_ in zip(*columns.values(), strict=True)]
        if c in reproduced.order:
            lines += [
                "",
                f"Order of the rows against the paper's: Kendall's tau {reproduced.order[c]:.2f}.",
            ]
        lines.append("")
    if reproduced.statements:
        lines += [
            "## What the paper says",
            "",
            INTERVALS,
            "",
            "| verdict | statement | on | measured |",
            "| --- | --- | --- | --- |",
        ]
        for s in reproduced.statements:
            column = reproduced.columns[s.column]
            lines.append(f"| {s.word} | {s.says} ({s.source}) | {column} | {s.measured} |")
        lines.append("")
    lines += [f"- {note}" for note in notes(reproduced)]
    return "\n".join(lines).rstrip() + "\n"


def _about(reproduced: Reproduced) -> str:
    machine, versions = reproduced.machine, reproduced.versions
    where = ""
    if machine is not None:
        threads = f"{machine.threads} thread" + "s" * (machine.threads > 1)
        where = f"{machine.device}, {machine.dtype}, {threads}, "
    changed = f", with {', '.join(reproduced.overrides)}" if reproduced.overrides else ""
    options = f"--scale {reproduced.scale} --seeds {len(reproduced.seeds)}"
    command = " ".join([f"coterie reproduce {reproduced.name} {options}", *reproduced.part])
    metrics = dict.fromkeys(
        f"{_metric(reproduced, c)} ({direction(_metric(reproduced, c))})"
        for c in reproduced.columns
    )
    return (
        f"`{command}`{changed}. Mean {' or '.join(metrics)} "
        f"over clients, mean ± deviation over seeds {reproduced.seeds}; {reproduced.scored}. Bytes "
        f"are per client and round, "
        f"seconds those of a run with all clients. {where}"
        f"coterie {versions.coterie}, torch {versions.torch}."
    )


def write_page(path: Path, reproduced: Reproduced, pictures: Sequence[Picture], runs: Path) -> None:
    """Write the reproduction as one self-contained HTML file.

    Args:
        path: Of the file.
        reproduced: What `reproduce` returned.
        pictures: What to draw.
        runs: The folder that the cells' folders are in.

    Raises:
        SaveError: It could not be written.
    """
    parts = [
        section(f"picture-{k}", *_picture(picture, reproduced, runs))
        for k, picture in enumerate(pictures)
    ]
    for c, title in reproduced.columns.items():
        cells = reproduced.of(c)
        metric, what = _metric(reproduced, c), prediction(_metric(reproduced, c))
        best = min(range(len(cells)), key=lambda k: sort_key(cells[k].mean, metric))
        columns = {
            "row": [_name(reproduced, cell) for cell in cells],
            "measured": [_measured(reproduced, cell) for cell in cells],
            **(
                {"paper": [plus_minus(cell.published, cell.published_std) for cell in cells]}
                if _has_published(cells)
                else {}
            ),
            **_synced(cells),
            **_beside(cells),
            "trainable parameters": bars([cell.trainable_parameters for cell in cells], ",.0f"),
            f"MFLOPs per {what}": bars([cell.flops_per_token for cell in cells], ",.2f", 1e6),
            "kB up per round": bars([cell.bytes_up_per_round for cell in cells], ",.1f", 1000),
            "kB down per round": bars([cell.bytes_down_per_round for cell in cells], ",.1f", 1000),
            "seconds": bars([cell.wall_s for cell in cells], ",.0f"),
        }
        about = f"<p>{escape(_lead(reproduced, c))}</p>"
        order = (
            f"<p>Order against the paper's: Kendall's tau {reproduced.order[c]:.2f}.</p>"
            if c in reproduced.order
            else ""
        )
        parts.append(
            section(
                f"column-{c}",
                title,
                about,
                table(list(columns), list(zip(*columns.values(), strict=True)), best),
                order,
            )
        )
    if reproduced.statements:
        intervals = f"<p class=note>{escape(INTERVALS)}</p>"
        parts.append(
            section("statements", "What the paper says", intervals, verdicts(said(reproduced)))
        )
    noted = "".join(f"<p class=note>{prose(note)}</p>" for note in notes(reproduced))
    about = escape(_about(reproduced).replace("`", ""))
    body = (
        f"<header><h1>{escape(reproduced.title)}</h1><p "
        f"class=about>{about}</p>{noted}</header><main>{''.join(parts)}</main>"
    )
    write_atomically(path, page(reproduced.title, body))
