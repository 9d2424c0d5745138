"""Privacy of single examples across devices: repeated where it should be, never where it should
not, and counted by both sides.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from figures import as_json
from nodes import Nodes, devices, finished

from coterie.aggregation.accountant import epsilon_of
from coterie.aggregation.dpsgd import rate_of, rdp_of_steps
from coterie.engines.messages import Request
from coterie.runs.device.account import ACCOUNT, Account
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.run import run

pytest.importorskip("opacus")
IDS = tuple(f"c{a}-{b}" for a in range(2) for b in range(2))
SETTINGS = [
    "method.name=fedavg",
    "method.rounds=3",
    "method.local_steps=2",
    "compare_with=[]",
    "data.clusters=2",
    "evaluate_every=0",
]
PRIVACY = "privacy={unit: example, clip: 1.0, noise: 2.0, delta: 1.0e-3}"


def private(*more: str) -> Recipe:
    return load("cobo-digits", [*SETTINGS, PRIVACY, *more])


@pytest.fixture
def grid(tmp_path: Path) -> Nodes:
    found = Nodes()
    for client in IDS:
        found.add({"client": client, "home": str(tmp_path / client)})
    return found


def spent(steps: int) -> float:
    """Epsilon of so many steps, of a client of the recipe's data."""
    windows = prepare(private()).problem.federation.clients[IDS[0]].train.windows
    return epsilon_of(0.0, rdp_of_steps(rate_of(windows, 20), 2.0, steps), 1e-3)


def test_over_bytes_a_simulation_is_the_same(tmp_path: Path) -> None:
    here, there = (
        as_json(run(private(f"engine={name}"), tmp_path / name))[-1]
        for name in ("inprocess", "loopback")
    )
    assert here["evaluations"] == there["evaluations"]
    assert here["privacy"] == there["privacy"]
    assert here["privacy"]["experiment"]
    assert "can draw the same noise, and the same examples" in here["privacy"]["assumes"]


def test_servers_and_devices_count_the_same_and_two_runs_are_never_the_same(
    grid: Nodes, tmp_path: Path
) -> None:
    recipe = private("engine=flower")
    results = [
        finished(recipe, tmp_path / name, devices(grid, recipe, 4)) for name in ("one", "two")
    ]
    assert (
        results[0]["mean_loss"] != results[1]["mean_loss"]
    )  # noise is secret: a seed does not repeat it
    for result in results:
        assert not result["privacy"]["experiment"]
        assert result["privacy"]["clients"] == dict.fromkeys(IDS, pytest.approx(spent(6)))
    for client in IDS:
        assert Account(tmp_path / client / ACCOUNT).epsilon(1e-3) == pytest.approx(
            spent(12)
        )  # over both runs


class Stopped(Exception):
    pass


def test_a_server_that_goes_back_counts_both_times(grid: Nodes, tmp_path: Path) -> None:
    recipe, folder = private("engine=flower", "checkpoint_every=3"), tmp_path / "run"

    def before(nodes: Nodes, request: Request, node: int) -> None:
        if request.action == "task" and request.round == 2 and request.phase >= 0:
            raise Stopped

    grid.before = before
    with pytest.raises(Stopped):
        finished(recipe, folder, devices(grid, recipe, 4))
    grid.before = lambda nodes, request, node: None
    result: dict[str, Any] = finished(recipe, folder, devices(grid, recipe, 4))
    assert result["privacy"]["clients"] == dict.fromkeys(
        IDS, pytest.approx(spent(10))
    )  # two rounds, and then all three
    for client in IDS:
        assert Account(tmp_path / client / ACCOUNT).epsilon(1e-3) == pytest.approx(spent(10))
    assert len((folder / "released.jsonl").read_text().splitlines()) == 5
    json.dumps(result, allow_nan=False)
