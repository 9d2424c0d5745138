"""Flower's own simulation, as a person starts it: a command, Ray, and nothing left behind; and on a
Ray cluster of several machines, with an accelerator for each client that computes.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from coterie.core.callback import Callback
from coterie.core.files import load as load_tensors
from coterie.engines.flower import apps as simulation
from coterie.engines.flower import engine as flower
from coterie.runs import backends, run
from coterie.runs.backends import LocalBackend
from coterie.runs.recipes.recipe import load

SETTINGS = ["method.rounds=2", "compare_with=[fedavg]", "data.clusters=1", "evaluate_every=1"]


def started_with(mark: str) -> list[int]:
    """Our processes that have this mark in their environment, by id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """What marks the processes of a test; they are ended after it."""
    mark = uuid4().hex
    yield mark
    for process in started_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -e '.[simulation]'",
)


@pytest.mark.slow
@needs_ray
def test_two_rows_in_one_simulation_are_what_one_process_computes(
    mark: str, tmp_path: Path
) -> None:
    words = [word for setting in [*SETTINGS, "engine=flower"] for word in ("--set", setting)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "coterie",
            "run",
            "cobo-digits",
            *words,
            "--out",
            str(tmp_path / "there"),
        ],
        env=os.environ | {"COTERIE_TEST_MARK": mark, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run.run(load("cobo-digits", [*SETTINGS, "engine=loopback"]), tmp_path / "here")
    for row in (Path(), Path("baselines/fedavg")):
        here, there = (
            json.loads((tmp_path / place / row / "result.json").read_text())
            for place in ("here", "there")
        )
        assert there["lost"] == {}
        assert there["evaluations"] == here["evaluations"]
        assert there["clients"] == here["clients"]
        for name in (
            "checkpoints/round-00002/server.safetensors",
            "clients/c0-1/classifier.safetensors",
        ):
            ours, theirs = (
                load_tensors(tmp_path / place / row / name)[0] for place in ("here", "there")
            )
            assert {k: t.tolist() for k, t in theirs.items()} == {
                k: t.tolist() for k, t in ours.items()
            }
    end = time.monotonic() + 30
    while started_with(mark) and time.monotonic() < end:
        time.sleep(0.5)
    assert started_with(mark) == []


@pytest.mark.parametrize(
    ("device", "asked"),
    [("cuda:1", ("cuda", 1, 1)), ("xpu", ("xpu", 1, 1)), ("mps", ("auto", 3, 0))],
)
def test_clients_on_gpus_have_one_each_whatever_the_servers_is(
    device: str,
    asked: tuple[str, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []

    def simulated(clients: int, threads: int, handle: object, accelerators: int) -> None:
        found.extend((threads, accelerators))

    def engine(recipe: Any, *rest: object, **options: object) -> None:
        found.insert(0, recipe.model.device)

    monkeypatch.setattr(simulation, "simulated", simulated)
    monkeypatch.setattr(backends, "flower_engine", engine)
    monkeypatch.setattr(flower, "gathered", lambda *rest, **settings: None)
    prepared = LocalBackend().prepare(load("cobo-digits", [*SETTINGS, "engine=flower"]))
    there = replace(
        prepared, problem=replace(prepared.problem, device=torch.device(device)), threads=3
    )
    LocalBackend().engine(there, tmp_path, Callback())
    assert tuple(found) == asked


WHERE = """
import sys, time
from flwr.app import Message
from coterie.engines.flower.apps import packed, unpacked
from coterie.engines.flower.apps import simulated
from coterie.engines.messages import Request

def where(node, text, body):
    import ray
    about = ray.get_runtime_context()
    time.sleep(1)  # that one machine does not answer for all
    return about.get_node_id() + " " + ",".join(about.get_accelerator_ids()["GPU"]), b""

grid = simulated(4, 1, where, accelerators=1)
while len(nodes := list(grid.get_node_ids())) < 4:
    time.sleep(0.1)
asked = packed(Request(action="hello", run="r", recipe={}).model_dump_json(), b"")
sent = [Message(asked, dst_node_id=node, message_type="query.coterie") for node in nodes]
for reply in grid.send_and_receive(sent, timeout=120):
    print(unpacked(reply.content)[0])
"""


@pytest.fixture
def cluster(mark: str) -> Iterator[tuple[str, Path]]:
    """A Ray cluster of two machines with a core and an accelerator each: its address, and the
    folder of its logs, in which no other run finds it. The accelerators are only counted.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        for where in (
            ["--head", "--port", address.rpartition(":")[2], "--temp-dir", folder],
            ["--address", address],
        ):
            words = ["start", *where, "--num-cpus", "1", "--num-gpus", "1"]
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *words],
                env=os.environ
                | {
                    "COTERIE_TEST_MARK": mark,
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
                    "RAY_USAGE_STATS_ENABLED": "0",
                },
                capture_output=True,
                timeout=120,
                check=True,
            )
        yield address, Path(folder)


def started(address: str, mark: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Python, whose simulations are on the cluster with this address."""
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ
        | {
            "RAY_ADDRESS": address,
            "COTERIE_TEST_MARK": mark,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def on(cluster: tuple[str, Path], mark: str, *words: str) -> str:
    """What Python prints whose simulation is on a cluster."""
    done = started(cluster[0], mark, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_ray
def test_a_cluster_that_does_not_answer_is_refused_at_once(mark: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    words = ["-m", "coterie", "run", "cobo-digits", "--set", "engine=flower"]
    done = started(address, mark, *words, "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert f"RAY_ADDRESS is {address}, where no Ray cluster answers" in done.stderr
    assert "Traceback" not in done.stderr


@needs_ray
@pytest.mark.slow
def test_a_cluster_without_what_a_client_needs_is_refused(
    cluster: tuple[str, Path], mark: str
) -> None:
    wanted = WHERE.replace("accelerators=1", "accelerators=2")
    done = started(cluster[0], mark, "-c", wanted)
    assert "ClientError: no machine of Ray's has 1 cores and 2 GPU" in done.stderr


@needs_ray
@pytest.mark.slow
def test_clients_on_a_cluster_have_an_accelerator_each_on_all_of_its_machines(
    cluster: tuple[str, Path], mark: str
) -> None:
    found = [line.split(" ") for line in on(cluster, mark, "-c", WHERE).splitlines()]
    assert len(found) == 4
    assert len({machine for machine, _ in found}) == 2
    assert {accelerators for _, accelerators in found} == {"0"}  # each machine's only one


@needs_ray
@pytest.mark.slow
def test_a_run_on_a_cluster_is_what_one_process_computes(
    cluster: tuple[str, Path], mark: str, tmp_path: Path
) -> None:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    there = tmp_path / "there"
    run_it = ["-m", "coterie", "run", "cobo-digits", *settings, "--set", "engine=flower"]
    on(cluster, mark, *run_it, "--out", str(there))
    run.run(load("cobo-digits", [*SETTINGS, "engine=loopback"]), tmp_path / "here")
    for row in (Path(), Path("baselines/fedavg")):
        ours, theirs = (
            json.loads((place / row / "result.json").read_text())
            for place in (tmp_path / "here", there)
        )
        assert theirs["evaluations"] == ours["evaluations"]
        assert theirs["clients"] == ours["clients"]
    logs = cluster[1].glob("session_*/logs/worker-*.out")
    assert len([log for log in logs if "ClientAppActor" in log.read_text()]) >= 2
