"""The table of regret, on runs written here whose figures can be worked out by hand."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import ROOT, module_at


@pytest.fixture(scope="module")
def regret() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield module_at("benchmarks/regret.py")
        for name in ("common", "federations"):
            sys.modules.pop(name, None)


def a_run(row: str, lr: float, seed: int, *rounds: dict[str, tuple[float, float]]) -> dict:
    """A run with the validation and test loss of each client after each evaluation."""
    return {
        "federation": "topics",
        "row": row,
        "lr": lr,
        "seed": seed,
        "size": "small",
        "base": "base",
        "work": {"interpolation": 300, "comigs-1g1s": 200}.get(row, 150),
        "wall": 1800.0,
        "evaluations": [
            {"round": number, "clients": {i: list(own) for i, own in found.items()}}
            for number, found in enumerate(rounds)
        ],
    }


def sweep_of(regret: ModuleType, folder: Path, runs: list[dict], base: str) -> Any:
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    return regret.Sweep(folder, "small", base)


RUNS = [
    a_run("local", 0.1, 0, {"a": (1.0, 2.0), "b": (1.0, 1.0)}),
    a_run("local", 0.2, 0, {"a": (9.0, 0.1), "b": (9.0, 0.1)}),  # better on test data alone
    a_run("local", 0.1, 1, {"a": (1.0, 2.2), "b": (1.0, 1.0)}),
    # a client's best round by validation counts, whatever its test loss
    a_run(
        "comigs-1g1s", 0.1, 0, {"a": (1.0, 3.0), "b": (3.0, 1.5)}, {"a": (2.0, 1.0), "b": (2, 2)}
    ),
    a_run("comigs-1g1s", 0.1, 1, {"a": (1.0, 3.0), "b": (1.0, 2.0)}),
    a_run("interpolation", 0.1, 0, {"a": (1.0, 2.1), "b": (1.0, 0.9)}),
    a_run("interpolation", 0.1, 1, {"a": (1.0, 2.2), "b": (1.0, 1.2)}),
]


def test_regret_is_paired_over_seeds_and_against_the_best_row_of_each_client(
    regret: ModuleType, tmp_path: Path
) -> None:
    sweep = sweep_of(regret, tmp_path, RUNS, "/any/folder/base")
    a, b = regret.rows_of(sweep, "topics", ["interpolation"], last=False)
    assert a["best"] == b["best"] == "local"
    assert a["local"] == pytest.approx(math.exp(2.1))
    assert a["comigs-1g1s"] == pytest.approx(math.exp(3.0))
    assert b["comigs-1g1s"] == pytest.approx(math.exp(2.0))
    first, second = 100 * math.expm1(0.1), 0.0
    assert a["regret of interpolation, %"] == pytest.approx((first + second) / 2)
    assert a["sd of interpolation"] == pytest.approx(abs(first - second) / math.sqrt(2))
    assert b["regret of interpolation, %"] == pytest.approx(
        50 * (math.expm1(-0.1) + math.expm1(0.2))
    )


def summary_of(page: str, row: str) -> dict[str, str]:
    """The line of a row in the first table of a page, by column."""
    first = page.split("\n## ", maxsplit=1)[0]
    head, _, *lines = [line for line in first.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    return next(dict(zip(cells[0], own, strict=True)) for own in cells[1:] if own[0] == row)


def test_the_page_counts_who_is_level_and_names_the_worst(
    regret: ModuleType, tmp_path: Path
) -> None:
    sweep = sweep_of(regret, tmp_path, RUNS, "base")
    found = regret.page(sweep, ["interpolation"], last=False)
    assert "7 runs, 3.5 hours of one thread" in found
    own = summary_of(found, "interpolation")
    a, b = 50 * math.expm1(0.1), 50 * (math.expm1(-0.1) + math.expm1(0.2))
    assert (own["clients"], own["level"], own["over 5 %"], own["of"]) == ("2", "2", "2", "topics/b")
    assert float(own["mean regret, %"]) == pytest.approx((a + b) / 2, rel=1e-3)
    assert float(own["largest, %"]) == pytest.approx(b, rel=1e-3)
    assert float(own["its sd"]) == pytest.approx(22.4, abs=0.05)
    assert float(summary_of(found, "local")["largest, %"]) == 0
    assert "interpolation 0.1 (1.50)" in found
    constant = [a_run("interpolation", 0.1, seed, {"a": (1, 2.4), "b": (1, 1)}) for seed in (0, 1)]
    sweep = sweep_of(regret, tmp_path, RUNS[:5] + constant, "base")
    found = regret.page(sweep, ["interpolation"], last=False)
    assert summary_of(found, "interpolation")["level"] == "1"


def test_a_federation_without_ours_yet_is_shown_and_not_judged(
    regret: ModuleType, tmp_path: Path
) -> None:
    begun = [run | {"federation": "multilingual"} for run in RUNS if run["row"] == "local"]
    sweep = sweep_of(regret, tmp_path, RUNS + begun, "base")
    found = regret.page(sweep, ["interpolation"], last=False)
    assert "## multilingual" in found
    assert summary_of(found, "interpolation")["clients"] == "2"
    assert summary_of(found, "local")["clients"] == "4"


def test_runs_are_found_where_the_base_lies_elsewhere_and_not_with_another(
    regret: ModuleType, tmp_path: Path
) -> None:
    assert len(sweep_of(regret, tmp_path, RUNS, "/somewhere/base").find()) == len(RUNS)
    assert not sweep_of(regret, tmp_path, RUNS, "embedded").find()
