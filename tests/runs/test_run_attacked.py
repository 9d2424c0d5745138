"""Runs with clients that lie, or that send what nobody can use: what is said of it, and which
rules of aggregation withstand them.
"""

import io
import json
import math
import random
import statistics
from pathlib import Path

import pytest
import reported
from figures import as_json, typed
from rich.console import Console

from coterie.core.result import rows as comparison
from coterie.reports.progress import Terminal
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.run import run

ROBUST = ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "clipped-mean")
SHORT = (
    "method.rounds=3",
    "method.router_every=3",
    "data.train_tokens=6000",
    "data.valid_tokens=500",
    "data.test_tokens=1500",
    "samples=false",
)


@pytest.fixture
def recipe(tiny_base: Path, tmp_path: Path) -> Recipe:
    """FedAvg with three clients of random words, the first of which sends no numbers."""
    for name in ("ann", "ben", "cleo"):
        rng = random.Random(name)
        for k in range(20):
            path = tmp_path / "texts" / name / f"{k}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(" ".join(rng.choices(["one", "two", "three", "four"], k=12)))
    settings = {
        "data.path": tmp_path / "texts",
        "model.base": tiny_base,
        "model.context": 8,
        "training.batch_size": 2,
        "method.name": "fedavg",
        "method.rounds": 2,
        "method.local_steps": 1,
        "attack": "{kind: nan}",
        "samples": "false",
        "compare_with": "[]",
    }
    return load("folders", [f"{key}={value}" for key, value in settings.items()])


def test_a_reply_without_numbers_is_dropped_counted_and_told(
    recipe: Recipe, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Terminal(console, rows=1) as terminal:
        (result,) = as_json(reported.run(recipe, tmp_path / "run", reporter=terminal))
    assert result["lost"] == {"ann": 2}
    assert all(math.isfinite(client["test"]) for client in result["clients"].values())
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    lost = [line for line in lines if line["kind"] == "lost"]
    assert [(line["round"], line["client"], line["task"]) for line in lost] == [
        (1, "ann", "local_round"),
        (2, "ann", "local_round"),
    ]
    assert all(line["reason"].startswith("not all values of ") for line in lost)
    warnings = [line for line in console.file.getvalue().splitlines() if "ann" in line]  # type: ignore[attr-defined]
    assert warnings == [f"  round {line['round']}, ann: {line['reason']}" for line in lost]
    (note,) = comparison.comparability(comparison.rows(typed([result])))
    assert note.startswith("fedavg: 2 replies were lost, rejected as invalid or missing (ann 2)")
    assert note in (tmp_path / "run/report.html").read_text()


def test_the_shipped_recipe_has_one_attacker_among_eight(corpora_root: Path) -> None:
    recipe = load("attacked", [f"data.root={corpora_root}"])
    assert recipe.attack is not None
    assert (recipe.attack.kind, recipe.attack.clients, recipe.attack.scale) == ("sign-flip", 1, 10)
    assert len([i for clients in recipe.data.cells.values() for i in clients]) == 8  # type: ignore[union-attr]


def honest_losses(settings: list[str], folder: Path) -> float:
    """The mean test loss, in nats, of the clients other than the first, which is the one that
    lies.
    """
    (result,) = as_json(run(load("attacked", [*SHORT, *settings]), folder))
    return statistics.fmean(
        client["test_loss"] for i, client in result["clients"].items() if i != "de-1"
    )


@pytest.mark.slow
def test_robust_rules_withstand_an_attacker_and_cost_little_without_one(
    corpora_root: Path, tmp_path: Path
) -> None:
    """A shorter run than that of benchmarks/results/attacked.md; orders are the same."""
    losses = {
        (rule, lie): honest_losses(
            [
                f"method.aggregation={{rule: {rule}}}",
                f"data.root={corpora_root}",
                *(["attack=null"] if lie == "nobody" else []),
            ],
            tmp_path / f"{rule}-{lie}",
        )
        for rule in ("mean", *ROBUST)
        for lie in ("sign-flip", "nobody")
    }
    for rule in ROBUST:
        assert losses[rule, "sign-flip"] < losses["mean", "sign-flip"] - 0.03, (rule, losses)
        assert losses["mean", "nobody"] < losses[rule, "nobody"] + 0.01, (rule, losses)
