"""When a server goes on without some of its clients, and when it does not."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reported
from figures import as_json
from nodes import Nodes, devices, execution, finished, silent

from coterie.core.errors import ClientError
from coterie.runs import requests, run
from coterie.runs.folder.metrics import MetricsFile
from coterie.runs.recipes.recipe import Recipe, load

SETTINGS = [
    "method.rounds=3",
    "compare_with=[]",
    "data.clusters=2",
    "metrics_every=1",
    "checkpoint_every=1",
    "evaluate_every=0",
]
CLIENTS = ("c0-0", "c0-1", "c1-0")


@pytest.fixture
def grid(tmp_path: Path) -> Nodes:
    found = Nodes()
    for client in CLIENTS:
        found.add({"client": client, "home": str(tmp_path / client)})
    return found


def recipe_of(method: str, quorum: str) -> Recipe:
    return load(
        "cobo-digits", [*SETTINGS, "engine=flower", f"method.name={method}", f"quorum={{{quorum}}}"]
    )


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [
        line
        for text in (folder / "metrics.jsonl").read_text().splitlines()
        if (line := json.loads(text))["kind"] == kind
    ]


def before_task(grid: Nodes, do: Callable[[Any], None]) -> None:
    grid.before = lambda nodes, request, node: do(request) if request.action == "task" else None


def resumable(recipe: Recipe, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(run.recipes.dump(recipe))


@pytest.mark.parametrize("method", ["fedavg", "cobo", "pcl"])
def test_a_client_that_never_answers_is_left_out_of_everything(
    method: str, grid: Nodes, tmp_path: Path
) -> None:
    """Training, scores and personal models; the report is written all the same."""
    recipe = recipe_of(method, "deadline: 0.3")
    grid.nodes[1007].spoil = silent()
    backend = devices(grid, recipe, 3)
    result = as_json(reported.run(recipe, tmp_path / "out", backend=backend))[-1]
    assert set(result["clients"]) == {"c0-0", "c1-0"}
    said = lines(tmp_path / "out", "lost")
    assert {line["client"] for line in said} == {"c0-1"}
    assert {line["reason"] for line in said} == {"no reply within 0.3 s"}
    assert result["lost"] == {"c0-1": len(said)}
    assert (tmp_path / "out/report.html").exists()
    assert {line["client"] for line in lines(tmp_path / "out", "train")} == {"c0-0", "c1-0"}
    assert result["mean"] == pytest.approx(sum(c["test"] for c in result["clients"].values()) / 2)


def test_fewer_than_wanted_stop_the_run_which_can_go_on(grid: Nodes, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "deadline: 0.2, min_clients: 3")

    def mute(request: Any) -> None:
        grid.nodes[1014].spoil = silent() if request.round >= 1 else None

    before_task(grid, mute)
    resumable(recipe, tmp_path / "out")
    with pytest.raises(ClientError) as raised:
        finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert raised.value.exit_code == 1
    assert str(raised.value).startswith(
        "round 2, local_round: 2 of 3 clients answered, quorum.min_clients is 3\n  "
    )
    assert "metrics.jsonl says why" in str(raised.value)
    assert "with --resume" in str(raised.value)
    assert [(line["round"], line["client"]) for line in lines(tmp_path / "out", "lost")] == [
        (2, "c1-0")
    ]
    before_task(grid, lambda request: None)
    grid.nodes[1014].spoil = None
    resumed = as_json(
        run.run(recipe, tmp_path / "out", resume=True, backend=devices(grid, recipe, 3))
    )[-1]
    other = Nodes()
    for client in CLIENTS:
        other.add({"client": client, "home": str(tmp_path / "other" / client)})
    whole = as_json(run.run(recipe, tmp_path / "whole", backend=devices(other, recipe, 3)))[-1]
    assert resumed["evaluations"] == whole["evaluations"]
    assert lines(tmp_path / "out", "note") == []


@pytest.mark.parametrize("method", ["fedavg", "cobo", "pcl"])
def test_nobody_there_is_no_round(method: str, grid: Nodes, tmp_path: Path) -> None:
    """A method that can do without some of its clients cannot do without all."""
    recipe = recipe_of(method, "deadline: 0.2")
    started = execution(devices(grid, recipe, 3), recipe, tmp_path / "out")
    started.started, started.requests.metrics = 0.0, MetricsFile(tmp_path / "out")
    started.one_round()
    for node in grid.nodes.values():
        node.alive = False
    with pytest.raises(ClientError, match=r"0 of 3 clients answered, quorum\.min_clients is 1"):
        started.one_round()
    started.requests.metrics.close()
    assert started.state.round == 1
    assert {line["reason"] for line in lines(tmp_path / "out", "lost")} == {
        "its device is not connected"
    }


@pytest.mark.parametrize("method", ["fedavg", "pcl"])
def test_it_waits_for_a_device_that_was_started_again(
    method: str, grid: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another number, as Flower gives it; the exchange that it missed is made up for."""
    recipe = recipe_of(method, "deadline: 5, min_clients: 3, otherwise: wait")
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            grid.restart(1014)

    clock = {"sleep": staticmethod(sleep), "monotonic": staticmethod(time.monotonic)}
    monkeypatch.setattr(requests, "time", type("Clock", (), clock))

    def kill(request: Any) -> None:
        if request.round == 1 and not waited:
            grid.nodes[1014].alive = False

    before_task(grid, kill)
    result = finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert set(result["clients"]) == set(CLIENTS)
    assert waited == [requests.AGAIN_S] * 3
    assert result["lost"] == {"c1-0": 1}  # said once, however long it was waited for
    others = Nodes()
    for client in CLIENTS:
        others.add({"client": client, "home": str(tmp_path / "other" / client)})
    assert (
        finished(recipe, tmp_path / "whole", devices(others, recipe, 3))["evaluations"]
        == result["evaluations"]
    )


def test_who_answered_is_not_asked_again_and_a_late_one_is_answered_alike(
    grid: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first exchange of a client whose reply was lost: it has done the work already, and
    does it again from the same state.
    """
    recipe = recipe_of("fedavg", "deadline: 0.2, min_clients: 3, otherwise: wait")
    monkeypatch.setattr(requests, "AGAIN_S", 0.01)
    grid.nodes[1014].spoil = silent()
    asked: list[str] = []

    def hear(request: Any) -> None:
        if (request.round, request.task) == (0, "local_round"):
            asked.append(request.client)
            if asked.count("c1-0") == 3:
                grid.nodes[1014].spoil = None

    before_task(grid, hear)
    result = finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert sorted(asked) == ["c0-0", "c0-1", *["c1-0"] * 3]
    assert result["lost"] == {"c1-0": 2}
    others = Nodes()
    for client in CLIENTS:
        others.add({"client": client, "home": str(tmp_path / "other" / client)})
    assert (
        finished(recipe, tmp_path / "whole", devices(others, recipe, 3))["evaluations"]
        == result["evaluations"]
    )


def test_a_deadline_is_kept(grid: Nodes, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "deadline: 0.5")
    backend = devices(grid, recipe, 3)
    started = execution(backend, recipe, tmp_path / "out")
    for node in grid.nodes.values():
        node.spoil = silent("local_round")
    before = time.monotonic()
    with pytest.raises(ClientError, match="0 of 3 clients answered"):
        started.one_round()
    assert 0.5 <= time.monotonic() - before < 5
