"""Runs on devices whose server tells trackers of them: what the real programs keep there."""

import importlib.util
import json
import sqlite3
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from offline_trackers import SECRETS, assert_no_secrets, every_byte, secret_texts
from terminals import terminals, written

from coterie.core.errors import Refused
from coterie.deploy import apps
from coterie.deploy.keys import free_port
from coterie.engines.flower.apps import LocalGrid, LocalNode
from coterie.reports.trackers import TRACKED, TRACKERS

KEPT = {"wandb": "wandb", "mlflow": "mlflow.db"}
CLIENTS = ("ann", "bob")


def installed() -> list[str]:
    found = [name for name in TRACKERS if importlib.util.find_spec(name)]
    return found or pytest.skip("no tracker is installed")


def talkative(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """A device that tells the server a word of its texts."""
    reply, tensors = apps.answer(node, text, body)
    return json.dumps(json.loads(reply) | {"note": SECRETS[0]}), tensors


def devices(folder: Path) -> LocalGrid:
    """Two devices with their own texts."""
    grid = LocalGrid()
    for client in CLIENTS:
        secret_texts(data := folder / client / "data", client)
        node = {"client": client, "home": str(folder / client / "home"), "data": str(data)}
        grid.put(LocalNode(node, talkative))
    return grid


def config(recipe: Path, out: Path, track: str) -> dict[str, Any]:
    """What a run is submitted with."""
    given = {"recipe": str(recipe), "out": str(out), "track": track}
    return {"set": "", "seed": -1, "resume": False, "clients": 2, "patience": 5.0} | given


def serve_on_devices(folder: Path, given: Mapping[str, Any]) -> None:
    """What a SuperLink starts for a run, in a process of its own."""
    apps.serve(devices(folder), given)


def test_the_servers_trackers_have_the_figures_and_no_text(offline: Path, tmp_path: Path) -> None:
    names = installed()
    recipe, out = written(tmp_path, evaluate_every=1, metrics_every=1), tmp_path / "run"
    given = config(recipe, out, ";".join(names))
    with ProcessPoolExecutor(1, get_context("spawn")) as server:
        server.submit(serve_on_devices, tmp_path, given).result()
    for name in names:
        kept = every_byte(offline / KEPT[name])
        for figure in ("train/tokens/ann", "score/test/bob", "local_steps"):
            assert kept.count(figure.encode()), f"{name}: {figure}"
    assert SECRETS[0] in (out / "metrics.jsonl").read_text()
    assert_no_secrets(every_byte(offline))
    assert set(json.loads((out / TRACKED).read_text())) == set(names)


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_tracker_that_the_server_lacks_is_refused_before_a_device_is_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    grid, recipe, out = devices(tmp_path), written(tmp_path), tmp_path / "run"
    refusals = {name: f"--track {name} needs {name}", "neptune": "--track neptune: there is no"}
    for track, problem in refusals.items():
        with pytest.raises(Refused, match=problem):
            apps.serve(grid, config(recipe, out, track))
        assert f"coterie: {problem}" in capsys.readouterr().err
    assert not grid.sent
    assert not out.exists()


@pytest.mark.slow
def test_a_run_that_is_submitted_is_tracked_on_the_servers_machine(
    offline: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow.tracking")
    port, runs_port = free_port(), free_port()
    to = ("--insecure", "--home", "home")
    with terminals(tmp_path) as terminal:
        ports = ("--port", str(port), "--runs-port", str(runs_port))
        terminal("server", "server", "--host", "127.0.0.1", *ports, *to).says("Ctrl-C stops it.")
        for client in CLIENTS:
            secret_texts(tmp_path / client / "data", client)
            own = ("--client", client, "--data", "data", "--server", f"127.0.0.1:{port}")
            terminal(client, "client", *own, *to)
        words = ("submit", str(written(tmp_path)), "--server", f"127.0.0.1:{runs_port}", *to)
        run = terminal("server", *words, "--out", "run", "--track", "mlflow")
        assert run.ends() == 0, run.text
    with sqlite3.connect(offline / "mlflow.db") as base:
        rows = base.execute("select step, key, value from metrics").fetchall()
    told = {(step, key): value for step, key, value in rows}
    result = json.loads((tmp_path / "server/run/result.json").read_text())
    assert told[2, "result/mean"] == pytest.approx(result["mean"])
    assert_no_secrets(every_byte(offline))
