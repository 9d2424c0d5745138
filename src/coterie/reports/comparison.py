"""Rows of a comparison: what the results of one method say over its seeds, and what makes rows
unlike.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.metrics import better, deviation, gate_accuracy, mean, metric_of, prediction

BOUNDS = {
    "centralized": "one model that sees the data of all clients: a bound, not a method that "
    "keeps data private",
    "oracle": "is told the true clusters, which nobody knows: a bound",
}
ALONE = "local"  # the method that Imp.% compares with
NAMED = 8  # clients in a sentence, at most


def improved(
    results: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> float | None:
    """Imp.%: the share of clients that do better than in their own Local run of the same seed
    (CoBo, Table 2).

    Args:
        results: Of a method, one for each seed.
        alone: Of Local.

    Returns:
        Percent over clients and seeds; None where Local lacks a seed, and for Local itself.
    """
    local = {result["seed"]: result["clients"] for result in alone}
    if any(result["seed"] not in local or result["method"] == ALONE for result in results):
        return None
    pairs = [
        (own["test"], local[r["seed"]].get(i), metric_of(r))
        for r in results
        for i, own in r["clients"].items()
    ]
    wins = [better(own, other["test"], metric) for own, other, metric in pairs if other is not None]
    return 100 * mean(wins)


def headline(result: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the clients whom the mean of a result is about: all that are scored, or the first
    group of those that were never seen.
    """
    first = next(iter(result.get("groups") or ()), None)
    return {i: client for i, client in result["clients"].items() if client.get("group") == first}


def between(result: Mapping[str, Any]) -> float:
    """How unlike the clients of a result fare: the standard deviation of the test metric over
    them, who are all there are.
    """
    values = [client["test"] for client in headline(result).values()]
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.inf


def row(
    name: str, results: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """One method's line of a comparison: mean and standard deviation over seeds, and what it cost.

    Args:
        name: Of the method.
        results: What is in its result.json, one for each seed. Figures that one of them lacks (it
            is from an older version) are None.
        alone: The results of Local, where there are any: what Imp.% compares with.
    """
    per_seed = [r["mean"] for r in results]
    clients = [c for r in results for c in (r.get("training") or r["clients"]).values()]
    rounds = max(results[0]["rounds"], 1)
    return {
        "method": name,
        "metric": dict(metric_of(results[0])),
        "mean": mean(per_seed),
        "std": deviation(per_seed),
        "per_seed": per_seed,
        "mean_synced": mean(r["mean_synced"] for r in results),
        "groups": {
            group: mean(r["groups"][group] for r in results)
            for group in results[0].get("groups") or {}
        }
        or None,
        "groups_std": {
            group: deviation([r["groups"][group] for r in results])
            for group in results[0].get("groups") or {}
        }
        or None,
        "best": _average([r.get("best") for r in results]),
        "best_of_last_ten": _average([r.get("best_of_last_ten") for r in results]),
        "gate_accuracy": _average([gate_accuracy(r) for r in results]),
        "loss": _average([r.get("mean_loss") for r in results]),
        "between_clients": mean(map(between, results)),
        "improved": improved(results, alone) if alone else None,
        "weights_error": _average([r.get("weights_error") for r in results]),
        "iterations": results[0]["evaluations"][-1]["iteration"]
        if results[0].get("evaluations")
        else None,
        "clients": {
            i: mean(r["clients"][i]["test"] for r in results if i in r["clients"])
            for i in results[0]["clients"]
        },
        "trainable_parameters": round(mean(c["trainable_parameters"] for c in clients)),
        "active_parameters": _known([c.get("active_parameters") for c in clients]),
        "flops_per_token": round(mean(c["flops_per_token"] for c in clients)),
        "bytes_up_per_round": round(mean(c["bytes_up"] for c in clients) / rounds),
        "bytes_down_per_round": round(mean(c["bytes_down"] for c in clients) / rounds),
        "state_bytes": _known([c.get("state_bytes") for c in clients]),
        "once_bytes": _known([r.get("once_bytes") for r in results]),
        "peak_memory_bytes": _known([r.get("peak_memory_bytes") for r in results]),
        "wall_s": mean(r["wall_s"] for r in results),
        "lost": _lost(results),
        "never_took_part": _known(
            [None if (absent := r.get("never_took_part")) is None else len(absent) for r in results]
        ),
        "privacy": results[0].get("privacy"),
    }


def _lost(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return replies by client that were dropped or did not come, over all seeds; of clients that
    lost any.
    """
    found: dict[str, int] = {}
    for result in results:
        for client, count in (result.get("lost") or {}).items():
            found[client] = found.get(client, 0) + count
    return dict(sorted(found.items()))


def rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of several methods, in the order of their first results: each over its
    seeds, with Imp.% where Local is among them.

    A client that some run could not reach to score it has no column.
    """
    common = (
        [i for i in results[0]["clients"] if all(i in result["clients"] for result in results)]
        if results
        else []
    )
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_method.setdefault(result["method"], []).append(result)
    lines = [row(name, found, by_method.get(ALONE, ())) for name, found in by_method.items()]
    return [
        line | {"clients": {i: line["clients"][i] for i in common if i in line["clients"]}}
        for line in lines
    ]


def comparability(
    rows: Sequence[Mapping[str, Any]],
    own: str | None = None,
    titles: Mapping[str, str] | None = None,
) -> list[str]:
    """Return what a reader of a table must know, a sentence each: unlike budgets, bounds, replies
    that were lost, and privacy.

    Budgets are unlike by more than 5 % in parameters, or more than 10 % in work.

    Args:
        rows: As `row` makes them.
        own: The method that the others are measured against; default, and where it is missing: the
            first row that trains anything.
        titles: What to call a method; default: its name.
    """
    called = {r["method"]: r["method"] for r in rows} | dict(titles or {})
    trained = [r for r in rows if r["trainable_parameters"]]
    references = [r for r in trained if r["method"] == own] + trained
    found = [sentence for r in trained for sentence in _budget(r, references[0], called)]
    found += [f"{called[r['method']]}: {lost(r['lost'])}" for r in rows if r.get("lost")]
    found += [
        f"{called[r['method']]}: {absent(r['never_took_part'])}"
        for r in rows
        if r.get("never_took_part")
    ]
    spent: dict[str, list[str]] = {}  # rows that spend alike share a sentence
    for r in rows:
        if r.get("privacy"):
            spent.setdefault(protected(r["privacy"]), []).append(called[r["method"]])
    return found + [f"{', '.join(names)}: {sentence}" for sentence, names in spent.items()]


def _budget(
    row: Mapping[str, Any], reference: Mapping[str, Any], called: Mapping[str, str]
) -> list[str]:
    """How a row's budget differs from another's, and whether it is a bound."""
    kinds = (
        ("trainable_parameters", "trainable parameters", 0.05),
        ("active_parameters", "active parameters", 0.05),
        ("flops_per_token", f"work per {prediction(metric_of(row))}", 0.1),
        ("iterations", "local iterations", 0.1),
    )
    name, other, unlike, found = called[row["method"]], called[reference["method"]], [], []
    for key, what, limit in kinds:
        if (
            row.get(key)
            and reference.get(key)
            and abs(share := row[key] / reference[key] - 1) > limit
        ):
            unlike.append(f"{share:+.0%} {what}")
    if unlike:
        found.append(f"{name}: {', '.join(unlike)} against {other}: not an equal budget.")
    if row["method"] in BOUNDS:
        found.append(f"{name}: {BOUNDS[row['method']]}.")
    return found


def lost(counts: Mapping[str, int]) -> str:
    """Return a sentence on replies that were dropped or did not come.

    Args:
        counts: By client, of those that lost any; only those with the most are named.
    """
    total, most = sum(counts.values()), sorted(counts, key=lambda i: -counts[i])[:NAMED]
    named = ", ".join(f"{i} {counts[i]}" for i in most) + (
        f" and {len(counts) - NAMED} other clients" if len(counts) > NAMED else ""
    )
    replies = "1 reply was" if total == 1 else f"{total:,} replies were"
    return (
        f"{replies} lost, dropped as unfit or missing ({named}); why is in metrics.jsonl, lines "
        f"of kind lost."
    )


def absent(clients: int) -> str:
    """Return a sentence on clients that took part in no round."""
    who = "1 client" if clients == 1 else f"{clients:,} clients"
    return (
        f"{who} never took part in a round, and counted with the model that the server would "
        f"give them."
    )


def protected(privacy: Mapping[str, Any]) -> str:
    """Return a sentence on the privacy that a result has spent, from its `privacy`: how much, by
    what reckoning, and what it is for.
    """
    epsilon = (
        "no finite epsilon, nobody is protected"
        if privacy["epsilon"] is None
        else f"epsilon {privacy['epsilon']:.2f}"
    )
    return (
        f"{epsilon}, delta {privacy['delta']:.2g} ({privacy['where']}, noise z = "
        f"{privacy['noise']:g}, clip C = {privacy['clip']:g}): "
        f"{privacy['sampling']}. It covers {privacy['covers']}."
        + (f" It assumes: {privacy['assumes']}." if "assumes" in privacy else "")
    )


def _average(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None unless all are known."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _known(values: Sequence[int | None]) -> int | None:
    """Return the rounded mean, or None unless all are known."""
    average = _average(values)
    return None if average is None else round(average)
