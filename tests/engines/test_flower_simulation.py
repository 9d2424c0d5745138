"""Flower's own simulation, once, as a person starts it: a command, Ray, and nothing left behind."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from coterie.core.files import load as load_tensors
from coterie.runs import run
from coterie.runs.recipe import load

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


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -e '.[simulation]'",
)
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
