"""What surrounds the command line: outputs that are full or that nobody reads, odd widths, and
arguments that are no text.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "coterie"]
SHORT = ["--set", "method.rounds=1", "--set", "method.local_steps=1", "--set", "compare_with=[]"]


def test_training_goes_on_when_its_reader_has_left(tmp_path: Path) -> None:
    command = [*COMMAND, "run", "cobo-digits", *SHORT, "--out", str(tmp_path / "run")]
    reading, writing = os.pipe()
    process = subprocess.Popen(command, stdout=writing, stderr=writing)
    os.close(writing)
    os.close(reading)  # as `| head` does
    assert process.wait(120) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["method"] == "cobo"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_output_is_named_at_the_end() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "methods"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "coterie: standard output: No space left on device\n"


def test_a_closed_output_is_no_error() -> None:
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *COMMAND, "methods"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("columns", ["0", "1", "-1", "many", ""])
def test_a_width_in_which_nothing_fits_is_not_taken(columns: str) -> None:
    done = subprocess.run(
        [*COMMAND, "recipes"],
        env=os.environ | {"COLUMNS": columns},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "quickstart" in done.stdout
    assert len(done.stdout.splitlines()) < 200


def test_arguments_that_are_no_text_are_shown_and_refused() -> None:
    done = subprocess.run(
        [*[os.fsencode(part) for part in COMMAND], b"run", b"\xff\xfe"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"\\udcff\\udcfe" in done.stderr
    assert b"Traceback" not in done.stderr
