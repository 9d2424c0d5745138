"""What an exchange between deployed devices takes, by the programs that run in it.

    python benchmarks/exchange.py [--clients 1 2 4] [--rounds 8] [--json FILE]

FedAvg on the embedded base with one step of two windows a round, so that there is next to no work;
server and devices on this machine, with TLS and keys. All processes below this one are looked at
five times a second. Of the rounds after the first, for one exchange: seconds; how long the program
lives that Flower starts on a device for each message, and its processor time; and processor time of
all programs. One device and the server on two cores are as on machines of their own; what the
server's programs take more of with each device is what it takes with many.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from common import report
from engines import folders, the_recipe

from coterie.deploy import server
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe

EVERY = 0.2  # seconds between two looks
STARTED = "flwr-clientapp"  # by Flower, on a device, for each message
OTHER = "other"
OTHERS = ("flower-superlink", "flwr-serverapp", "flower-supernode", "flower-superexec", "resident")


class Looks(threading.Thread):
    """Looks at all processes below this one, until `over` is set.

    Args:
        checkpoints: The folder of the run's checkpoints, one for each round.

    Attributes:
        ends: When each round had ended.
        seen: By process: its program, when it began, and by time its processor time until then, s.
    """

    def __init__(self, checkpoints: Path) -> None:
        super().__init__(daemon=True)
        self.checkpoints, self.over = checkpoints, threading.Event()
        self.ends: dict[str, float] = {}
        self.seen: dict[tuple[int, float], tuple[str, dict[float, float]]] = {}

    def run(self) -> None:
        own = psutil.Process()
        while not self.over.wait(EVERY):
            for path in self.checkpoints.glob("round-*"):
                self.ends.setdefault(path.name, path.stat().st_mtime)
            for process in own.children(recursive=True):
                try:
                    self._look(process)
                except psutil.Error:  # it has ended
                    continue

    def _look(self, process: psutil.Process) -> None:
        key = process.pid, process.create_time()
        program, looks = self.seen.get(key, (OTHER, {}))
        if program == OTHER:  # or it was forked, and had not become what it is
            line = " ".join(process.cmdline())
            program = next((name for name in (STARTED, *OTHERS) if name in line), OTHER)
        times = process.cpu_times()
        looks[time.time()] = times.user + times.system
        self.seen[key] = program, looks

    def used(self, begin: float, end: float) -> dict[str, float]:
        """Return the processor time of each program between two times, s."""
        found: dict[str, float] = defaultdict(float)
        for program, looks in self.seen.values():
            inside = [value for at, value in looks.items() if begin <= at <= end]
            before = [value for at, value in looks.items() if at < begin]
            if inside:
                found[program] += inside[-1] - (before[-1] if before else 0.0)
        return found

    def lives(self, program: str, begin: float, end: float) -> list[tuple[float, float]]:
        """Return how long each process of a program lived, and its processor time, of those that
        lived between two times, s.
        """
        return [
            (max(looks) - began, max(looks.values()))
            for (_, began), (name, looks) in self.seen.items()
            if name == program and looks and begin <= began and max(looks) <= end
        ]


def measured(clients: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the row of a demonstration with so many devices."""
    chosen = the_recipe(folders(folder / "data", clients), rounds, "flower", steps=1, batch=2)
    chosen = recipe.changed(chosen, {"checkpoint_every": 1, "evaluate_every": 0})
    looks = Looks(folder / "out/checkpoints")
    looks.start()
    server.demo(chosen, list(prepare(chosen).clients), folder / "out", print)
    looks.over.set()
    looks.join()
    ends = sorted(looks.ends.values())
    begin, end, exchanges = ends[0], ends[-1], len(ends) - 1
    used = looks.used(begin, end)
    lives = looks.lives(STARTED, begin, end)
    life, work = (statistics.mean(values) for values in zip(*lives, strict=True))
    return {
        "clients": clients,
        "exchange_s": (end - begin) / exchanges,
        "started_lives_s": life,
        "started_cpu_s": work,
        "cpu_s": sum(used.values()) / exchanges,
    } | {f"{name}_cpu_s": used[name] / exchanges for name in (STARTED, *OTHERS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for clients in args.clients:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(clients, args.rounds, Path(folder)))
    report(rows, args.json)


if __name__ == "__main__":
    main()
