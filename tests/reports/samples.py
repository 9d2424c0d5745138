"""Results, routing and metrics as a run writes them, with figures that a test can tell."""

import json
from collections.abc import Sequence
from pathlib import Path

CLIENTS = {"ann": 20.0, "<b>ben</b>": 30.0}
TEXT = [" <script>", "alert(1)", "</script>", " caf", "◌", "é", "\n\n", " end", "¶"]


def result(
    method: str, rounds: int, shift: float, clients: dict[str, float] = CLIENTS, **figures: object
) -> dict:
    """What is in result.json: perplexity falls by one a round and ends at `shift - rounds`
    beyond that of `clients`.
    """
    evaluations = [
        {
            "round": r,
            "iteration": 10 * r,
            "clients": {i: {"valid": x, "test": x + shift - r} for i, x in clients.items()},
        }
        for r in range(0 if rounds == 0 else 1, rounds + 1)
    ]
    for entry in evaluations:
        own = entry["clients"].values()
        entry |= {split: sum(c[split] for c in own) / len(own) for split in ("valid", "test")}
    last = evaluations[-1]["clients"]
    costs = {"trainable_parameters": 1000, "active_parameters": 900, "flops_per_token": 2_500_000}
    costs |= {"bytes_up": 4000, "bytes_down": 4000, "state_bytes": 12_000}
    return {
        "method": method,
        "recipe": "r",
        "seed": 0,
        "rounds": rounds,
        "metric": PERPLEXITY,
        "mean": sum(c["test"] for c in last.values()) / len(last),
        "mean_synced": 25.0,
        "clients": {
            i: {**values, "test_synced": 25.0, "generalists": 1, "specialists": 1, **costs}
            for i, values in last.items()
        },
        "evaluations": evaluations,
        "wall_s": 12.0,
        "peak_memory_bytes": 700_000_000,
        "versions": {"coterie": "0", "torch": "2"},
        "machine": {"device": "cpu", "dtype": "float32", "threads": 2},
        **figures,
    }


PERPLEXITY = {"name": "test perplexity", "unit": "per token", "lower_is_better": True}
ACCURACY = {"name": "test accuracy", "unit": "%", "lower_is_better": False}
PAIRED = {"ann": 0, "<b>ben</b>": 1, "cleo": 0, "dan": 1}  # clusters that are not neighbours


def classified(
    method: str,
    shift: float = 0.0,
    clusters: dict[str, int] | None = PAIRED,
    rounds: int = 3,
    **figures: object,
) -> dict:
    """What is in result.json of an image classifier.

    Accuracy rises by one a round, to `70 + shift`, and one point more from client to client.
    Collaboration weights are 0.4 for everybody at first, and go in equal steps to 1 within clusters
    and to 0.1 between them.
    """
    clients = dict.fromkeys(PAIRED if clusters is None else clusters, 0.0)
    found = result(method, rounds, 0.0, clients)
    cluster = list((clusters or PAIRED).values())
    evaluations = []
    for r in range(1, rounds + 1):
        part = (r - 1) / (rounds - 1)
        scores = {i: 70.0 + shift + k - rounds + r for k, i in enumerate(clients)}
        own = {
            i: {"valid": x - 1, "test": x, "valid_loss": 1.0, "test_loss": 0.5}
            for i, x in scores.items()
        }
        means = {
            "valid": sum(scores.values()) / len(scores) - 1,
            "test": sum(scores.values()) / len(scores),
        }
        n = range(len(cluster))
        weights = [
            [0.0 if i == j else 0.4 + part * (0.6 if cluster[i] == cluster[j] else -0.3) for j in n]
            for i in n
        ]
        evaluations.append(
            {"round": r, "iteration": 10 * r, "clients": own, **means, "weights": weights}
        )
    found |= {
        "metric": ACCURACY,
        "evaluations": evaluations,
        "clusters": clusters,
        "weights_error": 0.0,
        "mean_loss": 0.5,
    }
    found |= {"mean": evaluations[-1]["test"], "mean_synced": evaluations[-1]["test"]}
    found["clients"] = {
        i: client | evaluations[-1]["clients"][i] for i, client in found["clients"].items()
    }
    return found | figures


ANCHORS = {"a0": [4, 5], "a1": [0, 1], "a2": [2]}  # nobody's is class 3
UNSEEN = {"u0": "aligned", "u1": "aligned", "v0": "random"}


def pooled(
    method: str, shift: float = 0.0, rounds: int = 3, gate: bool = True, **figures: object
) -> dict:
    """What is in result.json of a run with clients that nobody has seen: six classes, three
    anchors, eight normal clients.

    Accuracy rises by one a round, to 90 + `shift` in `aligned` and to 60 - `shift` in `random`.
    With a gate: in the first evaluation all ten samples of a class go to expert 0, in the others to
    that of its anchor, but of class 0 five, and of class 3 all, to expert 2. Expert m gets m
    samples of each class wrong.
    """
    counts = {q: [20 * (c in own) for c in range(6)] for q, own in ANCHORS.items()}
    counts |= {
        f"n{k}": [10 * (c in (k % 6, (k + 1 + k // 6) % 6)) + k * (c == 0) for c in range(6)]
        for k in range(8)
    }
    counts |= {i: [10] * 6 for i in UNSEEN}
    home = {c: q for q, own in enumerate(ANCHORS.values()) for c in own} | {3: 2}

    def given(r: int, c: int) -> list[int]:
        return (
            [10, 0, 0]
            if r == 1
            else [0, 5, 5]
            if c == 0
            else [10 * (m == home[c]) for m in range(3)]
        )

    def choices(r: int) -> dict:
        matrix = [given(r, c) for c in range(6)]
        right = [[max(0, n - m) for m, n in enumerate(row)] for row in matrix]
        return {
            g: {"given": matrix, "right": right, "gate_accuracy": 100 * 20 / 60 if r == 1 else 75.0}
            for g in ("aligned", "random")
        }

    evaluations = []
    for r in range(1, max(rounds, 1) + 1):
        tests = {
            i: (90.0 + shift if group == "aligned" else 60.0 - shift) - max(rounds, 1) + r
            for i, group in UNSEEN.items()
        }
        own = {
            i: {"valid": x, "test": x}
            | ({"gate_accuracy": 75.0, "experts": [0, 2]} if gate else {})
            for i, x in tests.items()
        }
        groups = {"aligned": tests["u0"], "random": tests["v0"]}
        entry = {
            "round": r if rounds else 0,
            "iteration": 5 * r,
            "test": tests["u0"],
            "clients": own,
            "groups": groups,
        }
        evaluations.append(entry | ({"choices": choices(r)} if gate else {}))
    found = result(
        method,
        rounds,
        0.0,
        dict.fromkeys(UNSEEN, 0.0),
        metric=ACCURACY,
        evaluations=evaluations,
        mean_loss=0.5,
    )
    last = evaluations[-1]
    costs = {**found["clients"]["u0"], "bytes_down": 5000}
    return found | {
        "mean": last["test"],
        "best": last["test"] + 2,
        "best_of_last_ten": last["test"] + 1,
        "groups": last["groups"],
        "clients": {
            i: {**costs, **last["clients"][i], "group": group} for i, group in UNSEEN.items()
        },
        "training": {i: found["clients"]["u0"] for i in counts if i not in UNSEEN},
        "anchors": list(ANCHORS),
        "labels": {i: [c for c, n in enumerate(own) if n] for i, own in counts.items()},
        "label_counts": counts,
        "once_bytes": 7000,
        **figures,
    }


def routing(clients: Sequence[str] = tuple(CLIENTS), depth: int = 5) -> dict:
    """What is in routing.json: the first block gives every token to the generalist, the last to
    the specialist, the middle takes turns.
    """
    first, last = [[0.9, 0.1]] * len(TEXT), [[0.25, 0.75]] * len(TEXT)
    middle = [[0.6, 0.4] if k % 2 else [0.4, 0.6] for k in range(len(TEXT))]
    return {
        "depth": depth,
        "blocks": [0, 2, 4],
        "texts": dict.fromkeys(clients, TEXT),
        "experts": {i: {"generalists": 1, "specialists": 1} for i in clients},
        "weights": {i: {j: [first, middle, last] for j in clients} for i in clients},
    }


def audited(canaries: bool = True, words: bool = True) -> dict:
    """What is in audit.json: the server can tell more than another client."""

    def estimate(value: float, **more: float) -> dict:
        ends = {"value": value, "low": value - 0.1, "high": value + 0.1}
        return ends | {"interval": "95%, bootstrap over rows"} | more

    def membership(auc: float) -> dict:
        rates = {"auc": estimate(auc), "tpr": estimate(0.25, fpr=0.01)}
        return rates | {"clients": dict.fromkeys(CLIENTS, auc), "members": 80, "others": 80}

    def observer(auc: float) -> dict:
        epsilon = {"at_least": 0.5, "confidence": 0.95, "delta": 1e-05}
        epsilon |= {"right": 7, "guesses": 8, "coins": 32, "most": 2.5}
        exposure = estimate(4 * auc, chance=1.5, most=5.0)
        found = {"exposure": exposure, "auc": None, "epsilon": epsilon}
        rows = {"exchanges": 2, "membership": membership(auc), "min_k": membership(auc)}
        return rows | {"canaries": found if canaries else None}

    counts = {"candidates": 32, "planted": 15, "repeats": 2, "prefix": 4, "length": 6}
    word = {"word": "Cornelius", "owner": "ann", "prompt": "Dear ", "by": ["<b>ben</b>"]}
    rates = {"others": estimate(0.5), "shared": estimate(0.5), "owner": estimate(0.75)}
    rare = {"words": 20, "known_to_the_base": 1, **rates, "control": None, "control_words": 0}
    about = {"recipe": "r", "method": "fedavg", "seed": 0, "round": 2, "clients": [*CLIENTS]}
    return {
        **about,
        "data": "windows",
        "canaries": counts if canaries else None,
        "secure": False,
        "privacy": None,
        "observers": {"server": observer(0.9), "others": observer(0.75)},
        "shift": membership(0.5),
        "words": rare | {"examples": [word | {"shared": True}]} if words else None,
        "settings": {"windows": 20, "words": 8, "top": 3, "seed": 0},
    }


def write_metrics(folder: Path, clients: Sequence[str] = tuple(CLIENTS)) -> None:
    """metrics.jsonl of four rounds, two blocks: the generalist's weight grows by 0.1 a round in
    the first, and is 0.5 in the second.
    """
    lines = []
    for r in range(1, 5):
        for i in clients:
            weights = [[0.4 + 0.1 * r, 0.6 - 0.1 * r], [0.5, 0.5]]
            about = {"kind": "train", "round": r, "iteration": 10 * r, "client": i, "tokens": 99}
            lines.append(
                about | {"router/router": [[9.0, 9.0]] * 2, "router/generalist+specialist": weights}
            )
            lines.append(
                {"kind": "score", "round": r, "iteration": 10 * r, "client": i, "test": 1.0}
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
