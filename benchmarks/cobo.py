"""CoBo's engine: the pull as one matrix product against loops, clients at once against one by one,
and memory.

    python benchmarks/cobo.py pull [--json FILE]
    python benchmarks/cobo.py speed [--network mlp|cnn|resnet9] [--clients 8 32 80] [--batch 20]
    [--device cpu] [--json FILE] python benchmarks/cobo.py memory [--network resnet9] [--clients 80]
    [--batch 8] [--json FILE]

`pull`: of n models of d values. `speed`: a round of random images that compares n - 1 pairs
(`pairs: constant`), its pair gradients and its training step. The same clients take turns: one by
one; at once; and `chosen`, whichever of both the model takes for quicker. `memory`: the peak of a
process that does one such round, and of n separate models with optimisers, for comparison.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, in_turns, ratios, report, synchronise
from torch import Tensor

from coterie.aggregation.collaboration import start_weights, weighted_differences
from coterie.client.blueprint import Blueprint
from coterie.client.settings import SGD, Training
from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, State, drive
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData
from coterie.engines.inprocess import InProcess
from coterie.methods import Method
from coterie.methods.cobo import CoBo
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape

SGD_EMA = SGD(optimiser="sgd", lr=0.01, momentum=0.9)
SHAPES = {
    "mlp": NetworkShape("mlp", (1, 8, 8), 10, (64,)),
    "cnn": NetworkShape("cnn", (1, 8, 8), 10, width=8),
    "resnet9": NetworkShape("resnet9", (3, 32, 32), 100),
}
PARTS = ("round", "midpoint_gradients", "descend")
NAMES = ("train", "valid", "test")


class OneByOne(Classifier):
    """A network that claims not to stack: the same engine asks its clients one after the other."""

    stacks = False


class AtOnce(Classifier):
    """A network that claims to gain by it, however large it is."""

    def gains(self, examples: int) -> bool:
        return True


KINDS: dict[str, type[Classifier]] = {
    "one by one": OneByOne,
    "at once": AtOnce,
    "chosen": Classifier,
}


class Timed:
    """A method in this process, round by round, with the seconds of its parts: "round", and each
    task's by its name.

    Args:
        method: What is run.
        site: With its clients.
        state: The server's.
    """

    def __init__(self, method: Method, site: Site, state: State) -> None:
        self.method, self.site, self.state = method, site, state
        self.engine, self.parts, self.round = InProcess(site, method), dict[str, float](), 0

    def go(self, clients: Sequence[ClientId]) -> dict[str, float]:
        self.parts = {}
        start, rng = _now(), torch.Generator().manual_seed(self.round)
        self.state = drive(self.method.round(self.state, clients, rng), self._answer)
        self.round += 1
        return self.parts | {"round": _now() - start}

    def _answer(self, ask: Ask, phase: int) -> Replies:
        start = _now()
        replies = self.engine.answer(ask, self.round, phase)
        self.parts[ask.name] = self.parts.get(ask.name, 0.0) + _now() - start
        return replies


def _now() -> float:
    synchronise()
    return time.perf_counter()


class Federated(Timed):
    """CoBo on random images."""

    def __init__(
        self,
        n: int,
        shape: NetworkShape,
        batch: int,
        device: str = "cpu",
        exchange_mb: float = 256.0,
    ) -> None:
        method = CoBo(rounds=1000, rho=0.01, gamma=0.01, pairs="constant", exchange_mb=exchange_mb)
        self.ids, self.shape, self.device = [f"c{k:03}" for k in range(n)], shape, device
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (256, *shape.inputs)).astype(np.uint8)
        labels = rng.integers(0, shape.classes, 256)
        channels = shape.inputs[0]
        own = {
            i: [
                ExampleSplit(
                    name,
                    images,
                    labels,
                    np.arange(256),
                    k,
                    (0.5,) * channels,
                    (0.25,) * channels,
                    shape.classes,
                )
                for name in NAMES
            ]
            for k, i in enumerate(self.ids)
        }
        layouts = dict.fromkeys(self.ids, Layout())
        data = {i: ClientData(i, *splits) for i, splits in own.items()}
        site = Site(
            lambda layout: Classifier(shape, device),
            layouts,
            data,
            Training(batch_size=batch, experts=SGD_EMA),
            0,
            1000,
        )
        super().__init__(
            method,
            site,
            method.init(Blueprint(lambda layout: Classifier(shape), layouts, 0), self.ids),
        )
        self.models = {kind: make(shape, device) for kind, make in KINDS.items()}
        self.found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    def turn(self, kind: str) -> None:
        """One round of the same clients with another kind of model."""
        self.site.models[Layout()] = self.models[kind]
        self.round = len(self.found[kind])  # with the same pairs as any other kind's
        self.found[kind].append(self.go(self.ids))


def looped(models: dict[ClientId, Tensor], weights: Tensor) -> dict[ClientId, Tensor]:
    """sum_k w_ik (x_i - x_k), pair by pair."""
    found = {}
    for a, (i, x_i) in enumerate(models.items()):
        found[i] = torch.zeros_like(x_i)
        for b, x_k in enumerate(models.values()):
            if a != b:
                found[i] += float(weights[a, b]) * (x_i - x_k)
    return found


def pull() -> list[dict[str, Any]]:
    rows = []
    for n, d, repeats in ((8, 4_810, 50), (32, 4_810, 20), (8, 6_573_130, 3), (32, 1_000_000, 3)):
        x = dict(zip(map(str, range(n)), torch.randn(n, d), strict=True))
        w = start_weights(n, row_stochastic=False)
        taken = in_turns(
            {
                "loops": partial(looped, x, w),
                "product": partial(weighted_differences, list(x.values()), w),
            },
            repeats,
        )
        loops, product = ratios(taken, "product").values()
        rows.append(
            {
                "clients": n,
                "values": d,
                "loops_s": loops["seconds"],
                "product_s": product["seconds"],
                "loops x": loops["ratio"],
            }
        )
    return rows


def speed(
    network: str,
    shape: NetworkShape,
    n: int,
    batch: int,
    repeats: int,
    device: str,
    exchange_mb: float,
) -> list[dict[str, Any]]:
    """One row for each part of a round; ratios to one by one, above 1 where it is quicker."""
    run = Federated(n, shape, batch, device, exchange_mb)
    in_turns({kind: partial(run.turn, kind) for kind in KINDS}, repeats)
    rows = []
    for part in PARTS:
        single, *others = ([round[part] for round in run.found[kind][-repeats:]] for kind in KINDS)
        faster = [
            statistics.median(a / b for a, b in zip(single, other, strict=True)) for other in others
        ]
        row = {
            "network": network,
            "clients": n,
            "batch": batch,
            "part": part,
            "one by one_s": statistics.median(single),
        }
        rows.append(
            row | {f"{kind} x": ratio for kind, ratio in zip(list(KINDS)[1:], faster, strict=True)}
        )
    return rows


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one_round(n: int, network: str, batch: int) -> dict[str, Any]:
    start, run = time.perf_counter(), Federated(n, shape_of(network), batch)
    before = peak()
    run.turn("chosen")
    d = run.state[f"{run.ids[0]}/generalist"].numel()
    return {
        "peak_gib": peak() / 2**30,
        "before_gib": before / 2**30,
        "seconds": time.perf_counter() - start,
        "values": d,
    }


def separate(n: int, network: str, batch: int) -> dict[str, Any]:
    """N modules, each with its gradient and optimiser, and the copies from before the round that
    a synchronous pull needs.
    """
    shape = shape_of(network)
    models = [Classifier(shape) for _ in range(n)]
    optimisers = [torch.optim.Adam(model.network.parameters()) for model in models]
    x, y = torch.randn(batch, *shape.inputs), torch.randint(shape.classes, (batch,))
    for model, optimiser in zip(models, optimisers, strict=True):
        model.network.train()
        torch.nn.functional.cross_entropy(model.network(x), y).backward()
        optimiser.step()
    before = [
        {name: p.detach().clone() for name, p in model.network.named_parameters()}
        for model in models
    ]
    assert len(before) == n
    return {"peak_gib": peak() / 2**30}


def shape_of(network: str) -> NetworkShape:
    return (
        NetworkShape(network, (3, 32, 32), 100)
        if network != "mlp"
        else NetworkShape("mlp", (3, 32, 32), 100, (1024, 1024))
    )  # type: ignore[arg-type]


def memory(n: int, network: str, batch: int) -> dict[str, Any]:
    """Each in a process of its own, whose peak is then its own; None for one that does not fit
    into the machine.
    """
    row: dict[str, Any] = {"network": network, "clients": n, "batch": batch}
    for what, keys in (
        ("one_round", ("values", "before_gib", "peak_gib", "seconds")),
        ("separate", ("peak_gib",)),
    ):
        call = f"cobo.{what}({n}, {network!r}, {batch})"
        code = (
            f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cobo; "
            f"print(json.dumps({call}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True
        )
        found = json.loads(done.stdout) if done.returncode == 0 else {}
        row |= {f"{what} {key}": found.get(key) for key in keys}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pull", "speed", "memory"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--network", nargs="+", choices=tuple(SHAPES))
    parser.add_argument("--width", type=int, help="channels of the first convolution")
    parser.add_argument("--clients", type=int, nargs="+")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--exchange-mb",
        type=float,
        default=256.0,
        help="of the method: gradients of so many pairs in flight",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "pull":
        report(pull(), args.json or RESULTS / "cobo_pull.json")
    elif args.what == "memory":
        networks, counts = args.network or ["resnet9"], args.clients or [80]
        rows = [memory(n, network, args.batch or 8) for network in networks for n in counts]
        report(rows, args.json or RESULTS / "cobo_memory.json")
    else:
        shapes = {
            name: replace(SHAPES[name], width=args.width or SHAPES[name].width)
            for name in args.network or ["mlp", "cnn"]
        }
        how = args.batch or 20, args.repeats, args.device, args.exchange_mb
        rows = [
            row
            for name, shape in shapes.items()
            for n in args.clients or [8, 32, 80]
            for row in speed(name, shape, n, *how)
        ]
        report(rows, args.json or RESULTS / "cobo_speed.json", device=args.device, width=args.width)


if __name__ == "__main__":
    main()
