"""Curves over rounds: scores, routers' weights, and the privacy spent."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from coterie.core.foreign import json_of, opened
from coterie.core.metrics import prediction
from coterie.core.result import ClientResult, Evaluation, Result
from coterie.methods import METHODS
from coterie.reports import chart, tokens
from coterie.reports.chart import Line, Style, look_of
from coterie.reports.parts import BLUE, captioned, folded, legend, thinned, unseen
from coterie.reports.tokens import Expert

Value = Callable[[Evaluation], float]  # the value of a curve at an evaluation
FAINT = 0.4  # opacity of the first of several blocks; that of the last is 1
PANELS = 24  # clients with curves of their own, at most
POINTS = 60  # of a client's curve, at most
ROUTERS = (
    "<p>The mean routing weight of each kind of expert over the tokens of the training "
    "batches, by round. One line per block; stronger colours are deeper blocks.</p>"
)
SPENT = (
    "<p>The privacy spent by all training exchanges up to a round. How it is computed, and "
    "what it covers, is stated below the scores.</p>"
)


def _curves(results: Sequence[Result]) -> str:
    """Return a panel of the mean over clients, and one for each client: the test metric against
    local iterations, one line per method.

    A method without training is a level line, but for the base, beside which the curves of trained
    models often look alike: it is in the tables.
    """
    own_result, metric = results[-1], results[-1].metric
    results = [*(r for r in results[:-1] if r.method != "pretrained"), own_result]
    looks = [*range(1, len(results)), 0]  # the run's own method has the first colour
    groups = own_result.groups or {}
    at, count = counted(bool(groups))
    scored_on = {r.curve.windows if r.curve else None for r in results}
    windows = scored_on.pop() if len(scored_on) == 1 else None  # None: all
    series = [r.curve.points if windows and r.curve else r.evaluations for r in results]
    last = max((at(e) for points in series for e in points), default=0)
    styles = [
        look_of(k, r.rounds > 0 and len(points) <= chart.MARKED)
        for k, r, points in zip(looks, results, series, strict=True)
    ]

    def line(result: Result, evaluations: Sequence[Evaluation], style: Style, value: Value) -> Line:
        points = [(at(e), value(e)) for e in thinned(evaluations, POINTS)]
        level = [(0, points[0][1]), (last, points[0][1])]
        return Line(points if result.rounds else level, METHODS[result.method].title, style)

    def lines(value: Value) -> list[Line]:
        return [line(r, p, s, value) for r, p, s in zip(results, series, styles, strict=True)]

    axes, ratios = (count, str(metric)), metric.lower_is_better
    means = {f"Mean of {unseen(g)}": lines(group_test(g)) for g in groups}
    means = means or {f"Mean over {len(own_result.clients)} clients": lines(group_test(""))}
    drawn_methods = zip(results, styles, strict=True)
    samples = legend((style.sample, METHODS[r.method].title) for r, style in drawn_methods)
    whole = chart.panels(means, *axes, broad=True, ratios=ratios)
    members = {
        g: [i for i, client in own_result.clients.items() if (client.group or "") == g]
        for g in groups or [""]
    }
    charts = {
        g: {i: lines(test_of(i)) for i in clients[: PANELS // len(members)]}
        for g, clients in members.items()
    }
    everyone = chain.from_iterable(c.values() for c in charts.values())
    limits = chart.around(list(chart.finite_heights(everyone)))
    parts = ""
    for g, drawn in charts.items():
        known = len(members[g])
        some = f"<p class=note>The first {len(drawn)} of {known} clients.</p>"
        parts += some if len(drawn) < known else ""
        panels = chart.panels(drawn, *axes, limits if g else None, ratios=ratios)
        parts += folded(f"{known} client{'s' * (known > 1)}, {unseen(g)}", panels) if g else panels
    what = "windows" if prediction(metric) == "token" else "examples"
    why = "to show progress; the tables use the whole test sets"
    part = f"<p class=note>On {windows} {what} of each client's test set, {why}.</p>"
    return f"{samples}{part if windows else ''}{whole}<h3>Client by client</h3>{parts}"


def counted(rounds: bool) -> tuple[Callable[[Evaluation], int], str]:
    """Return what reads the completed rounds, or else local iterations, and its unit."""
    field, unit = ("round", "rounds") if rounds else ("iteration", "local iterations")
    return attrgetter(field), unit


def group_test(group: str) -> Value:
    """Return a function that reads the mean test metric of a group, or with "" of all clients."""
    return lambda evaluation: evaluation.mean_of(group)


def test_of(client: str) -> Value:
    """Return a function that reads a client's test metric; NaN if it was not evaluated."""
    return lambda evaluation: (
        evaluation.clients[client].test if client in evaluation.clients else math.nan
    )


def router_panels(path: Path, clients: Mapping[str, ClientResult]) -> tuple[str, ...]:
    """Return panels of routing weights over training, from metrics.jsonl; () without routers."""
    series = router_series(path)
    charts: dict[str, list[Line]] = {}
    for i in (i for i in series if i in clients):
        mixture, blocks = tokens.experts(clients[i]), len(series[i][0][1])
        # Clients report these weights: skip those of an unexpected shape.
        points = [
            (at, w)
            for at, w in series[i]
            if len(w) == blocks and all(len(row) == len(mixture) for row in w)
        ]
        charts |= {i: _depths(points, mixture)} if points else {}
    if not charts:
        return ()
    shown = {i: charts[i] for i in thinned(list(charts), PANELS)}
    drawn = chain.from_iterable(shown.values())
    ends = {line.name: line.style for line in drawn if line.style.strength in (FAINT, 1)}
    samples = legend((style.sample, name) for name, style in ends.items())
    some = f"<p class=note>{len(shown)} of {len(charts):,} clients.</p>"
    left_out = some if len(shown) < len(charts) else ""
    panels = chart.panels(shown, "local iterations", "mean routing weight", (0, 1))
    return ROUTERS, samples, left_out, panels


def _privacy(path: Path, result: Result) -> tuple[str, ...]:
    """Return curves of epsilon by round, and of a norm C that adapts; () without privacy."""
    if (privacy := result.privacy) is None:
        return ()
    lines, drawn = _of_kind(path, "privacy"), []
    style = Style(BLUE, marked=result.rounds <= chart.MARKED)
    curves = {
        "epsilon": ("epsilon", f"Epsilon at delta {privacy.delta:.2g}", 0.0),
        "clip": ("C", "Clipping norm C", privacy.clip),
    }
    for key, (axis, title, start) in curves.items():
        # the last exchange of each round counts
        values = {0: start} | {line["round"]: line[key] for line in lines if key in line}
        if len(set(values.values())) > 1:
            axes = chart.Axes("rounds", axis, (0, 1.06 * max(values.values())))
            line = Line(list(values.items()), title, style)
            drawn.append(captioned(title, "", chart.panel(title, [line], axes)))
    return (SPENT, chart.grid(drawn)) if drawn else ()


def router_series(path: Path) -> dict[str, list[tuple[int, list[list[float]]]]]:
    """Return local iterations and mean weights (blocks, experts) of experts' steps, by client."""
    series: dict[str, list[tuple[int, list[list[float]]]]] = {}
    for line in _of_kind(path, "train"):
        routers = {name: value for name, value in line.items() if name.startswith("router/")}
        routers.pop("router/router", None)
        weights = next(iter(routers.values()), None)
        if weights is not None:
            series.setdefault(line["client"], []).append((line["iteration"], weights))
    return series


def _of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in metrics.jsonl; [] without the file."""
    if not path.exists():
        return []
    with opened(path) as file:
        lines = [json_of(line, finite=False) for line in file]
    return [line for line in lines if line["kind"] == kind]


def _depths(
    series: Sequence[tuple[int, list[list[float]]]], mixture: Sequence[Expert]
) -> list[Line]:
    """Return a line for each block and kind of expert, or each expert if all are of one kind."""
    depth, generalists = len(series[0][1]), sum(expert.key[0] == "g" for expert in mixture)
    specialists = len(mixture) - generalists
    kinds = [(expert.name, slice(j, j + 1)) for j, expert in enumerate(mixture)]
    if generalists and specialists:
        kinds = [
            ("generalist" + "s" * (generalists > 1), slice(0, generalists)),
            ("specialist" + "s" * (specialists > 1), slice(generalists, len(mixture))),
        ]
    strengths = [FAINT + (1 - FAINT) * block / depth for block in range(depth - 1)] + [1.0]
    return [
        Line(
            [(at, sum(weights[block][part])) for at, weights in series],
            f"{name}, block {block + 1}",
            Style(mixture[part.start].colour, k, strength, marked=False),
        )
        for k, (name, part) in enumerate(kinds)
        for block, strength in enumerate(strengths)
    ]
