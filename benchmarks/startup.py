"""How long it takes until something happens: commands that only talk, a refusal, and a run until
its first training step.

    python benchmarks/startup.py [--repeats 7] [--json FILE]

Every command is a process of its own; they take turns. `floor` is what Python, torch and
transformers take to be imported by themselves. The run is of `quickstart`, and ends where its first
optimiser step would begin. PYTHONPATH chooses another tree to measure.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import RESULTS, in_turns, report

UNTIL_A_STEP = """
import os, sys
from coterie.cli import train
from coterie.cli.base import main

load = train.common._load

def loaded(*given):
    recipe = load(*given)
    from coterie.client.client import Client  # imports torch, as the recipe has by now
    Client.step_on = lambda *given, **more: os._exit(3)
    return recipe

train.common._load = loaded
sys.argv = ["coterie", *sys.argv[1:]]
main()
"""
TINY = (
    "compare_with=[]",
    "method.rounds=1",
    "data.train_tokens=2000",
    "data.valid_tokens=200",
    "data.test_tokens=200",
)
LOADED = "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, activations"
AIMS = {"coterie --help": 0.5}  # seconds


def ends(words: list[str], code: int, folder: str) -> None:
    """Run Python with these words to its end, which must be with this exit code."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        raise SystemExit(f"{words} ended with {done.returncode}, expected {code}: {done.stderr}")


def commands(folder: str) -> dict[str, Callable[[], None]]:
    """What is measured, by what the table calls it."""

    def coterie(*words: str, code: int = 0) -> Callable[[], None]:
        return partial(ends, ["-m", "coterie", *words], code, folder)

    def python(text: str, *words: str, code: int = 0) -> Callable[[], None]:
        return partial(ends, ["-c", text, *words], code, folder)

    settings = [word for setting in TINY for word in ("--set", setting)]
    return {
        "floor: python": python("pass"),
        "import coterie": python("import coterie"),
        "coterie --help": coterie("--help"),
        "coterie methods": coterie("methods"),
        "coterie recipes": coterie("recipes"),
        "floor: import torch": python("import torch"),
        "a refused recipe": coterie("run", "quickstart", "--set", "method.roundz=1", code=2),
        "floor: torch and transformers": python(f"import torch\n{LOADED}"),
        "coterie run, to its first step": python(
            UNTIL_A_STEP, "run", "quickstart", *settings, code=3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS / "startup.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        taken = in_turns(commands(folder), args.repeats)
    rows = [
        {"what": what, "seconds": statistics.median(own), "best": min(own), "aim": AIMS.get(what)}
        for what, own in taken.items()
    ]
    report(rows, args.json, repeats=args.repeats)


if __name__ == "__main__":
    main()
