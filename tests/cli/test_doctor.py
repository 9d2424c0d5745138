"""`coterie doctor`, completion, and the complaint about settings without --set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import doctor
from coterie.cli.base import app
from coterie.core import devices
from coterie.core.importing import EXTRAS


def test_a_machine_that_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.stdout
    for part in ("Python", "torch", "device", "threads", "memory", "disk", "loads and computes"):
        assert part in done.stdout
    assert all(f"extra {name}" in done.stdout for name in EXTRAS)
    assert "Ready" in done.stdout


def test_what_is_missing_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "free_memory", lambda: 2**27)
    monkeypatch.setattr(doctor, "CORE", ("torch", "no-such-package"))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "0.1 GiB free" in done.stdout
    assert "pip install no-such-package" in done.stdout
    assert "not installed: uvicorn" in done.stdout
    assert "[serve]" in done.stdout
    assert "2 of these must be mended" in done.stdout


def test_settings_behind_one_set_are_told_to_repeat_it() -> None:
    words = ["run", "quickstart", "--set", "method.rounds=1", "seed=2", "method.lr=0.1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    told = " ".join(done.stderr.replace("│", " ").split())
    assert "unexpected extra arguments (seed=2 method.lr=0.1)" in told
    assert "Repeat --set for each field: ... --set seed=2 --set method.lr=0.1" in told
    other = CliRunner().invoke(app, ["run", "quickstart", "twice"])
    assert "--set for each" not in other.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("coterie doc", ["doctor"]),
        ("coterie export runs/b --format on", ["onnx"]),
    ],
)
def test_a_shell_can_complete_what_there_is(words: str, offered: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "_COTERIE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; sys.argv = ['coterie']; from coterie.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == offered


def test_a_command_that_was_misspelt_is_suggested_once() -> None:
    done = CliRunner().invoke(app, ["copmare"])
    assert done.exit_code == 2
    assert done.stderr.count("Did you mean 'compare'?") == 1


def test_help_is_wrapped_at_the_terminals_width_and_nowhere_else() -> None:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"])
    lines = [line.strip("│ ") for line in done.stdout.splitlines()]
    assert max(map(len, done.stdout.splitlines())) <= 80
    (place,) = (k for k, line in enumerate(lines) if line.startswith("tune "))
    assert "any field, with the same effort for every method" in " ".join(lines[place : place + 3])
    assert lines[place + 1].endswith("instance:")  # as much as fits
