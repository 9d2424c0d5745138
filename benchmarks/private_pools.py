"""DDOME with privacy of whole clients, and what noise would cost CoBo, which has no such privacy.

    python benchmarks/private_pools.py ddome [--seeds 0 1 2] [--runs DIR] [--results DIR]
    python benchmarks/private_pools.py cobo [--seeds 0 1 2] [--runs DIR] [--results DIR]

`ddome`: the recipe `ddome-digits` with two
hundred clients, all in each of eight exchanges; experts chosen on the devices,
central noise, FedAvg beside it. `cobo`: the recipe `cobo-digits` with noise on the gradients that
pairs are compared by, on the models, or on both. Each writes a table as JSON and Markdown;
runs that are in --runs already are not done again.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from privacy_utility import mean, multiplier, table, write
from pydantic import Field
from torch import Tensor

from coterie.aggregation.accountant import epsilon_of_gaussians
from coterie.core.files import read_json
from coterie.core.protocol import Ask, Replies, Round, State
from coterie.core.result import RESULT
from coterie.core.tensor_names import of_client
from coterie.core.tensors import Tensors
from coterie.methods.cobo import CoBo
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.run import run

Json = dict[str, Any]
ROUNDS, STEPS, CLIENTS, DELTA = 8, 8, 200, 1e-5
EPSILONS = (8.0, 2.0)
CLIP = 1.0  # about as long as an update
NOISES = (0.01, 0.1)  # z of CoBo's gradients and models
NONE = 1e-9  # clipping alone
GAMMA = 0.1  # in the place of 0.01, as clipped gradients are shorter
CLIP_OF_GRADIENTS, CLIP_OF_MODELS = 1.0, 0.3
POOL = ", pool: 5, top_k: 2, choice: "


def spent(rounds: int, z: float) -> float:
    return epsilon_of_gaussians([(rounds, 1.0, z)], DELTA)


def digits(seed: int, *settings: str, clip: float = CLIP, z: float = 0.0) -> Recipe:
    """The recipe of two hundred clients; with z: central noise."""
    noise = f"privacy={{where: central, clip: {clip}, noise: {z}, delta: {DELTA:.1e}}}"
    common = [
        *("compare_with=[]", "samples=false", "participation={}", f"seed={seed}"),
        *("training.batch_size=32", "training.experts.lr=0.1", "training.routers.lr=0.1"),
        *(f"data.clients={CLIENTS}", f"evaluate_every={ROUNDS}"),
        *("metrics_every=1000", "checkpoint_every=1000"),
        *([noise] if z else []),
    ]
    return load("ddome-digits", [*common, *settings])


def method(name: str, more: str = "") -> str:
    """The setting of a method of uniform means."""
    mean = "aggregation: {weighting: uniform}"
    return f"method={{name: {name}, rounds: {ROUNDS}, local_steps: {STEPS}, {mean}{more}}}"


def done(recipe: Recipe, folder: Path) -> Json:
    """The figures of a run, which may have been done before."""
    torch.set_num_threads(1)
    if not (folder / RESULT).exists():
        run(recipe, folder, resume=folder.exists())
    result: Json = read_json(folder / RESULT)
    last = result["evaluations"][-1]
    found = {"test": result["mean"], "valid": last["valid"], **(last.get("groups") or {})}
    client = next(iter(result["clients"].values()))
    moved = {key: client[key] for key in ("bytes_up", "bytes_down")}
    print(folder.name, {k: round(v, 2) for k, v in found.items()}, flush=True)
    return found | moved | {"privacy": result["privacy"], "wall_s": result["wall_s"]}


def ddome(args: argparse.Namespace) -> None:
    """Rows of DDOME and FedAvg, with and without noise."""
    noises = {epsilon: multiplier(epsilon, partial(spent, ROUNDS)) for epsilon in EPSILONS}
    device, fedavg = method("ddome", f"{POOL}device"), method("fedavg")
    rows: dict[str, Callable[[int], Recipe]] = {
        "the common expert": partial(_row, "method={name: common-expert}", 0.0),
        "DDOME, devices choose": partial(_row, device, 0.0),
        **{f"DDOME, epsilon {e:g}": partial(_row, device, z) for e, z in noises.items()},
        "FedAvg": partial(_row, fedavg, 0.0),
        "FedAvg, epsilon 8": partial(_row, fedavg, noises[8.0]),
    }
    cells = _cells(args, "ddome", rows)
    page = [
        "# DDOME with central privacy",
        f"Recipe `ddome-digits` with {CLIENTS} clients of four labels and five anchors, all in "
        f"each of {ROUNDS} exchanges of {STEPS} steps of 32 images, and twenty newcomers; uniform "
        f"means, delta = {DELTA:g}, C = {CLIP:g}. Nothing "
        f"was tuned for noise. Accuracy of newcomers in percent, seeds "
        f"{', '.join(map(str, args.seeds))}, ± their standard deviation; "
        f"aligned: with labels of one anchor, random: with any four.",
        table(
            ["", "epsilon", "z", "aligned", "random"],
            [
                [name, *_spent(own[0]), *(mean([f[g] for f in own]) for g in ("aligned", "random"))]
                for name, own in cells.items()
            ],
        ),
    ]
    write(args, "private-pools", page, {"seeds": args.seeds, "clip": CLIP, "cells": cells})


def _row(chosen: str, z: float, seed: int) -> Recipe:
    return digits(seed, chosen, z=z)


def _spent(figures: Json) -> list[str]:
    privacy = figures["privacy"]
    return ["", ""] if privacy is None else [f"{privacy['epsilon']:.2f}", f"{privacy['noise']:g}"]


@dataclass(frozen=True)
class NoisyCoBo(CoBo):
    """CoBo whose clients clip what they send and add noise to it: gradients, changes of models."""

    noise_of_gradients: Annotated[float, Field(ge=0)] = 0.0
    noise_of_models: Annotated[float, Field(ge=0)] = 0.0

    def round(self, state: State, clients: Any, rng: torch.Generator) -> Round:
        exchanges, ask = super().round(state, clients, rng), None
        try:
            ask = next(exchanges)
            while True:
                ask = exchanges.send(self.noised(ask, (yield ask), state, rng))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def noised(self, ask: Ask, replies: Replies, state: State, rng: torch.Generator) -> Replies:
        """The replies as the server sees them."""
        models = ask.task.__name__ == "descend"
        z = self.noise_of_models if models else self.noise_of_gradients
        bound = CLIP_OF_MODELS if models else CLIP_OF_GRADIENTS
        if not z:
            return replies

        def protect(value: Tensor, before: Tensor) -> Tensor:
            change = value - before
            change = change / (change.norm() / bound).clamp(min=1)
            return before + change + z * bound * torch.randn(change.shape, generator=rng)

        def of(i: str, reply: Mapping[str, Tensor]) -> Tensors:
            zero = torch.zeros(())
            return {
                n: protect(t, state[of_client(i)] if models else zero) for n, t in reply.items()
            }

        return {i: of(i, reply) for i, reply in replies.items()}


def cobo(args: argparse.Namespace) -> None:
    """Rows of CoBo, with noise on what."""
    common = ["compare_with=[]", "metrics_every=1000", "checkpoint_every=1000"]
    noisy = ("method.name=private_pools:NoisyCoBo", f"method.gamma={GAMMA}")

    def of(*settings: str) -> Callable[[int], Recipe]:
        return lambda seed: load("cobo-digits", [*common, f"seed={seed}", *settings])

    rows = {
        "alone (Local)": lambda seed: of()(seed).with_method("local"),
        "CoBo": of(),
        "gradients clipped": of(*noisy, f"method.noise_of_gradients={NONE}"),
        **{
            f"noise on gradients, z = {z:g}": of(*noisy, f"method.noise_of_gradients={z}")
            for z in NOISES
        },
        **{
            f"noise on both, z = {z:g}": of(
                *noisy, f"method.noise_of_gradients={z}", f"method.noise_of_models={z}"
            )
            for z in NOISES
        },
    }
    cells = _cells(args, "cobo", rows)
    once, always = (spent(count, 0.5) for count in (1, 600))
    page = [
        "# What noise on what they send would cost CoBo's clients",
        f"Recipe `cobo-digits`: eight clients in four clusters, 600 rounds, a network of 4,810 "
        f"values. Gradients at midpoints are clipped to {CLIP_OF_GRADIENTS:g} (gamma is "
        f"{GAMMA:g} then), a round's change of "
        f"a model to {CLIP_OF_MODELS:g}, and get noise of z times that. Accuracy of the clients' "
        f"own models in percent, seeds {', '.join(map(str, args.seeds))}, ± their standard "
        f"deviation. At z = 1 one reply has epsilon {once:.1f}, and a model in each round "
        f"{always:g}, at delta = {DELTA:g}.",
        table(
            ["", "test accuracy"],
            [[name, mean([found["test"] for found in own])] for name, own in cells.items()],
        ),
    ]
    write(args, "private-pairs", page, {"seeds": args.seeds, "cells": cells})


def _cells(
    args: argparse.Namespace, stem: str, rows: Mapping[str, Callable[[int], Recipe]]
) -> dict[str, list[Json]]:
    """The figures of each row by seed."""
    return {
        name: [
            done(recipe(seed), args.runs / f"{stem}-{name.replace(' ', '-')}-{seed}")
            for seed in args.seeds
        ]
        for name, recipe in rows.items()
        if args.rows is None or name.startswith(tuple(args.rows))
    }


PARTS = {"ddome": ddome, "cobo": cobo}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", help="only rows whose names begin so")
    parser.add_argument("--runs", type=Path, default=Path("runs/private-pools"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.command = (
        f"python benchmarks/private_pools.py {args.part} --seeds {' '.join(map(str, args.seeds))}"
    )
    PARTS[args.part](args)
