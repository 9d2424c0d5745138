"""Figures from sums: perplexity per client, means over clients, mean and deviation over seeds; and what a process has used."""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def perplexity(score: Tensor) -> float:
    """exp(mean token NLL) of a client's score, (2,): total NLL in nats and the number of tokens. Infinite beyond float range."""
    nll, tokens = score.tolist()
    mean = nll / tokens
    return math.exp(mean) if mean < 700 else math.inf


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def deviation(values: list[float]) -> float:
    """The sample standard deviation over seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def peak_memory() -> int | None:
    """Bytes: the most memory that this process, libraries and all, was ever resident in. None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def row(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method's line of a comparison: mean and standard deviation over seeds, and what it cost.

    Args:
        name: Of the method.
        results: What is in its result.json, one for each seed. Figures that one of them lacks (it is from an older version) are None.
    """
    per_seed = [r["mean"] for r in results]
    clients = [c for r in results for c in r["clients"].values()]
    rounds = max(results[0]["rounds"], 1)
    return {
        "method": name,
        "mean": mean(per_seed),
        "std": deviation(per_seed),
        "per_seed": per_seed,
        "mean_synced": mean(r["mean_synced"] for r in results),
        "clients": {i: mean(r["clients"][i]["test"] for r in results) for i in results[0]["clients"]},
        "trainable_parameters": round(mean(c["trainable_parameters"] for c in clients)),
        "active_parameters": _known([c.get("active_parameters") for c in clients]),
        "flops_per_token": round(mean(c["flops_per_token"] for c in clients)),
        "bytes_up_per_round": round(mean(c["bytes_up"] for c in clients) / rounds),
        "bytes_down_per_round": round(mean(c["bytes_down"] for c in clients) / rounds),
        "state_bytes": _known([c.get("state_bytes") for c in clients]),
        "peak_memory_bytes": _known([r.get("peak_memory_bytes") for r in results]),
        "wall_s": mean(r["wall_s"] for r in results),
    }


def comparability(rows: Sequence[Mapping[str, Any]], own: str | None = None, titles: Mapping[str, str] | None = None) -> list[str]:
    """What makes rows of a table unlike in budget, a sentence each: more than 5 % in parameters, more than 10 % in work per token.

    Args:
        rows: As `row` makes them.
        own: The method that the others are measured against; default, and where it is missing: the first row that trains anything.
        titles: What to call a method; default: its name.
    """
    trained = [r for r in rows if r["trainable_parameters"]]
    if not trained:
        return []
    reference = next((r for r in trained if r["method"] == own), trained[0])
    found, called = [], titles or {}
    for r in trained:
        name, other = (called.get(row["method"], row["method"]) for row in (r, reference))
        kinds = (("trainable_parameters", "trainable parameters", 0.05), ("active_parameters", "active parameters", 0.05))
        unlike = []
        for key, what, limit in (*kinds, ("flops_per_token", "work per token", 0.1)):
            if r[key] and reference[key] and abs(share := r[key] / reference[key] - 1) > limit:
                unlike.append(f"{share:+.0%} {what}")
        if unlike:
            found.append(f"{name}: {', '.join(unlike)} against {other}: not an equal budget.")
        if r["method"] == "centralized":
            found.append(f"{name}: one model that sees the data of all clients: a bound, not a method that keeps data private.")
    return found


def _known(values: Sequence[int | None]) -> int | None:
    """The mean, or None unless all are known."""
    known = [value for value in values if value is not None]
    return round(mean(known)) if len(known) == len(values) else None
