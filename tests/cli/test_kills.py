"""Kill -9 at fifty random moments: what is resumed afterwards ends with the same bytes in every
file as the undisturbed run.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folder_contents import contents

QUICK = (
    "method.rounds=4",
    "method.local_steps=2",
    "method.router_every=3",
    "method.router_steps=1",
    "compare_with=[local]",
)
SMALL = (
    "data.train_tokens=6000",
    "data.valid_tokens=1500",
    "data.test_tokens=1500",
    "training.batch_size=4",
    "model.context=32",
)
JOBS = {  # settings, and how many kills
    "quickstart": ((*QUICK, *SMALL), 18),
    "cobo-digits": (
        ("method.rounds=150", "checkpoint_every=5", "evaluate_every=25", "compare_with=[local]"),
        16,
    ),
    "ddome-digits": (("method.rounds=30", "checkpoint_every=3", "compare_with=[fedavg]"), 16),
}


def command(recipe: str, out: Path, *more: str) -> list[str]:
    settings = [word for setting in JOBS[recipe][0] for word in ("--set", setting)]
    return [sys.executable, "-m", "coterie", "run", recipe, *settings, "--out", str(out), *more]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", JOBS)
def test_killed_at_random_moments_it_ends_bit_equal(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, (_, wanted) = random.Random(f"kills of {recipe}"), JOBS[recipe]
    began = time.monotonic()
    subprocess.run(
        command(recipe, tmp_path / "whole"), cwd=tmp_path, capture_output=True, check=True
    )
    lasts, whole = time.monotonic() - began, contents(tmp_path / "whole")
    assert len(whole) > 20
    kills, trials, resumptions = 0, 0, 0
    while kills < wanted:
        out = tmp_path / f"killed-{trials}"
        for _ in range(chance.randint(1, 3)):
            resume = ("--resume",) if out.exists() else ()
            process = subprocess.Popen(
                command(recipe, out, *resume),
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            resumptions += bool(resume)
            try:
                _, error = process.communicate(timeout=chance.uniform(0.2, 1.0) * lasts)
                assert process.returncode == 0, error.decode()
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                kills += 1
        resume = ("--resume",) if out.exists() else ()
        done = subprocess.run(
            command(recipe, out, *resume), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        resumptions += bool(resume)
        assert done.returncode == 0, done.stderr
        assert contents(out) == whole, f"after {kills} kills"
        shutil.rmtree(out)
        trials += 1
    with capsys.disabled():
        print(
            f"\n{recipe}: {kills} kills in {trials} runs, {resumptions} resumptions, all "
            f"{len(whole)} files bit-equal each time"
        )
