"""New clients without labels: what each row is behind the best of DDOME, FedAvg and common expert.

    python benchmarks/newcomers.py run [--columns NAME ...] [--seeds 0 1 2]
        [--file benchmarks/results/newcomers.json]
    python benchmarks/newcomers.py table [--file ...]

Each run trains DDOME and FedAvg on the same batches, as parts of `ddome-shared`, which are exactly
these methods alone; every row is scored from that one state. The seed is also that of the split.
What is done is in the file, and is never done again; `table` writes the page beside it.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, table
from ddome_regimes import interval

from coterie.core.protocol import drive
from coterie.core.tensors import Tensors, under
from coterie.runs.backends import LocalBackend
from coterie.runs.execution import Execution
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, changed, load

DIRICHLET = [
    "data.partition=dirichlet",
    "data.alpha=0.1",
    "data.replacement=false",
    "data.per_client=null",
    "data.anchor_classes=null",
    "data.clients=15",
    "data.unseen={random: 20}",
]
COLUMNS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "digits": ("Digits, anchors of two labels", "ddome-digits", []),
    "digits-dirichlet": ("Digits, clients and anchors from Dirichlet", "ddome-digits", DIRICHLET),
    "clinc": ("CLINC150 by domain, frozen encoder", "ddome-clinc150-head", []),
}
SHARED = {"name": "ddome-shared"}
BATCH = 16  # labelled validation examples of a new client
# title, the method's section, settings, and the part whose state it has; None: that of the mixture
# ("fedavg alone": with all of the weight on FedAvg)
ROWS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str], str | None]] = {
    "common": ("Common expert", {"name": "common-expert"}, [], "none"),
    "fedavg": ("FedAvg", {"name": "fedavg"}, [], "fedavg"),
    "ddome": ("DDOME", {"name": "ddome"}, [], "ddome"),
    "coverage": (
        "DDOME, experts of 80 % of the gate's scores",
        {"name": "ddome", "coverage": 0.8},
        [],
        "ddome",
    ),
    "frequencies": ("FedAvg, with class frequencies", SHARED, [], "fedavg alone"),
    "mixed": ("Mixed, without class frequencies", SHARED | {"frequencies": None}, [], None),
    "shared": ("DDOME with a shared model", SHARED, [], None),
    "labelled": (
        f"The same, {BATCH} labelled examples",
        SHARED | {"labelled": True},
        [f"data.unseen_valid={BATCH}"],
        None,
    ),
}
RIVALS = ("common", "fedavg", "ddome")
Run = dict[str, Any]


def recipe_of(
    column: str, section: Mapping[str, Any], settings: Sequence[str], seed: int
) -> Recipe:
    """A row's recipe; every method trains as the recipe's own does."""
    _, name, of_column = COLUMNS[column]
    seeds = [f"seed={seed}", f"data.seed={seed}", "samples=false", "checkpoint_every=1000"]
    whole = load(name, [*of_column, *settings, *seeds, "evaluate_every=1000"])
    own = whole.method
    trains = {key: own[key] for key in ("rounds", "local_epochs") if key in own}
    section = section if section["name"] == "common-expert" else trains | dict(section)
    return changed(whole.with_method("fedavg"), {"method": section})


def once(column: str, seed: int) -> Run:
    """Train both parts, and score each row."""
    start = time.perf_counter()
    prepared = prepare(recipe_of(column, SHARED, [], seed))
    with tempfile.TemporaryDirectory() as folder:
        trained = Execution(prepared, Path(folder), backend=LocalBackend("inprocess"))
        trained.execute()
        run = rows_at(column, seed, trained.state.server, trained.state.round)
    return run | {"s": round(time.perf_counter() - start, 1)}


def rows_at(column: str, seed: int, server: Tensors, rounds: int) -> Run:
    """Each row's accuracy of each unseen client, %, at the server's state after the last round."""
    accuracies: dict[str, dict[str, float]] = {}
    for row, (_, section, settings, part) in ROWS.items():
        prepared = prepare(recipe_of(column, section, settings, seed))
        with tempfile.TemporaryDirectory() as folder:
            scored = Execution(prepared, Path(folder), backend=LocalBackend("inprocess"))
            with closing(scored.engine):
                state = scored.state
                state.round = rounds
                if part == "fedavg alone":
                    state.server = server | {"centre": torch.tensor([0.0, 1.0]).double()}
                elif part != "none":
                    state.server = under(part, server) if part else dict(server)
                if section.get("frequencies", 1.0) is None:  # its own common weights
                    answer = scored.requests.answer
                    state.server = drive(state.method.finish(server, state.clients), answer)
                scored.scorer.evaluate()
                last = state.evaluations[-1].clients
                accuracies[row] = {i: of.test for i, of in last.items()}
    return {
        "column": column,
        "seed": seed,
        "rounds": rounds,
        "weight of the experts": float(server["centre"][0]),
        "groups": {g: list(of) for g, of in prepared.problem.federation.unseen.items()},
        "accuracy": accuracies,
    }


def regrets(run: Run, row: str, group: str) -> list[float]:
    """What each client of a group is behind the best of the rivals, points; negative: ahead."""
    own, others = run["accuracy"][row], [run["accuracy"][rival] for rival in RIVALS]
    return [max(of[i] for of in others) - own[i] for i in run["groups"][group]]


def rows_of(runs: Sequence[Run], group: str) -> list[dict[str, Any]]:
    """A group's rows as a table."""
    lines = []
    for row, (title, *_) in ROWS.items():
        behind = [regret for run in runs for regret in regrets(run, row, group)]
        means = [
            statistics.fmean(run["accuracy"][row][i] for i in run["groups"][group]) for run in runs
        ]
        best = [
            max(
                statistics.fmean(run["accuracy"][of][i] for i in run["groups"][group])
                for of in RIVALS
            )
            for run in runs
        ]
        lines.append(
            {
                "row": title,
                "accuracy, %": interval(means),
                "minus the best rival's mean": interval(
                    [own - other for own, other in zip(means, best, strict=True)]
                ),
                "mean regret, points": f"{statistics.fmean(behind):+.1f}",
                "largest": f"{max(behind):+.1f}",
                "behind by over 1": f"{sum(of > 1 for of in behind)} of {len(behind)}",
            }
        )
    return lines


def page(content: Mapping[str, Any]) -> str:
    """All columns as Markdown."""
    parts = [
        "# New clients without labels",
        "`COTERIE_DATA=... python benchmarks/newcomers.py run`, then `table`; one thread, on "
        f"{content['machine']['processor']}, beside other work. Accuracy of unseen clients at the "
        "last round; means over seeds, each with a split of its own, and 95 % intervals. Regret: "
        "what a client is behind the best, for that client, of common expert, FedAvg and DDOME, "
        "which nobody knows without labels; negative where it is ahead.",
    ]
    for column, (title, recipe, changes) in COLUMNS.items():
        if not (runs := [run for run in content["runs"] if run["column"] == column]):
            continue
        settings = "".join(f" --set '{change}'" for change in changes)
        weights = ", ".join(f"{run['weight of the experts']:.2f}" for run in runs)
        parts += [
            f"## {title}, {runs[0]['rounds']} rounds, {len(runs)} seed{'s' * (len(runs) > 1)}",
            f"`coterie run {recipe}{settings}`. Weight of the experts, by seed: {weights}.",
        ]
        for group in runs[0]["groups"]:
            parts += [f"### {group.capitalize()} clients", table(rows_of(runs, group))]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--file", type=Path, default=RESULTS / "newcomers.json")
    given = parser.parse_args()
    content = {"machine": machine(), "runs": []}
    if given.file.exists():
        content = json.loads(given.file.read_text())
    if given.action == "table":
        given.file.with_suffix(".md").write_text(page(content))
        return
    torch.set_num_threads(1)
    done = {(run["column"], run["seed"]) for run in content["runs"]}
    for column in given.columns:
        for seed in given.seeds:
            if (column, seed) not in done:
                run = once(column, seed)
                content["runs"].append(run)
                given.file.write_text(json.dumps(content, indent=1) + "\n")
                means = {row: statistics.fmean(of.values()) for row, of in run["accuracy"].items()}
                print(column, seed, means, run["s"], flush=True)


if __name__ == "__main__":
    main()
