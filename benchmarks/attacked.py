"""What rules of aggregation withstand, and what central privacy costs, on the recipe `attacked`:
eight clients, the embedded base.

    python benchmarks/attacked.py rules [--seed 0] [--processes 2] [--runs DIR] [--results DIR]
    python benchmarks/attacked.py privacy [...]

Each writes a table as JSON and Markdown (`attacked.*`, `privacy-small.*`). Runs that are in --runs
already are not done again. A cell is the mean over the clients that never lie, in every column the
same ones; a run in which they have no model left is said to have diverged.
"""

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.core.errors import ClientError
from coterie.core.files import read_json, write_json
from coterie.core.result import RESULT
from coterie.runs.folder.metrics import METRICS
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.run import run

Json = dict[str, Any]
RECIPE = "attacked"
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "clipped-mean")
ATTACKS = ("none", "sign-flip", "scaled", "noise", "nan")
NAMES = {
    "local": "alone (Local)",
    "pretrained": "the base (Pretrained)",
}  # nobody can lie to those that share nothing
FIGURES = {
    "test": "perplexity",
    "test_loss": "loss, nats",
    "test_synced": "perplexity after one more synchronisation",
}
CLIP, DELTA = 1.5, 1e-5
NOISES = (0.0, 0.01, 0.05, 0.5, 1.0, 2.0, 4.0)
ADAPTED, COUNTED = (
    0.5,
    0.4,
)  # most noise that C is adapted with, and that on the count: a twentieth of the clients


def rule_cells() -> dict[tuple[str, str], list[str]]:
    """The settings of each row and column."""
    cells = {}
    for rule in RULES:
        for attack in ATTACKS:
            lie = "attack=null" if attack == "none" else f"attack.kind={attack}"
            cells[rule, attack] = [f"method.aggregation={{rule: {rule}}}", lie]
    return cells


def privacy_cells() -> dict[tuple[str, str], list[str]]:
    """The settings of each row and column."""
    plain = ["method.aggregation={rule: mean}", "attack=null"]
    cells = {("mean", "none"): plain}
    for z in NOISES:
        central = f"where: central, clip: {CLIP}, noise: {z}, delta: {DELTA:.1e}"
        cells[f"z={z:g}", "fixed"] = [*plain, f"privacy={{{central}}}"]
        if z <= ADAPTED:
            cells[f"z={z:g}", "adaptive"] = [
                *plain,
                f"privacy={{{central}, adaptive: {{lr: 1.0, noise: {COUNTED}}}}}",
            ]
    return cells


def honest(result: Json, liars: Iterable[str]) -> Json:
    """Means over the clients of a result that never lie; a figure that is not finite is None."""
    own = [client for i, client in result["clients"].items() if i not in set(liars)]
    means = {key: statistics.fmean(client[key] for client in own) for key in FIGURES}
    return {key: value if math.isfinite(value) else None for key, value in means.items()}


def cell(recipe: Recipe, folder: Path, liars: Sequence[str]) -> Json:
    """The figures of one run, which may have been done before; or why it diverged."""
    torch.set_num_threads(1)
    try:
        result = (
            read_json(folder / RESULT)
            if (folder / RESULT).exists()
            else run(recipe, folder, resume=folder.exists())[-1].to_json()
        )
    except ClientError as error:
        cause = f"{error} {error.__cause__ or ''}"
        if "diverged" not in cause:
            raise
        return {"diverged": " ".join(cause.split())}
    found = honest(result, liars)
    lines = [
        json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()
    ]
    clips = [line["clip"] for line in lines if line["kind"] == "privacy"]
    diverged = "scores that are not finite" if None in found.values() else None
    return found | {
        "diverged": diverged,
        "lost": result["lost"],
        "privacy": result["privacy"],
        "clips": clips,
        "wall_s": result["wall_s"],
    }


def done(
    cells: Mapping[tuple[str, str], list[str]], args: argparse.Namespace, liars: Sequence[str]
) -> dict[tuple[str, str], Json]:
    """All cells, several at a time, and those who share nothing."""
    recipes = {
        key: load(RECIPE, [*own, "samples=false", f"seed={args.seed}"])
        for key, own in cells.items()
    }
    recipes = {
        (name, "none"): recipes["mean", "none"].with_method(name) for name in NAMES
    } | recipes
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        jobs = {
            (row, column): pool.submit(
                cell, recipe, args.runs / f"{row}-{column}-{args.seed}", liars
            )
            for (row, column), recipe in recipes.items()
        }
        found = {}
        for key, job in jobs.items():
            found[key] = job.result()
            print(*key, found[key].get("test"), found[key]["diverged"] or "", flush=True)
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(
        f"| {' | '.join(line)} |"
        for line in (header, ["---", *["---:"] * (len(header) - 1)], *rows)
    )


def shown(found: Json | None, key: str) -> str:
    """A figure of a cell; of one that diverged, that it did."""
    if found is None:
        return ""
    value = found.get(key)
    if value is None:
        return "diverged"
    return (
        f"{value:.3f}" if key == "test_loss" else f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"
    )


def about(args: argparse.Namespace) -> str:
    """How the figures came about."""
    machine = (
        f"{args.cores}-core {platform.machine()} machine, shared with other jobs, "
        f"{args.processes} runs at a time, one thread each"
    )
    return (
        f"    {args.command}\n\n{machine}; Python {platform.python_version()}, torch "
        f"{torch.__version__}, coterie {coterie.__version__}. "
        f"Recipe `{RECIPE}`, comigs-1g1s, two users of each of four languages, six rounds of "
        f"three iterations, seed {args.seed}. One seed: "
        "differences of 1 % mean nothing. Each client's model is scored right after "
        "its last local iteration."
    )


def write(
    stem: Path, text: str, cells: Mapping[tuple[str, str], Json], args: argparse.Namespace
) -> None:
    """The Markdown page, and the figures as JSON."""
    versions = {
        "coterie": coterie.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    machine = {
        "processor": platform.machine(),
        "cores": args.cores,
        "processes": args.processes,
        "threads": 1,
    }
    figures = [{"row": row, "column": column, **found} for (row, column), found in cells.items()]
    write_json(
        stem.with_suffix(".json"),
        {"command": args.command, "seed": args.seed, "cells": figures}
        | versions
        | {"machine": machine},
    )
    stem.with_suffix(".md").write_text(text, encoding="utf-8")


def rules(args: argparse.Namespace) -> None:
    """Every rule under every attack."""
    liars = ["de-1"]
    cells = done(rule_cells(), args, liars)
    parts = [
        "# One of eight clients lies",
        about(args),
        f"Means over the seven honest clients, in the first column too: all but `{liars[0]}`. It "
        f"trains as the others do, but of its"
        " update u it sends -10 u (sign-flip), 10 u (scaled), something as long as 10 u in a "
        "random direction (noise), or no "
        "numbers at all (nan), in all six rounds. Rules have their default settings: krum and "
        "multi-krum expect one attacker, "
        "trimmed-mean cuts two of eight at each end, clipped-mean clips to the median norm. A "
        "reply that is not finite is refused "
        "before any rule sees it: in the last column seven clients are averaged. Lower is better.",
    ]
    for key, name in FIGURES.items():
        rows = [
            [NAMES.get(row, row), *(shown(cells.get((row, attack)), key) for attack in ATTACKS)]
            for row in (*NAMES, *RULES)
        ]
        parts += [f"## Test {name}", table(["rule", *ATTACKS], rows)]
    write(args.results / "attacked", "\n\n".join(parts) + "\n", cells, args)


def privacy(args: argparse.Namespace) -> None:
    """Central noise, with a fixed norm and one that adapts."""
    cells = done(privacy_cells(), args, ())
    names = NAMES | {"mean": "no privacy"}
    rows = []
    for key, found in cells.items():
        spent = found.get("privacy")
        epsilon = (
            ""
            if spent is None
            else "above 500"
            if spent["epsilon"] is None
            else f"{spent['epsilon']:.1f}"
        )
        clips = (
            " to ".join(dict.fromkeys(f"{norm:.2f}" for norm in (CLIP, found["clips"][-1])))
            if found.get("clips")
            else ""
        )
        rows.append(
            [
                names.get(key[0], ", ".join(key)),
                epsilon,
                clips,
                *(shown(found, figure) for figure in FIGURES),
            ]
        )
    parts = [
        "# What central privacy costs eight clients",
        about(args),
        f"Nobody lies; means over all eight clients, all of them in each of the six rounds. "
        f"`where: central`, `clip: {CLIP}`, delta = "
        f"{DELTA:g}. Adaptive: `adaptive: {{lr: 1.0, noise: {COUNTED}}}`. Updates have norm 3.4, "
        f"2.4, 1.7, 1.0, 0.54 in the first five "
        "rounds, nearly alike in all clients. Lower is better.",
        table(["", "epsilon", "C", *FIGURES.values()], rows),
    ]
    write(args.results / "privacy-small", "\n\n".join(parts) + "\n", cells, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("rules", "privacy"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/attacked"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.command = (
        f"python benchmarks/attacked.py {args.table} --seed {args.seed} --processes "
        f"{args.processes}"
    )
    args.cores = os.cpu_count()
    {"rules": rules, "privacy": privacy}[args.table](args)


if __name__ == "__main__":
    main()
