"""CoBo as a person runs it: digits, clients that come and go, what is refused; and the figures
of a small real run.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from figures import as_json
from typer.testing import CliRunner

from coterie import personal
from coterie.cli.base import app
from coterie.core.callback import Callback
from coterie.core.errors import RecipeError
from coterie.core.files import load as load_tensors
from coterie.runs import run
from coterie.runs.execution import Execution
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load

SHORT = ["method.rounds=6", "evaluate_every=2", "checkpoint_every=2", "compare_with=[]"]


def refused(*words: str) -> str:
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == 2, found.output
    return found.output


def settings(*pairs: str) -> list[str]:
    return [word for pair in (*SHORT, *pairs) for word in ("--set", pair)]


def test_a_run_on_digits_says_accuracy_weights_and_clusters(tmp_path: Path) -> None:
    result = as_json(run.run(load("cobo-digits", SHORT), tmp_path / "run"))[-1]
    assert result["metric"] == {"name": "test accuracy", "unit": "%", "lower_is_better": False}
    assert 0 < result["mean"] <= 100
    assert result["clusters"] == {
        f"c{cluster}-{k}": cluster for cluster in range(4) for k in range(2)
    }
    assert 0 <= result["weights_error"] <= 1
    assert [evaluated["round"] for evaluated in result["evaluations"]] == [2, 4, 6]
    weights = result["evaluations"][-1]["weights"]
    assert len(weights) == 8
    assert all(row[k] == 0 and len(row) == 8 for k, row in enumerate(weights))
    assert result["best_by_valid"]["valid"] == max(
        evaluated["valid"] for evaluated in result["evaluations"]
    )
    tensors = load_tensors(tmp_path / "run/clients/c0-0/classifier.safetensors")[0]
    assert sum(t.numel() for t in tensors.values()) == 64 * 64 + 64 + 64 * 10 + 10
    assert personal.load(tmp_path / "run", "c0-0").about.client == "c0-0"


def test_it_goes_on_where_it_was_stopped_and_loopback_changes_nothing_but_rounding(
    tmp_path: Path,
) -> None:
    whole = as_json(run.run(load("cobo-digits", SHORT), tmp_path / "whole"))[-1]
    recipe = load("cobo-digits", SHORT)
    execution = Execution(prepare(recipe), tmp_path / "part", Callback(), "CoBo")
    (tmp_path / "part").mkdir()
    (tmp_path / "part/recipe.yaml").write_text(run.recipes.dump(recipe))
    RecordedInputs(tmp_path / "part").begin(Inputs.of(execution.state.prepared))
    with execution.running():
        for _ in range(4):
            execution.one_round()
    resumed = as_json(run.run(recipe, tmp_path / "part", resume=True))[-1]
    assert resumed["mean"] == whole["mean"]
    assert resumed["evaluations"][-1]["weights"] == whole["evaluations"][-1]["weights"]
    loopback = as_json(
        run.run(load("cobo-digits", [*SHORT, "engine=loopback"]), tmp_path / "loopback")
    )[-1]
    assert loopback["mean_loss"] == pytest.approx(whole["mean_loss"], rel=1e-4)


def test_clients_come_and_go_by_the_recipe(tmp_path: Path) -> None:
    result = as_json(
        run.run(
            load("cobo-digits", [*SHORT, "presence={c0-0: [2, null], c3-1: [0, 3]}"]),
            tmp_path / "run",
        )
    )[-1]
    place = {i: k for k, i in enumerate(result["clients"])}
    by_round = {evaluated["round"]: evaluated["weights"] for evaluated in result["evaluations"]}
    assert not any(by_round[2][place["c0-0"]])  # not yet there in rounds 1 and 2
    assert any(by_round[4][place["c0-0"]])
    assert any(by_round[2][place["c3-1"]])
    assert not any(by_round[4][place["c3-1"]])
    ups = {i: client["bytes_up"] for i, client in result["clients"].items()}
    assert ups["c3-1"] < ups["c1-0"]


def test_what_cannot_be_is_refused_before_it_starts(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    assert "presence.nobody: unknown client" in refused(
        "run", "cobo-digits", *settings("presence={nobody: [0, 2]}"), *out
    )
    backwards = refused("run", "cobo-digits", *settings("presence={c0-0: [3, 2]}"), *out)
    assert "presence.c0-0: round 2, the first without it, must come after round 3" in backwards
    odd = refused("run", "cobo-digits", *settings("method.projection=ball"), *out)
    assert "method.projection: input should be 'box' or 'simplex'" in odd
    assert "presence: pcl needs its clients from the start to the end" in refused(
        "run", "cobo-digits", *settings("method.name=pcl", "presence={c0-0: [1, 2]}"), *out
    )
    assert "holds images, which need classifier" in refused(
        "run", "quickstart", *settings("data={kind: digits}"), *out
    )
    assert "trains LoRA experts" in refused(
        "run", "cobo-digits", *settings("method.name=comigs-1g1s"), *out
    )
    assert "use a rho below 0.833" in refused("run", "cobo-digits", *settings("method.rho=1"), *out)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [["method.pairs=mixed"], ["method.pairs=constant"], ["method.pairs=all", "method.gamma=0.003"]],
    ids=["mixed", "constant", "all"],
)
def test_collaborators_are_found_and_help(pairs: list[str], tmp_path: Path) -> None:
    """Spec section 6, three seeds of the partition and of the run: W without an error, and the
    margins.
    """

    def mean(name: str, *more: str) -> list[dict[str, Any]]:
        common = ["compare_with=[]", "evaluate_every=0", f"method.name={name}", *more]
        return [
            as_json(
                run.run(
                    load("cobo-digits", [*common, f"seed={k}", f"data.seed={k}"]),
                    tmp_path / f"{name}-{k}",
                )
            )[-1]
            for k in range(3)
        ]

    cobo, local, fedavg, oracle = (
        mean(*of) for of in (("cobo", *pairs), ("local",), ("fedavg",), ("oracle",))
    )
    accuracy = {
        name: fmean(r["mean"] for r in found)
        for name, found in zip("clfo", (cobo, local, fedavg, oracle), strict=True)
    }
    assert [result["weights_error"] for result in cobo] == [0, 0, 0]
    assert accuracy["c"] >= accuracy["l"] + 4, json.dumps(accuracy)
    assert accuracy["c"] >= accuracy["f"] + 40, json.dumps(accuracy)
    assert accuracy["o"] - accuracy["c"] <= 5, json.dumps(accuracy)


def test_iterations_of_epochs_are_those_that_were_done(tmp_path: Path) -> None:
    """Two epochs of 41 examples in batches of 16 are six iterations, whatever local_steps are."""
    changes = ["method.rounds=2", "method.local_epochs=2", "data.per_client=41"]
    recipe = load("cobo-digits", [*changes, "method.name=fedavg", "compare_with=[]"])
    recipe = recipe.with_changes(training={"batch_size": 16})
    whole = Execution(prepare(recipe), tmp_path)
    result = whole.execute()
    assert {int(state["iteration"]) for state in whole.engine.states().values()} == {12}
    assert result.evaluations[-1].iteration == whole.state.iteration == 12


def test_fc_refuses_epochs() -> None:
    with pytest.raises(RecipeError, match=r"method.local_epochs: an iteration of fc"):
        prepare(load("cobo-digits", ["method.name=fc", "method.local_epochs=1"]))
