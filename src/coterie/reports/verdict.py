"""A verdict in plain words on the outcome of a table, also on a loss, and advice."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coterie.core.metrics import better, sort_key
from coterie.core.result import MetricInfo, Row
from coterie.core.result.rows import ALONE, BOUNDS, NAMED
from coterie.methods import METHODS
from coterie.reports.parts import figure, unseen

BASE, MIXTURE = "pretrained", "interpolation"
MIX = f" Or mix the predictions of Local and FedAvg: `--set method.name={MIXTURE}`."
SEEDS = "One seed: differences may be chance; use `coterie compare METHOD ... --seeds 3`."


def verdict(rows: Sequence[Row], own_method: str) -> str:
    """Return in a few sentences, without markup, which method did best, for how many clients or
    which groups, by how much, and what to do.

    If `own_method`, the method that was tried, has no row, the best one takes its place. Bounds are
    ignored: no user can have them. With several seeds, a difference counts if it exceeds its
    deviation.
    """
    known = [row for row in rows if row.method not in BOUNDS]
    if not known:
        return ""
    ranked = sorted(known, key=lambda row: sort_key(row.mean, row.metric))
    mine = next((row for row in known if row.method == own_method), ranked[0])
    others = [row for row in ranked if row is not mine]
    if not others:
        return (
            f"Only {_title(mine)} was run: `coterie compare {mine.method} local fedavg "
            f"--recipe RECIPE` says whether sharing helps."
        )
    rival = others[0]
    mixes = mine.groups or any(row.method == MIXTURE for row in rows)
    compared = _compared(mine, rival, "" if mixes else MIX)
    parts = (
        compared,
        _certainty(mine, rival),
        _why(known, (mine, rival)),
        _keystrokes(mine, rival),
    )
    return " ".join(part for part in parts if part)


def _why(rows: Sequence[Row], printed: Collection[Row]) -> str:
    """Return a sentence on why sharing helps or not, by client: Local's models against FedAvg's
    one; "" if not both were run, or within the deviation over seeds. `printed` have theirs already.
    """
    by_method = {row.method: row for row in rows}
    alone, shared = by_method.get(ALONE), by_method.get("fedavg")
    if alone is None or shared is None or alone.groups or _tied(alone, shared):
        return ""
    metric = alone.metric
    base = by_method.get(BASE)

    def figures(*of: Row) -> str:
        those = [f"{_title(r)} {_value(r.mean, metric)}" for r in of if r not in printed]
        return f" ({', '.join(those)})" if those else ""

    if base is not None and not any(better(r.mean, base.mean, metric) for r in (alone, shared)):
        return (
            f"There is too little data to train on: the base alone is better"
            f"{figures(base, shared, alone)}."
        )
    helped = [i for i, x in alone.clients.items() if better(shared.clients[i], x, metric)]
    if len(helped) == len(alone.clients):
        return (
            f"Each client alone has too little data, and their data are alike: one model of all "
            f"is better than each one's own{figures(shared, alone)}."
        )
    if not helped:
        return (
            f"One model of all is better for no client than its own{figures(shared, alone)}: each "
            f"has enough data, or their data differ too much."
        )
    names = ", ".join(helped[:NAMED]) + f" and {len(helped) - NAMED} more" * (len(helped) > NAMED)
    return (
        f"For {len(helped)} of {len(alone.clients)} clients ({names}), who have too little data "
        f"alone, one model of all is better than their own{figures(shared, alone)}. The others "
        f"have enough data, or data too different from the rest."
    )


def _keystrokes(mine: Row, rival: Row) -> str:
    """Return a sentence on what keyboards with the models save; "" if that was not measured."""
    if mine.words is None or rival.words is None:
        return ""
    return (
        f"A keyboard with its model saves a client {mine.words.keystrokes_saved:.0f} % of "
        f"keystrokes with {_title(mine)} and {rival.words.keystrokes_saved:.0f} % with "
        f"{_title(rival)}, measured on {mine.words.words:.0f} words of each."
    )


def _compared(mine: Row, rival: Row, mix: str) -> str:
    """Return two sentences on a method and the best of the others; `mix` is advice where the
    method is not best for all.
    """
    metric, ours, theirs = mine.metric, _title(mine), _title(rival)
    figures = f"{_value(mine.mean, metric)} against {_value(rival.mean, metric)}"
    if _tied(mine, rival):
        return f"On these data {ours} and {theirs} are alike ({figures}): take the simpler one."
    won = better(mine.mean, rival.mean, metric)
    first, second = (mine, rival) if won else (rival, mine)
    others = second.groups or {}
    groups = {unseen(g): (x, others[g]) for g, x in (first.groups or {}).items() if g in others}
    pairs = groups or {
        i: (x, second.clients[i]) for i, x in first.clients.items() if i in second.clients
    }
    level = [name for name, (x, y) in pairs.items() if math.isclose(x, y, rel_tol=1e-6)]
    ahead = [n for n, (x, y) in pairs.items() if n not in level and better(x, y, metric)]
    behind = len(pairs) - len(ahead) - len(level)
    if groups:
        whom = _which(ahead, groups, metric)
    else:
        whom = (
            f"{_whom(ahead, level, pairs)} ({_value(first.mean, metric)} against "
            f"{_value(second.mean, metric)})"
        )
    if won:
        advice = "Keep its models: they are under clients/."
        if behind:
            advice = f"Keep its models for those, and see the table for the others.{mix}"
        return f"On these data {ours} is better than {theirs}, the best other row, {whom}. {advice}"
    mix *= rival.method != BASE
    return f"On these data {theirs} is better than {ours} {whom}: {_advice_lost(rival)}{mix}"


def _which(
    ahead: Sequence[str], groups: Mapping[str, tuple[float, float]], metric: MetricInfo
) -> str:
    """Return for which groups the better method is better and for which not, with both figures."""
    texts = {
        name: f"{name} ({_value(x, metric)} against {_value(y, metric)})"
        for name, (x, y) in groups.items()
    }
    behind = [text for name, text in texts.items() if name not in ahead]
    return f"for {' and '.join(texts[name] for name in ahead) or 'no group'}" + (
        f", not for {' and '.join(behind)}" if behind else ""
    )


def _whom(ahead: Sequence[str], level: Sequence[str], pairs: Mapping[str, Any]) -> str:
    """Return for how many clients the better method is better, and as good."""
    if len(ahead) == len(pairs):
        return "for the only client" if len(pairs) == 1 else f"for all {len(pairs)} clients"
    those = f"for {len(ahead)} of {len(pairs)} clients"
    if len(ahead) + len(level) == len(pairs):
        return f"{those}, and as good for the other{'s' * (len(level) > 1)}"
    return f"on average, {those}"


def _advice_lost(rival: Row) -> str:
    if rival.method == ALONE:
        return "share less, or keep the local models."
    if rival.method == BASE:
        return (
            "training did not help; lower the learning rates, train on more text, or keep the "
            "base as it is."
        )
    return f"use it: `--set method.name={rival.method}`."


def _tied(mine: Row, rival: Row) -> bool:
    """Return whether two rows are equal, or differ by at most the deviation over seeds."""
    far = abs(mine.mean - rival.mean)
    return far == 0 or (_seeds(mine, rival) > 1 and far <= _deviation(mine, rival))


def _certainty(mine: Row, rival: Row) -> str:
    seeds = _seeds(mine, rival)
    if seeds == 1:
        return SEEDS
    within = "within" if _tied(mine, rival) else "beyond"
    return (
        f"The difference is {within} the deviation over {seeds} seeds (± "
        f"{figure(_deviation(mine, rival))})."
    )


def _seeds(mine: Row, rival: Row) -> int:
    return min(len(mine.per_seed), len(rival.per_seed))


def _deviation(mine: Row, rival: Row) -> float:
    """Return the standard deviation of the difference of two means over seeds."""
    deviation = math.hypot(mine.std, rival.std)
    return deviation if math.isfinite(deviation) else math.inf


def _title(row: Row) -> str:
    return METHODS[row.method].title if row.method in METHODS else row.method


def _value(value: float, metric: MetricInfo) -> str:
    return figure(value) + (" %" if metric.unit == "%" else "")
