"""Local steps on a quiet and on a loaded machine: two threads that spin while they wait, two that
sleep soon, and one.

    python benchmarks/threads.py [--busy 4] [--seconds 4] [--repeats 2] [--quiet] [--json FILE]

Every measurement is a process of its own, as threads wait in the way that the environment says when
PyTorch is loaded; they take turns. Beside them so many processes compute without end (`--busy`).
With `--quiet` also rows without: the measured process then has real-time priority for those seconds
(needs root), so that a machine that is shared counts as quiet. A step is never cut: under load one
of two threads that spin may take many times `--seconds`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import RESULTS, report

from coterie.core.threads import _BRIEFLY, _WAITING

VARIANTS: dict[str, tuple[dict[str, str], int]] = {  # the environment, and how many threads
    "two threads that spin (before)": ({}, 2),
    "two threads that sleep soon": (_BRIEFLY, 2),
    "one thread": (_BRIEFLY, 1),
}


def child(threads: int, seconds: float, priority: bool) -> dict[str, float]:
    """Train one client of the quickstart in this process for some seconds."""
    import torch

    from coterie.core.roles import GENERALIST, SPECIALIST
    from coterie.runs.backends import LocalBackend
    from coterie.runs.recipes import recipe as recipes

    prepared = LocalBackend().prepare(recipes.load("quickstart", ["compare_with=[]"]))
    client = prepared.site.client(prepared.clients[0], {})
    client.total_iterations = 50
    if priority:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    torch.set_num_threads(threads)
    client.step(GENERALIST, SPECIALIST, on=client.train)
    begun, own, before = time.monotonic(), time.process_time(), client.tokens
    while time.monotonic() - begun < seconds:
        client.step(GENERALIST, SPECIALIST, on=client.train)
    wall = time.monotonic() - begun
    return {
        "threads": threads,
        "tokens_per_s": (client.tokens - before) / wall,
        "cores": (time.process_time() - own) / wall,
    }


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Load the machine."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def measure(variant: str, seconds: float, priority: bool) -> dict[str, float]:
    """One variant in a process of its own."""
    environment, threads = VARIANTS[variant]
    inherited = {k: v for k, v in os.environ.items() if k not in _WAITING}
    words = [
        sys.executable,
        __file__,
        "--child",
        str(threads),
        "--seconds",
        str(seconds),
        *["--priority"] * priority,
    ]
    done = subprocess.run(
        words, env=inherited | environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "threads.json")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--priority", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.child, args.seconds, args.priority)))
        return
    rows: list[dict[str, Any]] = []
    for quiet in [True] * args.quiet + [False]:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        with busy(0 if quiet else args.busy):
            for _ in range(args.repeats):
                for name in VARIANTS:
                    found[name].append(measure(name, args.seconds, quiet))
        rows += [
            {
                "machine": "quiet" if quiet else f"{args.busy} others compute",
                "variant": name,
                "threads": round(own[0]["threads"]),
                "tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in own)),
                "cores_had": round(statistics.median(one["cores"] for one in own), 2),
            }
            for name, own in found.items()
        ]
    report(rows, args.json, load_average=os.getloadavg()[0])


if __name__ == "__main__":
    main()
