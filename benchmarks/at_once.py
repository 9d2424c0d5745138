"""Rounds of clients at once, each in a thread of its own, beside one client after the other.

    python benchmarks/at_once.py [--clients-at-once 2] [--work NAME ...] [--repeats 5] [--json FILE]

Both take turns in one process, each with one thread within PyTorch. `comigs` and `fedavg`: the
recipe quickstart, four clients on the embedded base, `--steps` local iterations of 8 windows of 64
tokens. `cobo`: 8 ResNet-9 in batches of 8, a round that compares 7 pairs on average. `ddome`: 10
clients with a pool of ResNet-20, one epoch of 32 images in batches of 16. `digits`: the recipe
ddome-digits, whose steps are so short that a run takes clients one by one.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cobo import SHAPES, Federated, Timed
from common import RESULTS, in_turns, report
from ddome import Run, pictures

from coterie.runs.backends import LocalBackend
from coterie.runs.problems import loading
from coterie.runs.recipes import recipe


def language(method: str, steps: int) -> Timed:
    """The quickstart's clients with a method."""
    changes = [f"method.local_steps={steps}", "model.device=cpu"]
    settings = recipe.load("quickstart", changes).with_method(method)
    prepared = LocalBackend().prepare(settings)
    state = prepared.method.init(prepared.blueprint, prepared.clients)
    return Timed(prepared.method, prepared.site, state)


def pool(data: str) -> Run:
    """A recipe's method on digits, or on random images of CIFAR's size."""
    changes = ["model.device=cpu", "training.batch_size=16"]
    settings = recipe.load("ddome-digits" if data == "digits" else "ddome-cifar10", changes)
    return Run(settings, loading.load(settings) if data == "digits" else pictures(32, "cpu"))


def turn(run: Timed) -> Callable[[], object]:
    """Return what does one more round of a run."""
    if isinstance(run, Run):
        return run.turn
    if isinstance(run, Federated):
        return partial(run.turn, "chosen")
    return lambda: run.go(list(run.site.data))


def measured(name: str, make: Callable[[], Timed], most: int, repeats: int) -> dict[str, Any]:
    """One row: of the same rounds, one by one and at once."""
    runs = {most_at_once: make() for most_at_once in (1, most)}
    for at_once, run in runs.items():
        run.engine.at_once = at_once
    taken = in_turns({str(at_once): turn(run) for at_once, run in runs.items()}, repeats)
    single, several = taken.values()
    return {
        "work": name,
        "at once": most,
        "one by one_s": statistics.median(single),
        "at once_s": statistics.median(several),
        "x": statistics.median(a / b for a, b in zip(single, several, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients-at-once", type=int, default=2)
    parser.add_argument("--work", nargs="+", metavar="NAME")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "at_once.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    works: dict[str, Callable[[], Timed]] = {
        "comigs": partial(language, "comigs-1g1s", args.steps),
        "fedavg": partial(language, "fedavg", args.steps),
        "cobo": partial(Federated, 8, SHAPES["resnet9"], 8),
        "ddome": partial(pool, "cifar"),
        "digits": partial(pool, "digits"),
    }
    rows = [
        measured(name, works[name], args.clients_at_once, args.repeats)
        for name in args.work or works
    ]
    report(rows, args.json)


if __name__ == "__main__":
    main()
