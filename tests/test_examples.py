"""The programs in `examples/` run as they are, away from the network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = {
    "own_data": ("dryton: test perplexity", "coldham: "),
    "own_method": ("own_method:MyMethod: test accuracy, %", "Best: "),
    "train_and_use": ("network: test perplexity", "report.html"),
}


def test_every_example_is_run_here() -> None:
    pages = {path.stem for path in EXAMPLES.glob("*_in_one_file.py")}  # see test_one_file.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} - pages == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in SAID[name]:
        assert words in done.stdout
    assert list((tmp_path / "runs").glob("*/report.html"))
