"""What commands that only talk do without: torch takes seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "pydantic",
    "datasets",
    "matplotlib",
    "tensorboard",
    "flwr",
    "rich.progress",
    "peft",
}


def imported(words: list[str], cwd: Path) -> tuple[int, set[str]]:
    """The exit code of a command line in a process of its own, and the heavy modules that it
    imported.
    """
    code = f"""
import sys
from coterie.cli.base import main
sys.argv = ["coterie", *{words!r}]
try:
    main()
except SystemExit as end:
    print("\\nloaded", end.code, *(name for name in {sorted(HEAVY)!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    _, end, *names = done.stdout.splitlines()[-1].split()
    return int(end), set(names)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["audit", "--help"], 0),
        (["--version"], 0),
        (["methods"], 0),
        (["recipes"], 0),
        (["run", "--colour"], 2),
        (["train"], 2),
    ],
)
def test_what_only_talks_imports_nothing_heavy(words: list[str], code: int, tmp_path: Path) -> None:
    assert imported(words, tmp_path) == (code, set())


def test_a_recipe_is_refused_before_the_rest_is_imported(tmp_path: Path) -> None:
    code, names = imported(["run", "quickstart", "--set", "method.roundz=1"], tmp_path)
    assert code == 2
    assert "torch" in names  # so that this test would see others
    assert not names & {
        "transformers",
        "scipy",
        "datasets",
        "matplotlib",
        "tensorboard",
        "flwr",
        "rich.progress",
        "peft",
    }
