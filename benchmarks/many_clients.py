"""Whole runs of many clients of which few take part in a round: what grows with how many there are,
and what does not.

    python benchmarks/many_clients.py [--kind images language] [--clients 1000 10000] [--drawn 100]
    [--rounds 5] [--kill] [--json FILE]

Each run is a process of its own, in a folder that is deleted: CoMiGS-1G1S on a synthetic language
(the embedded base, rank 4), or FedAvg on MNIST (a small cnn, two classes a client). All of `coterie
run` is in it: checks of the data, a checkpoint after every round, scores and personal models of 100
clients, result.json and the report. The first of two starts makes the data, the second has them in
the cache. Seconds are processor time of one process with one thread. `--kill`: the run is done
twice, the second time killed (-9) after its second round and resumed; `resumed_alike` says whether
results and personal models are the same to the bit.
"""

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import report

from coterie.core.callback import Callback
from coterie.core.devices import peak_memory
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.run import run

SCORED = 100
KINDS: dict[str, dict[str, Any]] = {
    "language": {
        "data": {
            "kind": "synthetic",
            "train_tokens": 512,
            "valid_tokens": 128,
            "test_tokens": 128,
        },
        "model": {"context": 32, "rank": 4},
        "method": {"name": "comigs-1g1s", "local_steps": 1, "router_every": 1, "router_steps": 1},
        "training": {"batch_size": 2},
    },
    "images": {
        "data": {
            "kind": "mnist",
            "partition": "quantity",
            "classes_per_client": 2,
            "replacement": True,
            "per_client": 20,
            "test_examples": 20,
        },
        "model": {"kind": "classifier", "network": "cnn", "width": 8},
        "method": {"name": "fedavg", "local_steps": 1},
        "training": {"batch_size": 8},
    },
}


def recipe(kind: str, clients: int, drawn: int, rounds: int) -> Recipe:
    """Return the recipe of a run."""
    sections = KINDS[kind]
    return Recipe(
        name=kind,
        **sections
        | {
            "data": sections["data"] | {"clients": clients},
            "method": sections["method"] | {"rounds": rounds},
        },
        participation={"clients": drawn},
        evaluate_clients=SCORED,
        samples=False,
        threads=1,
    )


class Clock(Callback):
    """Notes when what began and ended, and kills the process after a round.

    Args:
        folder: Of the run.
        last: The round after whose checkpoint the process is killed; None: it is not.
    """

    def __init__(self, folder: Path, last: int | None) -> None:
        self.folder, self.last = folder, last
        self.at: dict[str, float] = {}
        self.ends: list[float] = []

    def note(self, name: str) -> None:
        self.at[name] = time.process_time()

    def begin(self, *_: Any) -> None:
        self.note("begin")
        self.ends.append(self.at["begin"])

    def evaluating(self, round: int) -> None:
        self.note("evaluating")

    def checkpoint(self, round: int, folder: Path) -> None:
        if round == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def round(self, round: int) -> None:
        self.ends.append(time.process_time())

    def end(self, *_: Any) -> None:
        self.note("end")


def one(kind: str, clients: int, drawn: int, rounds: int, folder: Path, last: int | None) -> None:
    """Do one run, from where it stands, and print its row as JSON."""
    torch.set_num_threads(1)
    found, clock = recipe(kind, clients, drawn, rounds), Clock(folder, last)
    started = time.process_time()
    prepare(found)
    cold, started = time.process_time() - started, time.process_time()
    run(found, folder, resume=folder.exists(), reporter=clock)
    finished = time.process_time()
    rounds_s = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    newest = max((folder / "checkpoints").iterdir())
    packs = list((newest / "clients").iterdir())
    states = json.loads((newest / "clients.json").read_text())["clients"]
    row = {
        "kind": kind,
        "clients": clients,
        "drawn": drawn,
        "first_start_s": cold,
        "start_s": clock.at["begin"] - started,
        "round_s": statistics.median(rounds_s[:-1]),  # the last one ends in the evaluation
        "evaluation_and_result_s": clock.at["end"] - clock.at["evaluating"],
        "report_s": finished - clock.at["end"],
        "peak_gib": (peak_memory() or 0) / 2**30,
        "states": len(states),
        "files_of_states": len(packs),
        "states_mb": sum(path.stat().st_size for path in packs) / 1e6,
        "checkpoint_json_kb": (newest / "checkpoint.json").stat().st_size / 1e3,
        "result_json_kb": (folder / "result.json").stat().st_size / 1e3,
        "report_kb": (folder / "report.html").stat().st_size / 1e3,
        "files": sum(path.is_file() for path in folder.rglob("*")),
    }
    print(json.dumps(row))


def measured(
    kind: str, clients: int, drawn: int, rounds: int, folder: Path, last: int | None
) -> dict[str, Any] | None:
    """Return the row of a run in a process of its own; None of one that was killed."""
    settings = json.dumps([kind, clients, drawn, rounds, str(folder), last])
    done = subprocess.run(
        [sys.executable, __file__, "--one", settings],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGKILL and last is not None:
        return None
    done.check_returncode()
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def content(folder: Path) -> dict[str, Any]:
    """Return what a resumed run must have in common with one that was not stopped."""
    result = json.loads((folder / "result.json").read_text())
    personal = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "clients").rglob("*.safetensors")
    }
    return {name: result[name] for name in ("clients", "evaluations", "training")} | personal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1000, 10000])
    parser.add_argument("--drawn", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        *settings, folder, last = json.loads(args.one)
        one(*settings, Path(folder), last)
        return
    rows = []
    for kind in args.kind:
        for clients in args.clients:
            with tempfile.TemporaryDirectory(prefix="many-clients-") as name:
                os.environ["COTERIE_CACHE"] = f"{name}/cache"
                settings = kind, clients, args.drawn, args.rounds
                row = measured(*settings, Path(name) / "whole", None)
                assert row is not None
                if args.kill:
                    for last in (2, None):
                        measured(*settings, Path(name) / "killed", last)
                    whole, killed = (content(Path(name) / of) for of in ("whole", "killed"))
                    row["resumed_alike"] = whole == killed
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    report(rows, args.json, scored=SCORED, rounds=args.rounds)


if __name__ == "__main__":
    main()
