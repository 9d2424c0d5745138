"""Runs of DDOME from recipes: what result.json says of clients never seen before, resumption,
and the specification's small real run.
"""

import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from figures import as_json

from coterie.client.site import CENTRE
from coterie.core.callback import Callback
from coterie.core.errors import Refused
from coterie.core.files import load as load_tensors
from coterie.core.files import make_folder
from coterie.runs import execution, run
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load
from coterie.runs.recipes.sections import Participation

SHORT = ["method.rounds=4", "evaluate_every=2", "checkpoint_every=2", "compare_with=[]"]
CLIENTS, ANCHORS = [f"client-{k}" for k in range(6)], ["a", "b"]


def test_a_run_scores_clients_that_were_never_seen(tmp_path: Path) -> None:
    result = as_json(run.run(load("ddome-digits", SHORT), tmp_path))[-1]
    assert json.loads((tmp_path / "result.json").read_text()) == result
    groups = {i: found["group"] for i, found in result["clients"].items()}
    assert sorted(set(groups.values())) == ["aligned", "random"]
    assert len(groups) == 20
    assert not groups.keys() & result["training"].keys()
    for group, value in result["groups"].items():
        assert value == pytest.approx(
            fmean(found["test"] for found in result["clients"].values() if found["group"] == group)
        )
    assert result["mean"] == result["groups"]["aligned"] == result["evaluations"][-1]["test"]
    tests = [evaluated["test"] for evaluated in result["evaluations"]]
    assert result["best"] == result["best_of_last_ten"] == max(tests)
    assert len(tests) == 2
    expert, gate = 4 * (64 * 8 + 8 + 8 * 10 + 10), 4 * (8 * 64 + 64 + 64 * 5 + 5)  # bytes
    for found in result[
        "clients"
    ].values():  # the gate for the scores, then the gate and K experts; up go M scores alone
        assert found["bytes_down"] == 2 * gate + 2 * expert
        assert found["bytes_up"] == 5 * 8
        assert len(found["experts"]) == 2
    assert (
        sum(found["bytes_up"] > 0 for found in result["training"].values()) < 40
    )  # who never took part sent nothing
    choices = result["evaluations"][-1]["choices"]["aligned"]
    assert sum(map(sum, choices["given"])) == sum(
        len(prepare(load("ddome-digits")).site.data[i].test) for i in groups if "al" in i
    )
    correct = sum(map(sum, choices["right"])) / sum(map(sum, choices["given"]))
    assert 0 < correct < 1


def test_it_goes_on_where_it_was_stopped_and_loopback_is_the_same(tmp_path: Path) -> None:
    whole = as_json(run.run(load("ddome-digits", SHORT), tmp_path / "whole"))[-1]
    part = execution.Execution(
        prepare(load("ddome-digits", SHORT)), tmp_path / "part", Callback(), ""
    )
    make_folder(tmp_path / "part")
    with part.running():
        part.one_round(), part.one_round()
    resumed = execution.Execution(
        prepare(load("ddome-digits", SHORT)), tmp_path / "part", Callback(), ""
    )
    assert resumed.restore()
    assert resumed.state.round == 2
    again = as_json(resumed.execute())
    loopback = as_json(
        run.run(load("ddome-digits", [*SHORT, "engine=loopback"]), tmp_path / "loopback")
    )[-1]
    for other in (again, loopback):
        assert other["evaluations"] == whole["evaluations"]
        assert {i: c["bytes_down"] for i, c in other["training"].items()} == {
            i: c["bytes_down"] for i, c in whole["training"].items()
        }
    server = [
        load_tensors(max((tmp_path / name / "checkpoints").rglob("server.safetensors")))[0]
        for name in ("whole", "part", "loopback")
    ]
    for other in server[1:]:
        assert all((other[name] == tensor).all() for name, tensor in server[0].items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.name=local"], "data.unseen: local has no model for clients"),
        (["model.common=null"], "the gate of ddome needs embeddings"),
        (["data.public=0"], "the data have no public examples"),
        (["method.pool=3"], "3 experts for 5 anchors"),
        (["method.warmup=2", "method.anchors=false"], "needs anchors"),
        (
            [
                "model.common={path: w.safetensors, standardise: true}",
                "data.public=0",
            ],
            "w.safetensors",
        ),
        (["method.top_k=6"], "6 experts at a client of a pool of 5"),
        (["participation.schedule=grow"], "needs clusters"),
        (["method.initial=common", "model.common.network=cnn"], "different network"),
        (["model.common.path=nowhere.safetensors"], "give one"),
        (
            ["model.common.path=nowhere.safetensors", "model.common.pretraining=null"],
            "nowhere.safetensors",
        ),
        (["method.name=comigs-1g1s"], "LoRA experts"),
    ],
)
def test_what_cannot_be_is_refused_before_it_starts(
    settings: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=message):
        run.run(load("ddome-digits", [*SHORT, *settings]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_network_for_all_starts_from_the_common_expert_where_it_is_the_same_one() -> None:
    def starts(*settings: str) -> bool:
        prepared = prepare(
            load("ddome-digits", ["method.name=fedavg", "compare_with=[]", *settings])
        )
        server, common = (
            prepared.method.init(prepared.blueprint, prepared.clients),
            prepared.problem.common,
        )  # type: ignore[attr-defined]
        return all(
            tensor.equal(common.tensors[name])
            for name, tensor in server.items()
            if name in common.tensors
        )

    cnn = [
        "model.network=cnn",
        "model.common.network=cnn",
        "model.common.width=64",
        "model.common.pretraining.epochs=1",
    ]
    assert starts()
    assert starts(*cnn)  # the width that it has by default, and the same one named
    assert not starts("model.start=random")
    assert not starts("model.hidden=[9]", "model.common.network=mlp", "model.common.hidden=[8]")


def test_participation_draws_anchors_and_others_anew_each_round() -> None:
    part = Participation(clients=2, anchors=1)
    rounds = [part.of([*ANCHORS, *CLIENTS], ANCHORS, None, 3, t) for t in range(40)]
    assert all(len(active) == 3 and len(set(active) & set(ANCHORS)) == 1 for active in rounds)
    assert {i for active in rounds for i in active} == {*ANCHORS, *CLIENTS}
    assert rounds == [part.of([*ANCHORS, *CLIENTS], ANCHORS, None, 3, t) for t in range(40)]
    alike = Participation(clients=3)  # where anchors are clients like any other
    assert any(
        set(ANCHORS) <= set(alike.of([*ANCHORS, *CLIENTS], ANCHORS, None, 3, t)) for t in range(40)
    )
    assert Participation().of(CLIENTS, (), None, 3, 0) == tuple(CLIENTS)


def test_clusters_arrive_or_take_turns() -> None:
    clusters = {i: k // 2 for k, i in enumerate(CLIENTS)} | {"a": 0, "b": 2}
    everyone = [*ANCHORS, *CLIENTS]

    def there(schedule: str, round: int) -> set[str]:
        return set(
            Participation(schedule=schedule, every=10).of(everyone, ANCHORS, clusters, 0, round)
        )  # type: ignore[arg-type]

    assert there("grow", 9) == {"a", *CLIENTS[:2]}
    assert there("grow", 10) == {"a", *CLIENTS[:4]}
    assert there("grow", 999) == set(everyone)
    assert there("turns", 10) == {"a", *CLIENTS[2:4]}  # the anchor that has come stays
    assert there("turns", 20) == {*ANCHORS, *CLIENTS[4:]}
    assert there("turns", 30) == {*ANCHORS, *CLIENTS[:2]}


def test_a_method_that_compares_everybody_does_with_those_that_take_part(tmp_path: Path) -> None:
    settings = ["method.name=fc", "method.rounds=3", "participation.clients=2", "compare_with=[]"]
    result = as_json(run.run(load("cobo-digits", settings), tmp_path / "run"))[-1]
    assert sum(result["rounds_taken_part"].values()) == 6


@pytest.mark.slow
def test_the_specifications_small_real_run(tmp_path: Path) -> None:
    """Section 5, over three seeds of run and data: what anchors do to the gate, DDOME against
    FedAvg, and where it loses.
    """
    rows = {
        "ddome": [],
        "without anchors": ["method.anchors=false", "participation={clients: 10}"],
        "fedavg": ["method.name=fedavg"],
    }
    found: dict[str, list[Any]] = {name: [] for name in rows}
    for seed in range(3):
        for name, settings in rows.items():
            recipe = load(
                "ddome-digits", [*settings, f"seed={seed}", f"data.seed={seed}", "compare_with=[]"]
            )
            found[name] += as_json(run.run(recipe, tmp_path / f"{name}-{seed}"))
    gate = {
        n: fmean(r["evaluations"][-1]["choices"]["aligned"]["gate_accuracy"] for r in found[n])
        for n in ("ddome", "without anchors")
    }
    mean = {
        n: {g: fmean(r["groups"][g] for r in results) for g in ("aligned", "random")}
        for n, results in found.items()
    }
    assert gate["ddome"] >= 90, gate
    assert gate["without anchors"] <= 60, gate
    assert mean["ddome"]["aligned"] >= mean["fedavg"]["aligned"] + 1, mean
    assert mean["ddome"]["aligned"] >= mean["without anchors"]["aligned"], mean
    assert mean["ddome"]["random"] <= mean["fedavg"]["random"] - 5, (
        mean
    )  # a loss, which the paper does not have: two experts know four labels


def test_a_run_whose_time_is_over_fits_the_common_weights(tmp_path: Path) -> None:
    settings = ("method.name=ddome-shared", "method.rounds=6", "method.local_epochs=1")
    recipe = load("ddome-digits", ["compare_with=[]", "evaluate_every=0", *settings])
    early = execution.Execution(prepare(recipe), tmp_path, until=time.monotonic())
    early.execute()
    assert early.state.round == 1
    centre = early.state.server[CENTRE]
    assert not torch.equal(centre, torch.full_like(centre, 1 / len(centre)))
