"""Scores and costs on a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.metrics import best as best_of
from coterie.core.metrics import better, change, label, mean, metric_of, prediction, sort_key
from coterie.core.metrics import worst as worst_of
from coterie.methods import METHODS
from coterie.reports import marks
from coterie.reports.comparison import BOUNDS
from coterie.reports.parts import (
    FEW,
    Cell,
    bars,
    escape,
    figure,
    ranked,
    size,
    table,
    tiles,
    unseen,
)

Json = Mapping[str, Any]
LOWER = {
    "loss": True,
    "between_clients": True,
    "improved": False,
    "weights_error": True,
    "gate_accuracy": False,
}  # which way is better
COSTS = (
    "<p>Per client. Bytes are those of the tensors in training messages. A client's state is "
    "what it must remember between rounds: its "
    "own parameters, the moments of its optimisers, and counters.</p>"
)
PEAK = (
    "<p class=note>Peak memory is the most that the whole process was ever resident in by the "
    "end of the row: Python, its libraries, the "
    "base model and all clients. Rows that run one after the other in one process pass it on, so "
    "a row's figure is never below that of the "
    "row that ran before it.</p>"
)


def _spread(rows: Sequence[Json], results: Sequence[Json]) -> list[str]:
    """Return what a dot is, and a strip of all clients or, where some are unseen, one for each
    group of them, all of one range.
    """
    of_group = (
        {i: client.get("group", "") for i, client in results[-1]["clients"].items()}
        if results
        else {}
    )
    strips: dict[str, marks.Strip] = {}
    for group in rows[0].get("groups") or [""]:
        shown = [i for i in rows[0]["clients"] if of_group.get(i, "") == group]
        strips[group] = {
            _title(r): ({i: r["clients"][i] for i in shown}, *_mean(r, group)) for r in rows
        }
    limits = marks.reach(strips.values())
    parts = [
        "<p>Each dot is a client, its mean over seeds; the stroke is their mean, the whisker its "
        "deviation over seeds.</p>"
    ]
    for group, strip in strips.items():
        parts += [f"<h3>{escape(unseen(group))}</h3>"] * bool(group)
        parts.append(marks.strip(strip, label(metric_of(rows[0])), limits))
    return parts


def _mean(row: Json, group: str) -> tuple[float, float]:
    """Return the mean of a group of clients, "" for all, and its deviation over seeds; 0 in rows
    from before that was known.
    """
    return (
        (row["groups"][group], (row.get("groups_std") or {}).get(group, 0.0))
        if group
        else (row["mean"], row["std"])
    )


def _known(rows: Sequence[Json], key: str) -> bool:
    return any(r.get(key) is not None for r in rows)


def _title(row: Json) -> str:
    return METHODS[row["method"]].title


def _headline(rows: Sequence[Json], result: Json) -> str:
    """Return the figures that people look for first, of the run's own method, whose result is given
    too.
    """
    own, metric = rows[-1], metric_of(rows[-1])
    unit = " %" if metric["unit"] == "%" else ""
    groups = own.get("groups") or {"": own["mean"]}
    found = [
        (f"{figure(x)}{unit}", f"mean {metric['name']}{f' of {unseen(g)}' if g else ''}, one seed")
        for g, x in groups.items()
    ]
    others = [r for r in rows[:-1] if r["method"] not in BOUNDS]
    found += [_against(own, others, group) for group in groups] if others else []
    if (privacy := own["privacy"]) and privacy["epsilon"] is not None:
        of = ", of an experiment," if privacy.get("experiment") else ""
        found.append(
            (
                f"{privacy['epsilon']:.2f}",
                f"epsilon{of} at delta {privacy['delta']:.2g}, {privacy['where']}",
            )
        )
    for group, gate in _gates(result).items():
        found.append(
            (
                f"{gate:.1f} %",
                f"gate accuracy of {unseen(group)}: samples given to an expert whose anchor has "
                f"their class",
            )
        )
    if own["improved"] is not None:
        found.append((f"{own['improved']:.0f} %", "of clients do better than alone"))
    if own["weights_error"] is not None:
        found.append(
            (f"{own['weights_error']:.2f}", "W error: share of wrong collaboration weights")
        )
    found.append((size(own["bytes_up_per_round"]), "up per client and round"))
    if own["state_bytes"] is not None:
        found.append((size(own["state_bytes"]), "state of a client"))
    return tiles(found)


def _gates(result: Json) -> dict[str, float]:
    """Gate accuracy of each group of unseen clients at the end; nothing where there is no gate,
    or it has no anchors.
    """
    choices = result["evaluations"][-1].get("choices") or {}
    return {
        group: found["gate_accuracy"]
        for group, found in choices.items()
        if found["gate_accuracy"] is not None
    }


def _against(own: Json, others: Sequence[Json], group: str) -> tuple[str, str]:
    """How far a row is from the best other one, for a group of unseen clients or, "", for all;
    with a word that says which is better.
    """

    def value(row: Json) -> float:
        return float(row["groups"][group] if group else row["mean"])

    metric = metric_of(own)
    other = min(others, key=lambda r: sort_key(value(r), metric))
    (far, counted), ours, theirs = (
        change(value(own), value(other), metric),
        value(own),
        value(other),
    )
    way = "better than" if better(ours, theirs, metric) else "WORSE than" if far else "from"
    whose, unit = f" of {unseen(group)}" if group else "", " %" if metric["unit"] == "%" else ""
    return (
        f"{abs(far):.1f} {counted}",
        f"{way} {_title(other)}, the best other row{whose}: from {figure(theirs)} to "
        f"{figure(ours)}{unit}",
    )


def _scores(rows: Sequence[Json]) -> str:
    """Figures over all clients, then a column per client; of many, the best and the worst, and a
    table of all folded away.
    """
    clients, metric = list(rows[-1]["clients"]), metric_of(rows[0])
    first, *others = rows[0].get("groups") or [""]
    means = [
        figure(r["mean"]) + (f" ± {figure(r['std'])}" if len(r["per_seed"]) > 1 else "")
        for r in rows
    ]
    columns: dict[str, Sequence[Cell | str]] = {
        "method": [_title(r) for r in rows],
        unseen(first) if first else "mean": ranked([r["mean"] for r in rows], metric, texts=means),
    }
    for group in others:
        found = [(*_mean(r, group), len(r["per_seed"]) > 1) for r in rows]
        texts = [
            figure(mean) + (f" ± {figure(std)}" if several else "") for mean, std, several in found
        ]
        columns[unseen(group)] = ranked([mean for mean, _, _ in found], metric, texts=texts)
    beside = {
        "loss": ("loss", 3),
        "between_clients": ("± between clients", 2),
        "improved": ("Imp.%", 0),
        "weights_error": ("W error", 2),
    }
    if first:
        beside = {
            "best": ("best", 2),
            "best_of_last_ten": ("best of last ten", 2),
            "gate_accuracy": ("gate, %", 1),
        } | beside
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
        columns |= {
            name: ranked([end(r["clients"].values(), metric) for r in rows], metric)
            for name, end in ends.items()
        }
    shown = table(list(columns), list(zip(*columns.values(), strict=True)))
    if few:
        return shown
    everyone = table(
        ["client", *map(_title, rows)],
        [[i, *(figure(r["clients"][i]) for r in rows)] for i in clients],
    )
    return f"{shown}<details><summary>All {len(clients)} clients</summary>{everyone}</details>"


def _costs(rows: Sequence[Json], results: Sequence[Json]) -> str:
    what = prediction(metric_of(rows[0]))
    served = {
        r["method"]: mean(c["bytes_down"] for c in r["clients"].values())
        for r in results
        if r.get("groups")
    }
    unseen_clients = (
        {
            "kB to an unseen client, once": bars(
                [served.get(r["method"]) for r in rows], ",.1f", 1000
            )
        }
        if served
        else {}
    )
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
