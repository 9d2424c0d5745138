"""The table of new clients is of the results beside it, and its regrets those of a naive count."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from script_modules import ROOT, module_at

RESULTS = ROOT / "benchmarks/results"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield module_at("benchmarks/newcomers.py")


def test_the_page_is_of_the_results_and_counts_who_is_behind(script: Any) -> None:
    content = json.loads((RESULTS / "newcomers.json").read_text("utf-8"))
    assert (RESULTS / "newcomers.md").read_text("utf-8") == script.page(content)
    behind = {"shared": 0, "fedavg": 0, "ddome": 0}
    for run in content["runs"]:
        for client, accuracy in run["accuracy"]["fedavg"].items():
            ddome = run["accuracy"]["ddome"][client]
            common = run["accuracy"]["common"][client]
            for row in behind:
                best = max(accuracy, ddome, common)
                behind[row] += best - run["accuracy"][row][client] > 1
    counted = {
        row: sum(
            regret > 1
            for run in content["runs"]
            for group in run["groups"]
            for regret in script.regrets(run, row, group)
        )
        for row in behind
    }
    assert counted == behind
    assert behind["shared"] < min(behind["fedavg"], behind["ddome"]) / 10


def test_every_row_trains_as_long_as_the_mixture(script: Any) -> None:
    for column in script.COLUMNS:
        whole = script.recipe_of(column, script.SHARED, [], 1)
        for row, (_, section, settings, part) in script.ROWS.items():
            recipe = script.recipe_of(column, section, settings, 1)
            assert recipe.data.seed == recipe.seed == 1, row
            if part != "none":
                assert recipe.method["rounds"] == whole.method["rounds"], row
