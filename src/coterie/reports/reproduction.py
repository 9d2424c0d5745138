"""What a reproduction shows: tables of measured beside published numbers, verdicts, and the paper's pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from coterie.evaluation import badness, direction, label, metric_of, prediction
from coterie.records import read_json
from coterie.reports import chart, collaboration, experts
from coterie.reports.chart import Line, Style
from coterie.reports.collaboration import Weights
from coterie.reports.experts import Choices
from coterie.reports.html import router_panels, test_of
from coterie.reports.parts import COLOURS, bars, escape, figure, legend, page, section, table, thinned, unseen, verdicts
from coterie.reproductions import Picture
from coterie.tensors import write_atomically

Json = Mapping[str, Any]
POINTS = 120  # of a curve, at most
_BEST = "chosen by the test data themselves, as in the paper, of the mean"
_LEADS = {
    "mean": "Mean",
    "best": f"Best of all evaluations, {_BEST}",
    "best_of_last_ten": f"Best of the last ten evaluations, {_BEST}",
    "gate_error": "Samples whose expert's anchor does not have their class: mean",
}


def plus_minus(mean: float | None, std: float | None, digits: int = 2) -> str:
    """A mean, and its deviation where there is one."""
    if mean is None:
        return ""
    return figure(mean, digits) + (f" ± {figure(std, digits)}" if std else "")


def _measured(found: Json, cell: Json) -> str:
    return plus_minus(cell["mean"], cell["std"] if len(found["seeds"]) > 1 else None)


def _of(found: Json, column: str) -> list[Json]:
    """The cells of a column, in the order of the rows."""
    own = {cell["row"]: cell for cell in found["cells"] if cell["column"] == column}
    return [own[r] for r in found["rows"] if r in own]


def _verdict(statement: Json) -> str:
    return "holds" if statement["holds"] else "does not hold"


def _choice(cell: Json) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in cell["choice"].items())


def _name(found: Json, cell: Json) -> str:
    chosen = _choice(cell)
    return str(found["rows"][cell["row"]]) + (f" ({chosen})" if chosen else "")


def notes(found: Json) -> list[str]:
    """What a reader must know to compare, and what could not be judged."""
    count = found["unjudged"]
    one, many = (
        "statement of the paper is not judged: not all that it speaks",
        "statements of the paper are not judged: not all that they speak",
    )
    return [*found["notes"], *([f"{count} {one if count == 1 else many} of was run."] if count else [])]


def said(found: Json) -> Iterator[tuple[bool, str, str]]:
    """The paper's statements: whether each holds, the statement with its place in the paper, and the measured numbers."""
    for s in found["statements"]:
        yield s["holds"], f"{found['columns'][s['column']]}: {s['says']} ({s['source']})", s["detail"]


def _metric(found: Json, column: str) -> Json:
    return metric_of(_of(found, column)[0])


def _has_published(cells: Sequence[Json]) -> bool:
    return any(cell["published"] is not None for cell in cells)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _optional(value: float | None) -> str:
    return "" if value is None else figure(value)


def _synced(cells: Sequence[Json]) -> dict[str, list[str]]:
    """The metric after one more synchronisation; unseen clients have nothing but what the server sent."""
    return {} if cells[0].get("groups") else {"synced": [figure(cell["mean_synced"]) for cell in cells]}


def _lead(found: Json, column: str) -> str:
    metric = _metric(found, column)
    return f"{_LEADS[found['shows']]} {label(metric)} over clients; {direction(metric)}."


def _beside(cells: Sequence[Json]) -> dict[str, list[str]]:
    """What is known of the cells of a column beside the metric: Imp.%, measured and the paper's, loss, spread, W error, unseen clients."""
    kinds = {
        "Imp.%": ("improved", _percent),
        "Imp.%, paper": ("published_improved", _percent),
        "loss": ("loss", lambda value: "" if value is None else figure(value, 3)),
        "± between clients": ("between_clients", figure),
        "W error": ("weights_error", _optional),
        "best": ("best", _optional),
        "best of ten": ("best_of_last_ten", _optional),
        "gate, %": ("gate_accuracy", _optional),
    }
    if groups := cells[0].get("groups"):  # the spread would mix them
        del kinds["± between clients"]
    else:
        del kinds["best"], kinds["best of ten"]
    known = {name: (key, form) for name, (key, form) in kinds.items() if any(cell.get(key) is not None for cell in cells)}
    found = {
        group: [plus_minus(cell["groups"][group], (cell.get("groups_std") or {}).get(group)) for cell in cells] for group in groups or ()
    }
    return found | {name: [form(cell.get(key)) for cell in cells] for name, (key, form) in known.items()}


def terminal(found: Json) -> list[Table]:
    """Tables that fit 80 columns, one for each column, and a second one for classifiers and where the paper tells more than the metric."""
    shown = []
    for c, title in found["columns"].items():
        cells = _of(found, c)
        paper, beside = _has_published(cells), _beside(cells)
        metric = f"{title}: {label(_metric(found, c))}, {direction(_metric(found, c))}"
        one = _plain(metric, ("row", "measured", *(("paper",) if paper else ()), "params", "MFLOPs", "kB up, down", "s"))
        for cell in cells:
            traffic = ", ".join(f"{cell[key] / 1000:,.0f}" for key in ("bytes_up_per_round", "bytes_down_per_round"))
            work, size = f"{cell['flops_per_token'] / 1e6:.2f}", f"{cell['trainable_parameters'] / 1000:,.0f} k"
            published = (plus_minus(cell["published"], cell["published_std"]),) if paper else ()
            one.add_row(_name(found, cell), _measured(found, cell), *published, size, work, traffic, f"{cell['wall_s']:.0f}")
        shown.append(one)
        if beside.keys() & {"Imp.%, paper", "W error", "gate, %"} or not _metric(found, c)["lower_is_better"]:
            two = _plain(f"{title}, beside the mean", ("row", *beside))
            for cell, *values in zip(cells, *beside.values(), strict=True):
                two.add_row(_name(found, cell), *values)
            shown.append(two)
    return shown


def _plain(title: str, header: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for k, name in enumerate(header):
        shown.add_column(name, justify="right" if k else "left", no_wrap=k > 0, overflow="fold")
    return shown


def markdown(found: Json) -> str:
    """The whole reproduction as one Markdown page."""
    lines = [f"# {found['title']}", "", _about(found), ""]
    for c, title in found["columns"].items():
        cells = _of(found, c)
        columns = {
            "row": [_name(found, cell) for cell in cells],
            "measured": [_measured(found, cell) for cell in cells],
            "paper": [plus_minus(cell["published"], cell["published_std"]) for cell in cells],
            **_synced(cells),
            **_beside(cells),
            "parameters": [f"{cell['trainable_parameters']:,}" for cell in cells],
            "active": ["" if cell["active_parameters"] is None else f"{cell['active_parameters']:,}" for cell in cells],
            f"MFLOPs/{prediction(_metric(found, c))}": [f"{cell['flops_per_token'] / 1e6:.2f}" for cell in cells],
            "kB up": [f"{cell['bytes_up_per_round'] / 1000:,.0f}" for cell in cells],
            "kB down": [f"{cell['bytes_down_per_round'] / 1000:,.0f}" for cell in cells],
            "s": [f"{cell['wall_s']:.0f}" for cell in cells],
        }
        lines += [f"## {title}", "", _lead(found, c), ""]
        lines += [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
        lines += [f"| {' | '.join(cells_)} |" for cells_ in zip(*columns.values(), strict=True)]
        if c in found["order"]:
            lines += ["", f"Order of the rows against the paper's: Kendall's tau {found['order'][c]:.2f}."]
        lines.append("")
    if found["statements"]:
        lines += ["## What the paper says", "", "| verdict | statement | on | measured |", "| --- | --- | --- | --- |"]
        for s in found["statements"]:
            lines.append(f"| {_verdict(s)} | {s['says']} ({s['source']}) | {found['columns'][s['column']]} | {s['detail']} |")
        lines.append("")
    lines += [f"- {note}" for note in notes(found)]
    return "\n".join(lines).rstrip() + "\n"


def _about(found: Json) -> str:
    machine, versions = found["machine"], found["versions"]
    threads = f"{machine['threads']} thread" + "s" * (machine["threads"] > 1)
    changed = f", with {', '.join(found['overrides'])}" if found["overrides"] else ""
    command = " ".join([f"coterie reproduce {found['name']} --scale {found['scale']} --seeds {len(found['seeds'])}", *found["part"]])
    metrics = dict.fromkeys(f"{label(_metric(found, c))} ({direction(_metric(found, c))})" for c in found["columns"])
    return (
        f"`{command}`{changed}. Mean {' or '.join(metrics)} "
        f"over clients, mean ± deviation over seeds {found['seeds']}; {found['scored']}. Bytes are per client and round, "
        f"seconds those of a run with all clients. {machine['device']}, {machine['dtype']}, {threads}, "
        f"coterie {versions['coterie']}, torch {versions['torch']}."
    )


def write_page(path: Path, found: Json, pictures: Sequence[Picture], runs: Path) -> None:
    """Write the reproduction as one self-contained HTML file.

    Args:
        path: Of the file.
        found: What `reproduce` found.
        pictures: What to draw.
        runs: The folder that the cells' folders are in.

    Raises:
        SaveError: It could not be written.
    """
    parts = [section(f"picture-{k}", *_picture(picture, found, runs)) for k, picture in enumerate(pictures)]
    for c, title in found["columns"].items():
        cells = _of(found, c)
        metric, what = _metric(found, c), prediction(_metric(found, c))
        best = min(range(len(cells)), key=lambda k: badness(cells[k]["mean"], metric))
        columns = {
            "row": [_name(found, cell) for cell in cells],
            "measured": [_measured(found, cell) for cell in cells],
            **({"paper": [plus_minus(cell["published"], cell["published_std"]) for cell in cells]} if _has_published(cells) else {}),
            **_synced(cells),
            **_beside(cells),
            "trainable parameters": bars([cell["trainable_parameters"] for cell in cells], ",.0f"),
            f"MFLOPs per {what}": bars([cell["flops_per_token"] for cell in cells], ",.2f", 1e6),
            "kB up per round": bars([cell["bytes_up_per_round"] for cell in cells], ",.1f", 1000),
            "kB down per round": bars([cell["bytes_down_per_round"] for cell in cells], ",.1f", 1000),
            "seconds": bars([cell["wall_s"] for cell in cells], ",.0f"),
        }
        about = f"<p>{escape(_lead(found, c))}</p>"
        order = f"<p>Order against the paper's: Kendall's tau {found['order'][c]:.2f}.</p>" if c in found["order"] else ""
        parts.append(section(f"column-{c}", title, about, table(list(columns), list(zip(*columns.values(), strict=True)), best), order))
    if found["statements"]:
        parts.append(section("statements", "What the paper says", verdicts(said(found))))
    told = "".join(f"<p class=note>{escape(note)}</p>" for note in notes(found))
    about = escape(_about(found).replace("`", ""))
    body = f"<header><h1>{escape(found['title'])}</h1><p class=about>{about}</p>{told}</header><main>{''.join(parts)}</main>"
    write_atomically(path, page(found["title"], body))


def _picture(picture: Picture, found: Json, runs: Path) -> tuple[str, ...]:
    """Title and parts of one picture."""
    cells = [
        cell
        for cell in found["cells"]
        if (not picture.rows or cell["row"] in picture.rows) and (not picture.columns or cell["column"] in picture.columns)
    ]
    if not cells:
        return ("",)
    title, *parts = _KINDS[picture.kind](picture, cells, found, runs)
    return (picture.title or title, *parts)


def _headed(found: Json, cell: Json, *parts: str) -> list[str]:
    """Parts of one cell under its name; nothing without parts."""
    heading = f"<h3>{escape(found['rows'][cell['row']])}, {escape(found['columns'][cell['column']])}</h3>"
    return [heading, *parts] if any(parts) else []


def _routers(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    parts: list[str] = []
    for cell in cells:
        clients = read_json(runs / cell["folders"][0] / "result.json")["clients"]
        parts += _headed(found, cell, *router_panels(runs / cell["folders"][0] / "metrics.jsonl", clients))
    return ("Router scores over training", *parts)


def _weights_of(cell: Json, runs: Path) -> Weights | None:
    return Weights.of(cell["title"], read_json(runs / cell["folders"][0] / "result.json"))


def _weights(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    """W of each row at some iterations."""
    parts: list[str] = []
    for cell in cells:
        if weights := _weights_of(cell, runs):
            parts += _headed(found, cell, collaboration.at_stages(weights, picture.iterations), collaboration.scale(weights.top))
    return ("Collaboration weights at stages of training, first seed", *parts)


def _domains(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    """A client's weights for each other one."""
    parts: list[str] = []
    for cell in cells:
        if weights := _weights_of(cell, runs):
            parts += _headed(found, cell, collaboration.domains(weights, picture.clients))
    whose = f" of {', '.join(picture.clients)}" if picture.clients else ""
    return (f"Collaboration weights{whose} over training, first seed", *parts)


def _labels(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    return ("Who has which classes", *_each(cells, found, runs, lambda title, result: experts.distribution(result)))


def _k_means(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    return ("Clients clustered by their classes", *_each(cells, found, runs, lambda title, result: experts.clustering(result)))


def _experts(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    def curves(title: str, result: Json) -> str:
        choices = Choices.of(title, result)
        return experts.expert_curves(choices) if choices else ""

    return ("Accuracy of each expert over rounds, first seed", *_each(cells, found, runs, curves))


def _gate(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    def decided(title: str, result: Json) -> str:
        choices = Choices.of(title, result)
        return experts.choice_maps([choices]) + experts.decisions(title, result) if choices else ""

    return ("Decisions of the gate, first seed", *_each(cells, found, runs, decided))


def _each(cells: Sequence[Json], found: Json, runs: Path, draw: Callable[[str, Json], str]) -> list[str]:
    """What is drawn of the result of each cell's first seed, by the title of its row, under the cell's name."""
    drawn = ((cell, draw(cell["title"], read_json(runs / cell["folders"][0] / "result.json"))) for cell in cells)
    return [part for cell, shown in drawn for part in _headed(found, cell, shown)]


def _styles(cells: Sequence[Json]) -> dict[str, Style]:
    """A look for each row; without markers where there are many points."""
    points = max(len(cell["evaluations"]) for cell in cells)
    rows = dict.fromkeys(cell["row"] for cell in cells)
    return {r: Style(COLOURS[k % len(COLOURS)], k, marked=points <= chart.MARKED) for k, r in enumerate(rows)}


def _curves(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    """The test metric of each client, or its mean over clients, over training; a row that trains nothing is a level line.

    Training is counted in local iterations, or in rounds where clients are scored that take part in none: a panel for each group of them.
    """
    styles = _styles(cells)
    charts: dict[str, list[Line]] = {}
    kinds: dict[str, str] = {}  # the column of each panel: only within one are panels compared
    count, axis = ("round", "rounds") if cells[0].get("groups") else ("iteration", "local iterations")
    ends = {cell["column"]: max(c["evaluations"][-1][count] for c in cells if c["column"] == cell["column"]) for cell in cells}

    def line(cell: Json, value: Callable[[Json], float]) -> Line:
        points = [(e[count], value(e)) for e in thinned(cell["evaluations"], POINTS)]
        level = [(0, points[0][1]), (ends[cell["column"]], points[0][1])]
        return Line(points if points[-1][0] else level, found["rows"][cell["row"]], styles[cell["row"]])

    for cell in cells:
        title = found["columns"][cell["column"]]
        if picture.kind in ("mean", "curves"):
            values = {f"{title}, {unseen(group)}": _of_group(group) for group in cell.get("groups") or ()} or {title: _test}
            for panel, value in values.items():
                kinds[panel] = title
                charts.setdefault(panel, []).append(line(cell, value))
            continue
        for i in picture.clients or cell["clients"]:
            kinds[f"{title}: {i}"] = title
            charts.setdefault(f"{title}: {i}", []).append(line(cell, test_of(i)))
    samples = legend((styles[r].sample, found["rows"][r]) for r in styles)
    names = {label(metric_of(cell)): None for cell in cells}
    name = ", ".join(names)
    whose = f" of {', '.join(picture.clients)}" if picture.clients else ""
    drawn = chart.panels(charts, axis, name, broad=picture.kind == "curves", kinds=kinds)
    return (f"{name.capitalize()}{whose} over training, first seed", samples, drawn)


def _test(evaluation: Json) -> float:
    return float(evaluation["test"])


def _of_group(group: str) -> Callable[[Json], float]:
    """What gives the mean of a group of unseen clients in an evaluation."""
    return lambda evaluation: float(evaluation["groups"][group])


def _bars(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    """The mean of each row, a group of bars for each column."""
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    colours = {r: COLOURS[k % len(COLOURS)] for k, r in enumerate(rows)}
    groups = {
        found["columns"][c]: [
            chart.Bar(cell["mean"], cell["std"], found["rows"][cell["row"]], colours[cell["row"]]) for cell in cells if cell["column"] == c
        ]
        for c in dict.fromkeys(cell["column"] for cell in cells)
    }
    samples = legend((f'<i class="swatch" style="background:{colours[r]}"></i>', found["rows"][r]) for r in rows)
    name = label(metric_of(cells[0]))
    return (f"Mean {name}", samples, chart.bars(groups, name))


def _sweep(picture: Picture, cells: Sequence[Json], found: Json, runs: Path) -> tuple[str, ...]:
    """One line for each tau, over s."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for cell in cells:
        lines.setdefault(cell["settings"]["router_every"], []).append((cell["settings"]["router_steps"], cell["mean"]))
    styles = {tau: Style(COLOURS[k % len(COLOURS)], k) for k, tau in enumerate(sorted(lines))}
    drawn = [Line(sorted(points), f"tau {tau}", styles[tau]) for tau, points in lines.items()]
    samples = legend((styles[tau].sample, f"tau {tau}") for tau in sorted(lines))
    panel = chart.panels({next(iter(found["columns"].values())): drawn}, "s, router steps per update", f"mean {label(metric_of(cells[0]))}")
    return f"Mean {label(metric_of(cells[0]))} by how often and how long routers learn", samples, panel


_KINDS: Mapping[str, Callable[[Picture, Sequence[Json], Json, Path], tuple[str, ...]]] = {
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
