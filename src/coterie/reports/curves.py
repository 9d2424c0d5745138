"""What changes over rounds on a page: scores, routers' weights, and what privacy has spent."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from coterie.core.foreign import json_of, opened
from coterie.core.metrics import mean, prediction
from coterie.core.result import ClientResult, Evaluation, Result
from coterie.methods import METHODS
from coterie.reports import chart, tokens
from coterie.reports.chart import Line, Style
from coterie.reports.parts import BLUE, COLOURS, captioned, folded, legend, thinned, unseen
from coterie.reports.tokens import Expert

Value = Callable[[Evaluation], float]  # of a curve at a point
FAINT = 0.4  # the colour of the first of several blocks; the last has all of it
PANELS = 24  # clients with curves of their own, at most
POINTS = 60  # of a client's curve, at most
FAR = 3  # times as bad as all that follows: a base with which curves do not share a panel
ROUTERS = (
    "<p>The mean routing weight of each kind of expert over the tokens of the training "
    "batches, by round. One line per block; stronger colours are deeper blocks.</p>"
)
SPENT = (
    "<p>The privacy spent by all training exchanges up to a round. How it is computed, and "
    "what it covers, is stated below the scores.</p>"
)


def _curves(results: Sequence[Result]) -> str:
    """Return the mean over clients, and a panel per client: the test metric against local
    iterations, one line per method.

    A method without training is a level line. Where the base is so much worse than what is trained
    that curves cannot be told apart, the mean is shown once more without it, and clients' panels
    are without it, each with a range of its own.
    """
    own_result, metric = results[-1], results[-1].metric
    looks = [*range(1, len(results)), 0]  # the run's own method has the first
    groups = own_result.groups or {}
    at, count = (of_round, "rounds") if groups else (of_iteration, "local iterations")
    windows, series = _series(results)
    last = max((at(e) for points in series for e in points), default=0)
    styles = [
        Style(COLOURS[k % len(COLOURS)], k, marked=_marked(r, p))
        for k, r, p in zip(looks, results, series, strict=True)
    ]
    # Every method starts from the base, so that all curves begin where it stands.
    base = next((r for r in results if r.method == "pretrained"), None)

    def line(result: Result, evaluations: Sequence[Evaluation], style: Style, value: Value) -> Line:
        points = [(at(e), value(e)) for e in thinned(evaluations, POINTS)]
        start = [(0, value(base.evaluations[0]))] if base and not windows else []
        level = [(0, points[0][1]), (last, points[0][1])]
        return Line(
            level if result.rounds == 0 else start + points,
            METHODS[result.method].title,
            style,
        )

    def lines(value: Value) -> list[Line]:
        return [
            line(r, points, style, value)
            for r, points, style in zip(results, series, styles, strict=True)
        ]

    axes, ratios = (count, str(metric)), metric.lower_is_better
    mean_title = f"Mean over {len(own_result.clients)} clients"
    means = {f"Mean of {unseen(g)}": lines(group_test(g)) for g in groups}
    means = means or {mean_title: lines(mean_test)}
    far = ratios and not groups and _far(means[mean_title])
    if far:
        means["The same without the base"] = _trained(means[mean_title])
    samples = legend(
        (style.sample, METHODS[r.method].title) for r, style in zip(results, styles, strict=True)
    )
    kinds = (
        {t: t for t in (*means, *own_result.clients)} if far else None
    )  # each has a range of its own
    whole = chart.panels(means, *axes, broad=True, ratios=ratios, kinds=kinds)
    members = {
        g: [i for i, client in own_result.clients.items() if (client.group or "") == g]
        for g in groups or [""]
    }
    charts = {
        g: {
            i: _trained(lines(test_of(i))) if far else lines(test_of(i))
            for i in clients[: PANELS // len(members)]
        }
        for g, clients in members.items()
    }
    limits = (
        chart.around(drawn for of_group in charts.values() for drawn in of_group.values())
        if groups
        else None
    )
    parts = []
    for g, drawn in charts.items():
        known = len(members[g])
        note = (
            f"<p class=note>The first {len(drawn)} of {known} clients.</p>"
            if len(drawn) < known
            else ""
        )
        panels = chart.panels(drawn, *axes, limits, ratios=ratios, kinds=kinds)
        parts.append(
            note
            + (folded(f"{known} client{'s' * (known > 1)}, {unseen(g)}", panels) if g else panels)
        )
    alone = ", without the base" if far else ""
    what = "windows" if prediction(metric) == "token" else "examples"
    part = (
        f"<p class=note>On {windows} {what} of each client's test set, to show progress; the "
        f"tables use the whole test sets.</p>"
    )
    return (
        f"{samples}{part if windows else ''}{whole}<h3>Client by client{alone}</h3>{''.join(parts)}"
    )


def _far(lines: Sequence[Line]) -> bool:
    """Whether the base is so much worse than what is trained that curves cannot be told apart."""
    trained = list(chart.finite_heights([_trained(lines)]))
    return bool(trained) and max(chart.finite_heights([lines])) > FAR * max(trained)


def _trained(lines: Sequence[Line]) -> list[Line]:
    """Return the lines without what is before training, and without level ones."""
    moving = [line for line in lines if len({y for _, y in line.points}) > 1]
    return [replace(line, points=[p for p in line.points if p[0] > 0]) for line in moving]


def of_round(evaluation: Evaluation) -> int:
    """Return the rounds that were done."""
    return evaluation.round


def of_iteration(evaluation: Evaluation) -> int:
    """Return the local iterations that were done."""
    return evaluation.iteration


def mean_test(evaluation: Evaluation) -> float:
    return mean(client.test for client in evaluation.clients.values())


def group_test(group: str) -> Value:
    """Return what gives the mean test metric of a group of unseen clients in an evaluation."""
    return lambda evaluation: evaluation.mean_of(group)


def test_of(client: str) -> Value:
    """What gives the test metric of a client in an evaluation; NaN where it was not there."""
    return lambda evaluation: (
        evaluation.clients[client].test if client in evaluation.clients else math.nan
    )


def _series(results: Sequence[Result]) -> tuple[int | None, list[Sequence[Evaluation]]]:
    """Return the points of each method's curve: of as large a part of the test sets, if all have
    such points, and how large; else of all.
    """
    parts = {r.curve.windows if r.curve else None for r in results}
    windows: int | None = parts.pop() if len(parts) == 1 else None
    return windows, [r.curve.points if windows and r.curve else r.evaluations for r in results]


def _marked(result: Result, points: Sequence[Evaluation]) -> bool:
    return result.rounds > 0 and len(points) <= chart.MARKED


def router_panels(path: Path, clients: Mapping[str, ClientResult]) -> tuple[str, ...]:
    """Mean routing weights over training, from metrics.jsonl; nothing where no client has a
    router.
    """
    series = router_series(path)
    charts: dict[str, list[Line]] = {}
    for i in (i for i in series if i in clients):
        mixture, blocks = tokens.experts(clients[i]), len(series[i][0][1])
        points = [
            (at, w)
            for at, w in series[i]
            if len(w) == blocks and all(len(row) == len(mixture) for row in w)
        ]  # what a client says
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
    """Return what was spent by each round, and the norm C if it adapts, from metrics.jsonl; nothing
    of a run without privacy.
    """
    if (privacy := result.privacy) is None:
        return ()
    lines, style, drawn = (
        _of_kind(path, "privacy"),
        Style(BLUE, marked=result.rounds <= chart.MARKED),
        [],
    )
    curves = {
        "epsilon": ("epsilon", f"Epsilon at delta {privacy.delta:.2g}", 0.0),
        "clip": ("C", "Clipping norm C", privacy.clip),
    }
    for key, (axis, title, start) in curves.items():
        values = {0: start} | {
            line["round"]: line[key] for line in lines if key in line
        }  # of a round's exchanges the last one
        if len(set(values.values())) > 1:
            line, limits = (
                Line(list(values.items()), title, style),
                (0, 1.06 * max(values.values())),
            )
            drawn.append(
                captioned(title, "", chart.panel(title, [line], chart.Axes("rounds", axis, limits)))
            )
    return (SPENT, chart.grid(drawn)) if drawn else ()


def router_series(path: Path) -> dict[str, list[tuple[int, list[list[float]]]]]:
    """By client: local iterations, and (blocks, experts) mean weights in the steps that trained
    the experts.
    """
    series: dict[str, list[tuple[int, list[list[float]]]]] = {}
    for line in _of_kind(path, "train"):
        weights = next(
            (
                value
                for name, value in line.items()
                if name.startswith("router/") and name != "router/router"
            ),
            None,
        )
        if weights is not None:
            series.setdefault(line["client"], []).append((line["iteration"], weights))
    return series


def _of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in metrics.jsonl; none where there is no such file."""
    if not path.exists():
        return []
    with opened(path) as file:
        lines = [json_of(line, finite=False) for line in file]
    return [line for line in lines if line["kind"] == kind]


def _depths(
    series: Sequence[tuple[int, list[list[float]]]], mixture: Sequence[Expert]
) -> list[Line]:
    """Return a line for each block and kind of expert: generalists against specialists, or single
    experts where all are of one kind.
    """
    depth, generalists = len(series[0][1]), sum(expert.key[0] == "g" for expert in mixture)
    kinds = [(expert.name, slice(j, j + 1)) for j, expert in enumerate(mixture)]
    if 0 < generalists < len(mixture):
        halves = {
            "generalist": slice(0, generalists),
            "specialist": slice(generalists, len(mixture)),
        }
        kinds = [
            (kind if half.stop - half.start == 1 else f"{kind}s", half)
            for kind, half in halves.items()
        ]
    return [
        Line(
            [(at, sum(weights[block][part])) for at, weights in series],
            f"{name}, block {block + 1}",
            Style(
                mixture[part.start].colour,
                k,
                1 if block == depth - 1 else FAINT + (1 - FAINT) * block / depth,
                marked=False,
            ),
        )
        for k, (name, part) in enumerate(kinds)
        for block in range(depth)
    ]
