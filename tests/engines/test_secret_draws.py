"""Who takes part under central privacy on devices: drawn from what only the server has, counted
as drawn, and alike when it resumes.
"""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from figures import as_json
from nodes import Nodes, devices, execution, finished

from coterie.aggregation.accountant import Accountant
from coterie.core.errors import CheckpointError
from coterie.data.federation import ClientData, Federation
from coterie.data.splits import SPLITS, RemoteSplit
from coterie.engines.messages import Request
from coterie.runs import run
from coterie.runs.folder import names as files
from coterie.runs.folder.metrics import Released
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe, load

pytest.importorskip("opacus")

IDS = tuple(f"c{a}-{b}" for a in range(2) for b in range(2))
PRIVACY = "privacy={where: central, clip: 1.0, noise: 4.0, delta: 1e-5}"
SETTINGS = [
    "method.name=fedavg",
    "method.rounds=8",
    "method.local_steps=1",
    "compare_with=[]",
    "data.clusters=2",
    "evaluate_every=0",
]


@pytest.fixture
def grid(tmp_path: Path) -> Nodes:
    found = Nodes()
    for client in IDS:
        found.add({"client": client, "home": str(tmp_path / client)})
    return found


def drawing(*more: str) -> Recipe:
    return load(
        "cobo-digits", [*SETTINGS, "engine=flower", "participation.clients=2", PRIVACY, *more]
    )


def asked(grid: Nodes, skip: int = 0) -> dict[int, set[str]]:
    """Who was asked to train, by round; of each node without its first requests."""
    found: dict[int, set[str]] = {}
    for node in grid.nodes.values():
        for request in node.requests[skip:]:
            if request.action == "task" and request.phase >= 0:
                found.setdefault(request.round, set()).add(request.client)
    return found


def predicted(seen: list[Request], rounds: int) -> dict[int, set[str]]:
    """Who a device thinks takes part, from the recipe in what it was sent: the attack."""
    recipe = recipes.validate(seen[0].recipe, "seen by a device")
    everyone = Federation(
        {i: ClientData(i, *(RemoteSplit(split, 1) for split in SPLITS)) for i in IDS}, ""
    )
    return {round: set(recipe.active(everyone, round)) for round in range(rounds)}


def exchanges(folder: Path) -> list[Any]:
    newest = max((folder / "checkpoints").glob("round-*"))
    return json.loads((newest / "checkpoint.json").read_text())["progress"]["spent"]


def test_a_device_cannot_predict_who_is_drawn(grid: Nodes, tmp_path: Path) -> None:
    recipe = drawing()
    result = finished(recipe, tmp_path / "run", devices(grid, recipe, 4))
    truth, spied = asked(grid), list(grid.of("c1-1").requests)
    assert [len(truth[round]) for round in range(8)] == [2] * 8
    assert predicted(spied, 8) != truth  # all of them right by chance: 1 of 6^8
    secret = tmp_path / "run" / files.SECRET
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    sent = "".join(
        request.model_dump_json() for node in grid.nodes.values() for request in node.requests
    )
    assert secret.read_bytes().hex() not in sent
    assert "the observer does not know who was drawn" in result["privacy"]["assumes"]
    assert exchanges(tmp_path / "run") == [[8, 0.5]]
    for node in grid.nodes.values():
        node.requests.clear()
    finished(
        recipe, tmp_path / "other", devices(grid, recipe, 4)
    )  # another server with the same recipe and seed
    assert asked(grid) != truth


def test_where_draws_follow_from_the_seed_the_epsilon_is_said_to_be_of_an_experiment(
    tmp_path: Path,
) -> None:
    recipe = drawing("engine=inprocess", "method.rounds=2")
    (result,) = as_json(run.run(recipe, tmp_path / "run"))
    assert result["privacy"]["experiment"]
    assert "can draw the same noise, and the same clients" in result["privacy"]["assumes"]
    assert not (tmp_path / "run" / files.SECRET).exists()
    again = as_json(run.run(recipe, tmp_path / "again"))[-1]
    assert again["mean"] == result["mean"]
    many = Accountant(recipe.privacy, 10_000, experiment=True)
    for _ in range(30):
        many.spend(500, 10_000)
    assert many.summary().experiment


def test_all_methods_of_a_comparison_see_the_same_draws(tmp_path: Path) -> None:
    recipe = drawing("engine=inprocess", "method.rounds=3", "metrics_every=1")
    run.compare(["fedavg", "ditto"], recipe, tmp_path, seeds=1)

    def seen(method: str) -> list[tuple[int, str]]:
        lines = map(
            json.loads, (tmp_path / method / "seed-0" / "metrics.jsonl").read_text().splitlines()
        )
        return sorted(
            {(line["round"], line["client"]) for line in lines if line["kind"] == "train"}
        )

    assert len(seen("fedavg")) == 6
    assert seen("fedavg") == seen("ditto")


def test_a_device_that_cannot_be_reached_makes_nobody_elses_chance_smaller(
    grid: Nodes, tmp_path: Path
) -> None:
    recipe = drawing("participation.clients=3", "quorum.min_clients=1", "method.rounds=4")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / files.SECRET).write_bytes(bytes(32))  # always the same draws
    started = execution(devices(grid, recipe, 4), recipe, tmp_path / "run")
    grid.of(IDS[0]).alive = False
    started.execute()
    assert [len(clients) for clients in asked(grid).values()].count(
        2
    ) > 0  # it was drawn, and not asked
    assert exchanges(tmp_path / "run") == [[4, 0.75]]


class Stopped(Exception):
    pass


def stopped(grid: Nodes, recipe: Recipe, folder: Path, round: int) -> dict[int, set[str]]:
    """Stop a run when it has asked somebody to train in a round; returns who was asked."""

    def before(nodes: Nodes, request: Request, node: int) -> None:
        if request.action == "task" and request.round == round and request.phase >= 0:
            raise Stopped

    grid.before = before
    with pytest.raises(Stopped):
        finished(recipe, folder, devices(grid, recipe, 4))
    grid.before = lambda nodes, request, node: None
    return asked(grid)


def result_of(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_a_run_that_is_resumed_draws_and_sends_the_same_and_counts_once(
    grid: Nodes, tmp_path: Path
) -> None:
    recipe, folder = drawing("checkpoint_every=4"), tmp_path / "run"
    stopped(grid, recipe, folder, 3)  # rounds 0 to 2 have been done, and no checkpoint was written
    first = (folder / "released.jsonl").read_text().splitlines()
    assert len(first) == 3
    counts = {id: len(node.requests) for id, node in grid.nodes.items()}
    before = asked(grid)
    finished(recipe, folder, devices(grid, recipe, 4))
    for id, node in grid.nodes.items():
        del node.requests[: counts[id]]
    after = asked(grid)
    assert [after[round] for round in range(3)] == [before[round] for round in range(3)]
    assert (folder / "released.jsonl").read_text().splitlines()[
        :3
    ] == first  # the same to the last bit, so with the same noise
    assert exchanges(folder) == [[8, 0.5]]


def test_a_round_that_is_done_again_with_other_replies_is_counted_again(
    grid: Nodes, tmp_path: Path
) -> None:
    recipe, folder = (
        drawing(
            "checkpoint_every=4",
            "participation.clients=4",
            "quorum.min_clients=1",
            "method.rounds=4",
        ),
        tmp_path / "run",
    )
    stopped(grid, recipe, folder, 2)
    grid.of(IDS[0]).alive = False
    finished(recipe, folder, devices(grid, recipe, 3))
    assert exchanges(folder) == [
        [6, 1.0]
    ]  # four rounds, and the two whose first results others may have seen
    assert result_of(folder)["privacy"]["sampling"].startswith("6 exchanges")


def test_a_damaged_list_of_what_left_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"phase": 0}'):
        (tmp_path / "released.jsonl").write_text(text + "\n")
        with pytest.raises(CheckpointError, match="is damaged"):
            Released(tmp_path / "released.jsonl").since(0)
