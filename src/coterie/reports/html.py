"""`report.html` of a run or of a comparison: one self-contained file that works offline."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.evaluation import BOUNDS, badness, better, change, comparability, direction, label, mean, metric_of, prediction
from coterie.evaluation import best as best_of
from coterie.evaluation import rows as rows_of
from coterie.evaluation import worst as worst_of
from coterie.methods import METHODS
from coterie.records import read_json
from coterie.reports import chart, tokens
from coterie.reports.audit import audited
from coterie.reports.chart import Line, Style
from coterie.reports.collaboration import collaboration
from coterie.reports.experts import classes, experts
from coterie.reports.parts import (
    BLUE,
    COLOURS,
    FEW,
    Cell,
    bars,
    captioned,
    escape,
    figure,
    folded,
    legend,
    page,
    ranked,
    section,
    size,
    table,
    thinned,
    tiles,
    unseen,
)
from coterie.reports.tokens import Expert
from coterie.reports.verdict import verdict
from coterie.tensors import write_atomically

Json = Mapping[str, Any]
AUDITED = "audit.json"  # of a run that was audited
FAINT = 0.4  # the colour of the first of several blocks; the last has all of it
LOWER = {"loss": True, "between_clients": True, "improved": False, "weights_error": True, "gate_accuracy": False}  # which way is better
PANELS = 24  # clients with curves of their own, at most
POINTS = 60  # of a client's curve, at most

COSTS = (
    "<p>Per client. Bytes are those of the tensors in training messages. A client's state is what it must remember between rounds: its "
    "own parameters, the moments of its optimisers, and counters.</p>"
)
PEAK = (
    "<p class=note>Peak memory is the most that the whole process was ever resident in by the end of the row: Python, its libraries, the "
    "base model and all clients. Rows that run one after the other in one process pass it on, so a row's figure is never below that of the "
    "row that ran before it.</p>"
)
TEXTS = (
    "<p>The beginning of each client's test text, every token in the colour of the expert that the router of the chosen block gives the "
    "largest weight: the fuller the colour, the larger that weight. Below each text are the mean weights of its tokens. Rows are models, "
    "columns are texts: the framed pictures show a model on its own client's kind of text, the others on that of somebody else. Hover over "
    "a token, tap it, or reach it with Tab and the arrow keys, to see all weights.</p>"
    "<p class=note>These lines of the clients' texts are in this file because this run had all data on one machine. "
    "<code>--set samples=false</code> leaves them out. ¶ ends a document, ↵ a line; ◌ is a token that is but a part of a character.</p>"
)
ROUTERS = (
    "<p>The mean weight that the tokens of the training batches give each kind of expert in each round, one line per block: the fuller its "
    "colour, the deeper the block.</p>"
)
SPENT = (
    "<p>What all training exchanges up to a round have spent together. By what reckoning, and what it is for, is said under the scores.</p>"
)


def write_report(folder: Path, results: Sequence[Json], description: str) -> None:
    """Write `report.html` into a run's folder, from `results` and from the `metrics.jsonl` and `routing.json` that are there.

    Args:
        folder: The run's folder.
        results: What is in result.json of each method, the run's own last.
        description: Of the recipe.

    Raises:
        SaveError: It could not be written.
    """
    own, rows = results[-1], rows_of(results)
    metric = metric_of(own)
    routing = read_json(folder / "routing.json") if (folder / "routing.json").exists() else None
    about = f"seed {own['seed']}, {own['rounds']} rounds, {_made_with(own)}"
    sections = {
        "scores": section(
            "scores",
            _heading(metric),
            _scored(rows),
            _scores(rows),
            _verdict(rows, own["method"]),
            _notes(comparability(rows, own["method"])),
        ),
        "training": section("training", f"{metric['name'].capitalize()} over training", _curves(results)),
        "weights": _collaboration(results),
        "labels": _labels(results),
        "experts": _experts(results),
        "routers": section("routers", "Router scores over training", *router_panels(folder / "metrics.jsonl", own["clients"])),
        "privacy": section("privacy", "Privacy over training", *_privacy(folder / "metrics.jsonl", own)),
        "audit": section("audit", "What the shared part gives away", *audited(_known_audit(folder))),
        "texts": section("texts", "Which expert reads which token", TEXTS, _of_how_many(routing, own), tokens.routing(routing))
        if routing
        else "",
        "costs": section("costs", "What it cost", COSTS, _once(results), _costs(rows, results), PEAK),
    }
    title = f"{own['recipe']}: {METHODS[own['method']].title}"
    write_atomically(folder / "report.html", page(title, _body(title, description, about, _headline(rows, own), sections)))


def write_comparison(folder: Path, comparison: Json, description: str) -> None:
    """Write `report.html` into a comparison's folder.

    Args:
        folder: The comparison's folder.
        comparison: What is in comparison.json.
        description: Of the recipe.

    Raises:
        SaveError: It could not be written.
    """
    rows, seeds = comparison["rows"], comparison["seeds"]
    metric = metric_of(rows[0])
    firsts = [folder / r["method"] / f"seed-{seeds[0]}" / "result.json" for r in rows]
    results = [read_json(path) for path in firsts if path.exists()]
    about = f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'} ({', '.join(map(str, seeds))}), {_made_with(comparison)}"
    deviation = "<p>± is the sample standard deviation over seeds.</p>" if len(seeds) > 1 else "<p>One seed: no deviation can be given.</p>"
    first = f"<p class=note>Of seed {seeds[0]}.</p>"
    sections = {
        "scores": section(
            "scores",
            _heading(metric),
            _scored(rows),
            deviation,
            _scores(rows),
            _verdict(rows, comparison.get("own", "")),
            _notes(comparison["notes"]),
        ),
        "clients": section("clients", "Spread between clients", *_spread(rows, results)),
        "training": section("training", f"{metric['name'].capitalize()} over training", first, _curves(results)) if results else "",
        "weights": _collaboration(results, first),
        "labels": _labels(results, first),
        "experts": _experts(results, first),
        "costs": section("costs", "What it cost", COSTS, _once(results), _costs(rows, results), PEAK),
    }
    title = f"{comparison['recipe']}: {len(rows)} methods"
    write_atomically(folder / "report.html", page(title, _body(title, description, about, "", sections)))


def _spread(rows: Sequence[Json], results: Sequence[Json]) -> list[str]:
    """What a dot is, and a strip of all clients or, where some are unseen, one for each group of them, all of one range."""
    of_group = {i: client.get("group", "") for i, client in results[-1]["clients"].items()} if results else {}
    strips: dict[str, chart.Strip] = {}
    for group in rows[0].get("groups") or [""]:
        shown = [i for i in rows[0]["clients"] if of_group.get(i, "") == group]
        strips[group] = {_title(r): ({i: r["clients"][i] for i in shown}, *_mean(r, group)) for r in rows}
    limits = chart.reach(strips.values())
    parts = ["<p>Each dot is a client, its mean over seeds; the stroke is their mean, the whisker its deviation over seeds.</p>"]
    for group, strip in strips.items():
        parts += [f"<h3>{escape(unseen(group))}</h3>"] * bool(group)
        parts.append(chart.strip(strip, label(metric_of(rows[0])), limits))
    return parts


def _mean(row: Json, group: str) -> tuple[float, float]:
    """The mean of a group of clients, "" for all, and its deviation over seeds; 0 in rows from before that was known."""
    return (row["groups"][group], (row.get("groups_std") or {}).get(group, 0.0)) if group else (row["mean"], row["std"])


def _known_audit(folder: Path) -> Json | None:
    """What an audit of the run found; None before there was one."""
    return read_json(folder / AUDITED) if (folder / AUDITED).exists() else None


def _heading(metric: Json) -> str:
    return label(metric).capitalize()


def _scored(rows: Sequence[Json]) -> str:
    """What the columns of the scores are."""
    told = {
        "loss": "<em>loss</em> is the mean test loss in nats, ",
        "between_clients": "<em>± between clients</em> the standard deviation over clients, ",
        "improved": "<em>Imp.%</em> the share of clients that do better than their own Local run of the same seed, ",
        "weights_error": "<em>W error</em> the share of collaboration weights on the wrong side of a threshold in the end, ",
    }
    beside = "".join(text for key, text in told.items() if _known(rows, key)).removesuffix(", ")
    which = direction(metric_of(rows[0]))
    if _known(rows, "groups"):
        return (
            f"<p>Over the whole test sets of clients that never take part in training and bring no labels; {which}. A column of means for "
            "each group of them; methods are ranked by the first, and of that group are also <em>best</em> and <em>best of last ten</em> "
            "evaluations during training, which are chosen on the test set, as in the paper, and so flatter every method, and "
            f"<em>gate</em>, the share of samples that went to an expert whose anchor has their class, and {beside}.</p>"
        )
    return (
        f"<p>Over each client's whole test set; {which}. <em>mean</em> and the clients' figures score each "
        f"client's model right after its last local iteration, <em>synced</em> after one more synchronisation. {beside}.</p>"
    )


def _known(rows: Sequence[Json], key: str) -> bool:
    return any(r.get(key) is not None for r in rows)


def _collaboration(results: Sequence[Json], note: str = "") -> str:
    """The section of collaboration weights, the last method first; nothing where no method has any."""
    parts = collaboration({METHODS[r["method"]].title: r for r in [*results[-1:], *results[:-1]]})
    return section("weights", "Collaboration", note, *parts) if parts else ""


def _labels(results: Sequence[Json], note: str = "") -> str:
    """The section of labels; all methods have the same."""
    parts = classes(results[-1]) if results else ()
    return section("labels", "Who has which classes", note, *parts) if parts else ""


def _experts(results: Sequence[Json], note: str = "") -> str:
    """The section of pools, the last method first; nothing where no method has any."""
    parts = experts({METHODS[r["method"]].title: r for r in [*results[-1:], *results[:-1]]})
    return section("experts", "Which expert is chosen for which class", note, *parts) if parts else ""


def _once(results: Sequence[Json]) -> str:
    """What the common expert costs."""
    once = max((r.get("once_bytes") or 0 for r in results), default=0)
    return f"<p>Beside all this, the common expert is sent once to everybody who embeds data by it: {size(once)}.</p>" if once else ""


def _of_how_many(routing: Json, own: Json) -> str:
    shown, clients = len(routing["texts"]), len(own["clients"])
    return f"<p class=note>The first {shown} of {clients} clients.</p>" if shown < clients else ""


def _made_with(found: Json) -> str:
    machine, versions = found["machine"], found["versions"]
    return f"{machine['device']}, {machine['dtype']}, coterie {versions['coterie']}, torch {versions['torch']}"


def _body(title: str, description: str, about: str, tiles: str, sections: Mapping[str, str]) -> str:
    names = {
        "scores": "Scores",
        "training": "Training",
        "weights": "Collaboration",
        "labels": "Classes",
        "experts": "Experts",
        "routers": "Routers",
        "privacy": "Privacy",
        "audit": "Audit",
        "texts": "Texts",
        "clients": "Clients",
        "costs": "Costs",
    }
    links = "".join(f'<a href="#{id}">{names[id]}</a>' for id, shown in sections.items() if shown)
    return (
        f"<header><h1>{escape(title)}</h1><p>{escape(description)}</p><p class=about>{escape(about)}</p></header>"
        f'<nav aria-label="Sections">{links}</nav><main>{tiles}{"".join(sections.values())}</main>'
    )


def _title(row: Json) -> str:
    return METHODS[row["method"]].title


def _headline(rows: Sequence[Json], result: Json) -> str:
    """The figures that people look for first, of the run's own method, whose result is given too."""
    own, metric = rows[-1], metric_of(rows[-1])
    unit = " %" if metric["unit"] == "%" else ""
    groups = own.get("groups") or {"": own["mean"]}
    found = [(f"{figure(x)}{unit}", f"mean {metric['name']}{f' of {unseen(g)}' if g else ''}, one seed") for g, x in groups.items()]
    others = [r for r in rows[:-1] if r["method"] not in BOUNDS]
    found += [_against(own, others, group) for group in groups] if others else []
    if (privacy := own["privacy"]) and privacy["epsilon"] is not None:
        of = ", of an experiment," if privacy.get("experiment") else ""
        found.append((f"{privacy['epsilon']:.2f}", f"epsilon{of} at delta {privacy['delta']:.2g}, {privacy['where']}"))
    for group, gate in _gates(result).items():
        found.append((f"{gate:.1f} %", f"gate accuracy of {unseen(group)}: samples given to an expert whose anchor has their class"))
    if own["improved"] is not None:
        found.append((f"{own['improved']:.0f} %", "of clients do better than alone"))
    if own["weights_error"] is not None:
        found.append((f"{own['weights_error']:.2f}", "W error: share of wrong collaboration weights"))
    found.append((size(own["bytes_up_per_round"]), "up per client and round"))
    if own["state_bytes"] is not None:
        found.append((size(own["state_bytes"]), "state of a client"))
    return tiles(found)


def _gates(result: Json) -> dict[str, float]:
    """Gate accuracy of each group of unseen clients at the end; nothing where there is no gate, or it has no anchors."""
    choices = result["evaluations"][-1].get("choices") or {}
    return {group: found["gate_accuracy"] for group, found in choices.items() if found["gate_accuracy"] is not None}


def _against(own: Json, others: Sequence[Json], group: str) -> tuple[str, str]:
    """How far a row is from the best other one, for a group of unseen clients or, "", for all; with a word that says which is better."""

    def value(row: Json) -> float:
        return float(row["groups"][group] if group else row["mean"])

    metric = metric_of(own)
    other = min(others, key=lambda r: badness(value(r), metric))
    (far, counted), ours, theirs = change(value(own), value(other), metric), value(own), value(other)
    way = "better than" if better(ours, theirs, metric) else "WORSE than" if far else "from"
    whose, unit = f" of {unseen(group)}" if group else "", " %" if metric["unit"] == "%" else ""
    return f"{abs(far):.1f} {counted}", f"{way} {_title(other)}, the best other row{whose}: from {figure(theirs)} to {figure(ours)}{unit}"


def _scores(rows: Sequence[Json]) -> str:
    """Figures over all clients, then a column per client; of many, the best and the worst, and a table of all folded away."""
    clients, metric = list(rows[-1]["clients"]), metric_of(rows[0])
    first, *others = rows[0].get("groups") or [""]
    means = [figure(r["mean"]) + (f" ± {figure(r['std'])}" if len(r["per_seed"]) > 1 else "") for r in rows]
    columns: dict[str, Sequence[Cell | str]] = {
        "method": [_title(r) for r in rows],
        unseen(first) if first else "mean": ranked([r["mean"] for r in rows], metric, texts=means),
    }
    for group in others:
        found = [(*_mean(r, group), len(r["per_seed"]) > 1) for r in rows]
        texts = [figure(mean) + (f" ± {figure(std)}" if several else "") for mean, std, several in found]
        columns[unseen(group)] = ranked([mean for mean, _, _ in found], metric, texts=texts)
    beside = {"loss": ("loss", 3), "between_clients": ("± between clients", 2), "improved": ("Imp.%", 0), "weights_error": ("W error", 2)}
    if first:
        beside = {"best": ("best", 2), "best_of_last_ten": ("best of last ten", 2), "gate_accuracy": ("gate, %", 1)} | beside
    else:
        columns["synced"] = ranked([r["mean_synced"] for r in rows], metric)
    for key, (name, digits) in beside.items():
        if _known(rows, key):
            way = {"lower_is_better": LOWER[key]} if key in LOWER else metric
            columns[name] = ranked([r.get(key) for r in rows], way, digits)
    few = len(columns) - 3 + len(clients) <= FEW
    if few:
        columns |= {i: ranked([r["clients"][i] for r in rows], metric) for i in clients}
    else:
        ends = {"best client": best_of, "worst client": worst_of}
        columns |= {name: ranked([end(r["clients"].values(), metric) for r in rows], metric) for name, end in ends.items()}
    shown = table(list(columns), list(zip(*columns.values(), strict=True)))
    if few:
        return shown
    everyone = table(["client", *map(_title, rows)], [[i, *(figure(r["clients"][i]) for r in rows)] for i in clients])
    return f"{shown}<details><summary>All {len(clients)} clients</summary>{everyone}</details>"


def _verdict(rows: Sequence[Json], own: str) -> str:
    said = verdict(rows, own)
    shown = re.sub("`(.*?)`", r"<code>\1</code>", escape(said))
    return f'<p class="verdict">{shown}</p>' if said else ""


def _costs(rows: Sequence[Json], results: Sequence[Json]) -> str:
    what = prediction(metric_of(rows[0]))
    served = {r["method"]: mean(c["bytes_down"] for c in r["clients"].values()) for r in results if r.get("groups")}
    unseen_clients = {"kB to an unseen client, once": bars([served.get(r["method"]) for r in rows], ",.1f", 1000)} if served else {}
    columns = {
        "method": [_title(r) for r in rows],
        "trainable parameters": bars([r["trainable_parameters"] for r in rows], ",.0f"),
        f"of these active per {what}": bars([r["active_parameters"] for r in rows], ",.0f"),
        f"MFLOPs per {what}, forward": bars([r["flops_per_token"] for r in rows], ",.2f", 1e6),
        "kB up per round": bars([r["bytes_up_per_round"] for r in rows], ",.1f", 1000),
        "kB down per round": bars([r["bytes_down_per_round"] for r in rows], ",.1f", 1000),
        **unseen_clients,
        "kB state of a client": bars([r["state_bytes"] for r in rows], ",.1f", 1000),
        "MB peak of the process": bars([r["peak_memory_bytes"] for r in rows], ",.0f", 1e6),
        "seconds, all clients": bars([r["wall_s"] for r in rows], ",.0f"),
    }
    return table(list(columns), list(zip(*columns.values(), strict=True)))


def _notes(notes: Sequence[str]) -> str:
    return '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else ""


def _curves(results: Sequence[Json]) -> str:
    """The mean over clients, and a panel per client: the test metric against local iterations, one line per method.

    A method without training is a level line.
    """
    own, metric = results[-1], metric_of(results[-1])
    looks = [*range(1, len(results)), 0]  # the run's own method has the first
    groups = own.get("groups") or {}
    unit, count = ("round", "rounds") if groups else ("iteration", "local iterations")
    windows, series = _series(results)
    last = max((e[unit] for points in series for e in points), default=0)
    styles = [Style(COLOURS[k % len(COLOURS)], k, marked=_marked(r, p)) for k, r, p in zip(looks, results, series, strict=True)]
    # Every method starts from the base, so that all curves begin where it stands.
    base = next((r for r in results if r["method"] == "pretrained"), None)

    def line(result: Json, found: Sequence[Json], style: Style, value: Callable[[Json], float]) -> Line:
        points = [(e[unit], value(e)) for e in thinned(found, POINTS)]
        start = [(0, value(base["evaluations"][0]))] if base and not windows else []
        level = [(0, points[0][1]), (last, points[0][1])]
        return Line(level if result["rounds"] == 0 else start + points, METHODS[result["method"]].title, style)

    def lines(value: Callable[[Json], float]) -> list[Line]:
        return [line(r, points, style, value) for r, points, style in zip(results, series, styles, strict=True)]

    means = {f"Mean of {unseen(g)}": lines(group_test(g)) for g in groups}
    means = means or {f"Mean over {len(own['clients'])} clients": lines(mean_test)}
    samples = legend((style.sample, METHODS[r["method"]].title) for r, style in zip(results, styles, strict=True))
    axes, ratios = (count, label(metric)), metric["lower_is_better"]
    whole = chart.panels(means, *axes, broad=True, ratios=ratios)
    members = {g: [i for i, client in own["clients"].items() if client.get("group", "") == g] for g in groups or [""]}
    charts = {g: {i: lines(test_of(i)) for i in clients[: PANELS // len(members)]} for g, clients in members.items()}
    limits = chart.around(drawn for of_group in charts.values() for drawn in of_group.values()) if groups else None
    parts = []
    for g, drawn in charts.items():
        known = len(members[g])
        note = f"<p class=note>The first {len(drawn)} of {known} clients.</p>" if len(drawn) < known else ""
        panels = chart.panels(drawn, *axes, limits, ratios=ratios)
        parts.append(note + (folded(f"{known} client{'s' * (known > 1)}, {unseen(g)}", panels) if g else panels))
    what = "windows" if prediction(metric) == "token" else "examples"
    part = f"<p class=note>On {windows} {what} of each client's test set, to see how training goes; the tables are of all of it.</p>"
    return f"{samples}{part if windows else ''}{whole}<h3>Client by client</h3>{''.join(parts)}"


def mean_test(evaluation: Json) -> float:
    return mean(own["test"] for own in evaluation["clients"].values())


def group_test(group: str) -> Callable[[Json], float]:
    """What gives the mean test metric of a group of unseen clients in an evaluation."""
    return lambda evaluation: float(evaluation["groups"][group])


def test_of(client: str) -> Callable[[Json], float]:
    """What gives the test metric of a client in an evaluation; NaN where it was not there."""
    return lambda evaluation: float(evaluation["clients"].get(client, {"test": math.nan})["test"])


def _series(results: Sequence[Json]) -> tuple[int | None, list[Sequence[Json]]]:
    """The points of each method's curve: of as large a part of the test sets, if all have such points, and how large; else of all."""
    parts = {r["curve"]["windows"] if r.get("curve") else None for r in results}
    windows: int | None = parts.pop() if len(parts) == 1 else None
    return windows, [r["curve"]["points"] if windows else r["evaluations"] for r in results]


def _marked(result: Json, points: Sequence[Json]) -> bool:
    return result["rounds"] > 0 and len(points) <= chart.MARKED


def router_panels(path: Path, clients: Mapping[str, Json]) -> tuple[str, ...]:
    """Mean routing weights over training, from metrics.jsonl; nothing where no client has a router."""
    series = router_series(path)
    charts: dict[str, list[Line]] = {}
    for i in (i for i in series if i in clients):
        mixture, blocks = tokens.experts(clients[i]), len(series[i][0][1])
        points = [(at, w) for at, w in series[i] if len(w) == blocks and all(len(row) == len(mixture) for row in w)]  # what a client says
        charts |= {i: _depths(points, mixture)} if points else {}
    if not charts:
        return ()
    ends = {line.name: line.style for lines in charts.values() for line in lines if line.style.strength in (FAINT, 1)}
    samples = legend((style.sample, name) for name, style in ends.items())
    return ROUTERS, samples, chart.panels(charts, "local iterations", "mean routing weight", (0, 1))


def _privacy(path: Path, own: Json) -> tuple[str, ...]:
    """What was spent by each round, and the norm C if it adapts, from metrics.jsonl; nothing of a run without privacy."""
    if not own.get("privacy"):
        return ()
    lines, style, drawn = _of_kind(path, "privacy"), Style(BLUE, marked=own["rounds"] <= chart.MARKED), []
    curves = {
        "epsilon": ("epsilon", f"Epsilon at delta {own['privacy']['delta']:.2g}", 0.0),
        "clip": ("C", "Clipping norm C", own["privacy"]["clip"]),
    }
    for key, (axis, title, start) in curves.items():
        values = {0: start} | {line["round"]: line[key] for line in lines if key in line}  # of a round's exchanges the last one
        if len(set(values.values())) > 1:
            line, limits = Line(list(values.items()), title, style), (0, 1.06 * max(values.values()))
            drawn.append(captioned(title, "", chart.panel(title, [line], chart.Axes("rounds", axis, limits))))
    return (SPENT, chart.grid(drawn)) if drawn else ()


def router_series(path: Path) -> dict[str, list[tuple[int, list[list[float]]]]]:
    """By client: local iterations, and (blocks, experts) mean weights in the steps that trained the experts."""
    found: dict[str, list[tuple[int, list[list[float]]]]] = {}
    for line in _of_kind(path, "train"):
        weights = next((value for name, value in line.items() if name.startswith("router/") and name != "router/router"), None)
        if weights is not None:
            found.setdefault(line["client"], []).append((line["iteration"], weights))
    return found


def _of_kind(path: Path, kind: str) -> list[Json]:
    """The lines of one kind in metrics.jsonl; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def _depths(series: Sequence[tuple[int, list[list[float]]]], mixture: Sequence[Expert]) -> list[Line]:
    """A line for each block and kind of expert: generalists against specialists, or single experts where all are of one kind."""
    depth, generalists = len(series[0][1]), sum(expert.key[0] == "g" for expert in mixture)
    kinds = [(expert.name, slice(j, j + 1)) for j, expert in enumerate(mixture)]
    if 0 < generalists < len(mixture):
        halves = {"generalist": slice(0, generalists), "specialist": slice(generalists, len(mixture))}
        kinds = [(kind if half.stop - half.start == 1 else f"{kind}s", half) for kind, half in halves.items()]
    return [
        Line(
            [(at, sum(weights[block][part])) for at, weights in series],
            f"{name}, block {block + 1}",
            Style(mixture[part.start].colour, k, 1 if block == depth - 1 else FAINT + (1 - FAINT) * block / depth, marked=False),
        )
        for k, (name, part) in enumerate(kinds)
        for block in range(depth)
    ]
