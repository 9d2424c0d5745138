"""On an accelerator that is simulated, in a process of its own, see `checks`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("checks.py")


def checked(*options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-x"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, str(CHECKS), *options],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_what_a_gpu_refuses_is_refused_and_everything_comes_to_the_same() -> None:
    checked("-m", "not slow")


@pytest.mark.slow
def test_every_method_on_an_accelerator() -> None:
    checked("-m", "slow")
