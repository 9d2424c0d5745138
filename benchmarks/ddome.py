"""Rounds of DDOME beside FedAvg's on the same data, and what they consist of.

    python benchmarks/ddome.py [--data digits cifar] [--device cpu] [--threads 1] [--repeats 10]
    [--json FILE]

Both methods take turns in one process. `digits`: the recipe ddome-digits, 5 anchors and 5 other
clients a round, K = 2 of M = 5 experts. `cifar`: as many clients of random CIFAR-sized images,
ResNet-20, one epoch of `--examples` examples in batches of 16. That clients embed their data, once
in a run, is not counted. `aggregation` is all that is done besides the exchanges.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cobo import NAMES, Timed
from common import RESULTS, in_turns, ratios, report

from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, Federation
from coterie.methods.ddome import DDOME
from coterie.methods.pools import ask_scores
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert
from coterie.runs.problems import classification, loading, problem
from coterie.runs.problems.prepare import assembled
from coterie.runs.recipes import recipe
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import ClassifierSection

TASKS = {"score_experts": "scoring", "train": "training", "local_round": "training"}


class Run(Timed):
    """A recipe's method on some data."""

    def __init__(self, settings: Recipe, data: problem.LearningProblem) -> None:
        prepared = assembled(settings, data)
        super().__init__(
            prepared.method,
            prepared.site,
            prepared.method.init(prepared.blueprint, prepared.clients),
        )
        self.settings, self.federation, self.found = (
            settings,
            data.federation,
            list[dict[str, float]](),
        )
        if isinstance(self.method, DDOME):  # everybody embeds its data
            own = self.method
            asked = ask_scores(own.score_experts, self.state, prepared.clients, own.pool)
            self.engine.answer(asked, 0, 0)

    def turn(self) -> None:
        taken = self.go(self.settings.active(self.federation, self.round))
        parts = {TASKS[task]: seconds for task, seconds in taken.items() if task in TASKS}
        self.found.append(parts | {"aggregation": taken["round"] - sum(parts.values())})

    def part(self, name: str, repeats: int) -> float:
        """The median seconds of a part of the last rounds."""
        return statistics.median(found.get(name, 0.0) for found in self.found[-repeats:])


def pictures(examples: int, device: str) -> problem.LearningProblem:
    """40 clients of random images, five of them anchors, with a common expert that knows
    nothing.
    """
    section = ClassifierSection(kind="classifier", network="resnet20", device=device)  # type: ignore[arg-type]
    shape = section.shape((3, 32, 32), 10)
    rng = np.random.default_rng(0)
    images, labels = (
        rng.integers(0, 256, (1024, 3, 32, 32)).astype(np.uint8),
        rng.integers(0, 10, 1024),
    )

    def split(name: str, seed: int) -> ExampleSplit:
        rows = np.random.default_rng(seed).permutation(len(images))[:examples]
        return ExampleSplit(name, images, labels, rows, seed, (0.5,) * 3, (0.25,) * 3, 10)

    clients = {
        f"c{k:02}": ClientData(f"c{k:02}", *(split(name, k) for name in NAMES)) for k in range(40)
    }
    federation = Federation(clients, "random images", anchors=tuple(clients)[:5])
    common = CommonExpert(shape, shape.initial(3) | Classifier(shape).initial_buffers(), device)
    return classification.Classification(shape, common, section, torch.device(device), federation)


def measured(data: str, repeats: int, device: str, examples: int) -> list[dict[str, Any]]:
    """One row a method."""
    settings = recipe.load(
        f"ddome-{'digits' if data == 'digits' else 'cifar10'}",
        [f"model.device={device}", "training.batch_size=16"],
    )
    found = loading.load(settings) if data == "digits" else pictures(examples, device)
    runs = {name: Run(settings.with_method(name), found) for name in ("ddome", "fedavg")}
    taken = ratios(in_turns({name: run.turn for name, run in runs.items()}, repeats), "fedavg")
    rows = []
    for name, own in taken.items():
        row = {"data": data, "method": name, "round_s": own["seconds"], "x fedavg": own["ratio"]}
        rows.append(
            row
            | {
                f"{part}_s": runs[name].part(part, repeats)
                for part in ("scoring", "training", "aggregation")
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", nargs="+", default=["digits", "cifar"], choices=("digits", "cifar")
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--examples", type=int, default=32, help="of a client of `cifar`")
    parser.add_argument("--json", type=Path, default=RESULTS / "ddome.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [
        row
        for data in args.data
        for row in measured(data, args.repeats, args.device, args.examples)
    ]
    report(rows, args.json, device=args.device, examples=args.examples)


if __name__ == "__main__":
    main()
