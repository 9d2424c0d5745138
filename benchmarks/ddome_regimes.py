"""DDOME where the paper had it: small experts, an under-trained common expert, unseen clients.

    python benchmarks/ddome_regimes.py run [--columns NAME ...] [--rows NAME ...] [--seeds 0 1 ...]
        [--file benchmarks/results/ddome-regimes.json]
    python benchmarks/ddome_regimes.py table [--file ...]

Needs COTERIE_DATA. The seed of a run is also that of its split. What is done is in the file, and is
never done again; `table` writes the page beside it. A row is finished if its mean accuracy changed
by less than a point over the last fifth of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, table

from coterie.runs.recipes.recipe import changed, load
from coterie.runs.run import run as run_recipe

COLUMNS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "domains-61": (
        "CLINC150 by domain, common expert 61 %",
        "ddome-clinc150-head",
        ["model.common.pretraining.stop_at=0.65"],
    ),
    "domains-68": ("CLINC150 by domain, common expert 68 %", "ddome-clinc150-head", []),
}
SAMPLES = {"method.aggregation.weighting": "samples"}
WARM, STANDARD = {"method.warmup": 12}, {"model.common.standardise": True}
LOAD = {"method.load": 1.5}
ROWS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "common-expert": ("Common expert", "common-expert", {}),
    "fedavg": ("FedAvg", "fedavg", SAMPLES),
    "ddome": ("DDOME", "ddome", {}),
    "fedmix": ("FedMix", "fedmix", {}),
    "ensemble": ("Average ensembles", "ensemble", {}),
    "warmup": ("DDOME, warm-up of 12 rounds", "ddome", WARM),
    "standardised": ("DDOME, embeddings standardised", "ddome", STANDARD),
    "load": ("DDOME, limit of load 1.5", "ddome", LOAD),
    "all": ("DDOME, all three", "ddome", WARM | STANDARD | LOAD),
}
Run = dict[str, Any]
GROUPS = ("aligned", "random")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def once(column: str, row: str, seed: int) -> Run:
    """One run's accuracies of unseen clients by round and group, %."""
    (_, name, settings), (_, method, changes) = COLUMNS[column], ROWS[row]
    settings = [*settings, f"seed={seed}", f"data.seed={seed}", "evaluate_every=20"]
    settings += ["samples=false", "checkpoint_every=1000"]
    recipe = changed(load(name, settings).with_method(method), changes)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run_recipe(recipe, Path(folder) / "run")[-1]
    curve = {e.round: dict(e.groups) for e in result.evaluations}
    last = result.evaluations[-1].clients.values()
    gate = [c.gate_accuracy for c in last if c.gate_accuracy is not None]
    return {
        "column": column,
        "row": row,
        "seed": seed,
        "rounds": result.rounds,
        "curve": curve,
        "gate": statistics.fmean(gate) if gate else None,
        "s": round(time.perf_counter() - start, 1),
    }


def value(run: Run, group: str, back: float = 0) -> float:
    """The accuracy of a group at the end, or this share of the rounds before it."""
    curve = {int(at): groups for at, groups in run["curve"].items()}
    at = max((at for at in curve if at <= (1 - back) * max(curve)), default=min(curve))
    return float(curve[at][group])


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.1f} ± {half:.1f}"


def rows_of(runs: Sequence[Run], column: str) -> list[dict[str, Any]]:
    """A column's rows as a table."""
    by = {(run["row"], run["seed"]): run for run in runs if run["column"] == column}
    lines = []
    for row, (title, *_) in ROWS.items():
        if not (done := {seed: run for (name, seed), run in by.items() if name == row}):
            continue
        ends = {group: [value(run, group) for run in done.values()] for group in GROUPS}
        line: dict[str, Any] = {"row": title, "seeds": len(done)}
        line |= {f"{group}, %": interval(values) for group, values in ends.items()}
        for other in ("common-expert", "fedavg", "ddome"):
            pairs = [
                value(run, "aligned") - value(by[other, seed], "aligned")
                for seed, run in done.items()
                if (other, seed) in by
            ]
            against = ROWS[other][0]
            line[f"aligned minus {against}"] = interval(pairs) if pairs and other != row else None
        change = statistics.fmean(
            value(run, "aligned") - value(run, "aligned", 0.2) for run in done.values()
        )
        line["last fifth"] = f"{change:+.1f}" + (" (unfinished)" if abs(change) >= 1 else "")
        gates = [run["gate"] for run in done.values() if run["gate"] is not None]
        line["gate right, %"] = f"{statistics.fmean(gates):.1f}" if gates else None
        line["s"] = statistics.fmean(run["s"] for run in done.values())
        lines.append(line)
    return lines


def page(content: Mapping[str, Any]) -> str:
    """All columns as Markdown."""
    parts = [
        "# DDOME where the paper had it",
        "`COTERIE_DATA=... python benchmarks/ddome_regimes.py run`, then `table`; one thread, on "
        f"{content['machine']['processor']}, beside other work. Accuracy of unseen clients; means "
        "over seeds, each with a split of its own, and 95 % intervals, of differences paired by "
        "seed. "
        "`last fifth` is the change over the last fifth of the rounds.",
    ]
    for column, (title, recipe, changes) in COLUMNS.items():
        if rows := rows_of(content["runs"], column):
            rounds = {run["rounds"] for run in content["runs"] if run["column"] == column} - {0}
            settings = "".join(f" --set '{change}'" for change in changes)
            parts += [
                f"## {title}, {max(rounds, default=0)} rounds",
                f"`coterie run {recipe}{settings}`",
            ]
            parts.append(table(rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--file", type=Path, default=RESULTS / "ddome-regimes.json")
    given = parser.parse_args()
    content = {"machine": machine(), "runs": []}
    if given.file.exists():
        content = json.loads(given.file.read_text())
    if given.action == "table":
        given.file.with_suffix(".md").write_text(page(content))
        return
    torch.set_num_threads(1)
    done = {(run["column"], run["row"], run["seed"]) for run in content["runs"]}
    for seed in given.seeds:
        for column in given.columns:
            for row in given.rows:
                if (column, row, seed) not in done:
                    run = once(column, row, seed)
                    content["runs"].append(run)
                    given.file.write_text(json.dumps(content, indent=1) + "\n")
                    print(column, row, seed, run["curve"][max(run["curve"])], run["s"], flush=True)


if __name__ == "__main__":
    main()
