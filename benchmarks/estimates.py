"""How far the time that a command says beforehand is from the time that it takes.

    python benchmarks/estimates.py [--json FILE] [--runs N]

Each command is run as people run it, in a process of its own. Foreseen is what the progress display
shows at the start, for all methods together; real is the time from then to the end. The aim is a
ratio of 0.8 to 1.3 on a quiet machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS, report

import coterie

COMMANDS = {
    "run quickstart": ("run", "quickstart", {}),
    "run cobo-digits": ("run", "cobo-digits", {}),
    "compare cobo fedavg local": (
        "compare",
        "cobo-digits",
        {"methods": ["cobo", "fedavg", "local"]},
    ),
}
AIM = (0.8, 1.3)


class Clock(coterie.Callback):
    """Notes what is foreseen, and when."""

    shows_estimate = True

    def __init__(self) -> None:
        self.foreseen, self.begun = 0.0, 0.0

    def expects(self, seconds: Sequence[float]) -> None:
        self.foreseen, self.begun = sum(seconds), time.monotonic()


def measure(name: str) -> dict[str, float]:
    """Return seconds foreseen and real of one command, run in this process."""
    kind, recipe, options = COMMANDS[name]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "run":
            coterie.run(recipe, out=Path(folder, "run"), callbacks=[clock])
        else:
            coterie.compare(
                options["methods"], recipe, seeds=1, out=Path(folder, "run"), callbacks=[clock]
            )
        real = time.monotonic() - clock.begun
    return {"foreseen_s": clock.foreseen, "real_s": real, "ratio": clock.foreseen / real}


def main() -> None:
    """Measure all commands, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS / "estimates.json")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one command, in a process of its own
    chosen = parser.parse_args()
    if chosen.only:
        print(json.dumps(measure(chosen.only)))
        return
    rows = []
    for name in COMMANDS:
        for _ in range(chosen.runs):
            command = [sys.executable, __file__, "--only", name]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append({"command": name, **json.loads(output.splitlines()[-1])})
            print(rows[-1], flush=True)
    report(rows, chosen.json, aim=AIM)


if __name__ == "__main__":
    main()
