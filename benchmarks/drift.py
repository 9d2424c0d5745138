"""Drift: the texts of one of four clients change at half of the run.

    python benchmarks/drift.py run [--to known unknown] [--seeds 0 1 2]
        [--folder benchmarks/results/drift]
    python benchmarks/drift.py table [--folder benchmarks/results/drift]

Ann writes about sports, and from half of the run on about mathematics (`known`: Dora does so from
the start), or novels (`unknown`: nobody does). Rows, scored on the test text that she has then and
on that of before: CoMiGS-1G1S, Local and FedAvg as they were; CoMiGS with her router, or router and
specialist, refitted to the new text by `coterie adapt --fresh`; Local trained on in the same way;
and FedAvg that went on, with everybody, as long again. What is done is kept in FOLDER/runs.jsonl, a
line for each row and seed, and models in WORK; it goes on where it stopped. `table` writes
FOLDER.md.
"""

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, table
from federations import write_folders

import coterie
from coterie.adapt.fresh import refit
from coterie.core.metrics import perplexity
from coterie.data.folders import Folders
from coterie.personal import PersonalModel
from coterie.runs.problems.loading import own_text

WRITERS = {
    "ann": ("news:1", 4000),
    "ben": ("news:3", 4000),
    "carl": ("topics:code", 4000),
    "dora": ("topics:arxiv", 4000),
}
TO = {"known": ("topics:arxiv", 4000), "unknown": ("topics:books", 4000)}
Pair = tuple[float, float]
HALF, STEPS = 6, 8  # rounds until the texts change, and local iterations in each
CONTEXT = 64
METHODS: Mapping[str, Mapping[str, Any]] = {
    "comigs-1g1s": {"router_every": 12, "router_steps": 4},
    "local": {},
    "fedavg": {},
}
ROWS = {
    "comigs-1g1s": "CoMiGS-1G1S, as it was",
    "comigs-1g1s router": "router refitted",
    "comigs-1g1s specialists": "router and specialist refitted",
    "local": "Local, as it was",
    "local specialists": "Local, trained on",
    "fedavg": "FedAvg, as it was",
    "fedavg on": "FedAvg, gone on with everybody",
}


class Half(coterie.Callback):
    """Ends a run after half of its rounds, as Ctrl-C would."""

    def round(self, round: int) -> None:
        if round == HALF:
            raise KeyboardInterrupt


def changes(method: str, clients: Path, rounds: int) -> dict[str, Any]:
    """Return what of the recipe `folders` is set."""
    steps = {"rounds": rounds, "local_steps": STEPS}
    return {
        "data": {"path": str(clients)},
        "model": {"context": CONTEXT},
        "method": {"name": method, **METHODS[method], **steps},
        "training": {"batch_size": 4, "experts": {"lr": 5e-3, "schedule": "constant"}},
        "evaluate_every": rounds,
        "keep": "last",
        "patience": None,
        "compare_with": [],
        "samples": False,
        "checkpoint_every": 2,
        "curve_every": None,
    }


def score(model: Any, texts: Path) -> float:
    """Return the perplexity of a folder's test text."""
    assert isinstance(model, PersonalModel)
    test = own_text(Folders(), model.tokenizer, CONTEXT, 0, "ann", texts).test
    return perplexity(torch.tensor(model.score(test.scoring(32)), dtype=torch.float64))


def trained(folder: Path, method: str, clients: Path, rounds: int, seed: int) -> Any:
    """Return Ann's model after so many rounds; goes on where it stopped."""
    if not (folder / "result.json").exists():
        if not (begun := (folder / "checkpoints").exists()):
            shutil.rmtree(folder, ignore_errors=True)
        settings = changes(method, clients, rounds)
        coterie.run("folders", out=folder, seed=seed, resume_changed=begun, **settings)
    return coterie.load(folder, "ann")


def give(clients: Path, texts: Path) -> None:
    """Give Ann other texts."""
    shutil.rmtree(clients / "ann")
    shutil.copytree(texts, clients / "ann")


def rows_of(to: str, seed: int, work: Path, known: Collection[str]) -> Iterator[tuple[str, Pair]]:
    """Yield each row that is not known with its test perplexities of the new text and the old."""
    clients, old, new = (work / name for name in ("clients", "old", to))
    if not new.exists():
        write_folders(clients, WRITERS | TO, 1)
        shutil.copytree(clients / "ann", old)
        for name in TO:
            (clients / name).rename(work / name)
    give(clients, old)
    for method in METHODS:
        if {row for row in ROWS if row.split()[0] == method} <= {*known, "fedavg on"}:
            continue
        run = work / f"{method}-{seed}"
        model = trained(run, method, clients, HALF, seed)
        yield method, (score(model, new), score(model, old))
        if method != "fedavg":
            shutil.rmtree(run / "clients/ann/fresh", ignore_errors=True)
            result = refit(run, "ann", new, iterations=HALF * STEPS)
            for stage in list(result.new)[1:]:
                yield f"{method} {stage}", (result.new[stage], result.old[stage])
    if "fedavg on" in known:
        return
    half, on = work / f"fedavg-half-{seed}", work / f"fedavg-{to}-{seed}"
    if not any((half / "checkpoints").glob("*")):
        shutil.rmtree(half, ignore_errors=True)
        settings = changes("fedavg", clients, 2 * HALF)
        with suppress(KeyboardInterrupt):
            coterie.run("folders", out=half, seed=seed, callbacks=[Half()], **settings)
    if not on.exists():
        shutil.copytree(half, on)
    give(clients, new)
    model = trained(on, "fedavg", clients, 2 * HALF, seed)
    yield "fedavg on", (score(model, new), score(model, old))
    give(clients, old)


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all rows, means over seeds with their deviations."""
    lines: list[dict[str, Any]] = []
    for row, title in ROWS.items():
        line: dict[str, Any] = {"row": title}
        for to in TO:
            known = [run for run in runs if (run["to"], run["row"]) == (to, row)]
            for text in ("new", "old"):
                values = [run[text] for run in known]
                spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
                mean = f"{statistics.mean(values):.2f}" if values else "not run"
                line[f"{to}: {text} text"] = mean + spread
        lines.append(line)
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    return f"""# Drift: a client whose texts change at half of the run

`python benchmarks/drift.py run`, then `table`. Ann's test perplexity, lower is better, mean ±
deviation over seeds {seeds}; base embedded, four clients of about 4,000 training tokens, {HALF}
rounds of {STEPS} local iterations until her texts change from sports news. `known`: to mathematics,
which Dora writes about; `unknown`: to novels, which nobody writes about. Refitted and trained on:
for at most {HALF * STEPS} iterations on her device, nothing sent; gone on: {HALF} more rounds with
everybody.

{table(lines)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--to", nargs="+", choices=list(TO), default=list(TO))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=RESULTS / "drift")
    parser.add_argument("--work", type=Path, default=Path("runs/drift"), help="runs are kept here")
    args = parser.parse_args()
    file = args.folder / "runs.jsonl"
    kept = file.read_text().splitlines() if file.is_file() else []
    runs: list[dict[str, Any]] = [json.loads(line) for line in kept]
    if args.do == "table":
        text = page(runs)
        print(text)
        args.folder.with_name(f"{args.folder.name}.md").write_text(text)
        return
    os.environ.setdefault("COTERIE_DATA", "../shared/data")
    for to in args.to:
        for seed in args.seeds:
            known = {run["row"] for run in runs if (run["to"], run["seed"]) == (to, seed)}
            for row, (new, old) in rows_of(to, seed, args.work, known):
                if row not in known:
                    runs.append({"to": to, "seed": seed, "row": row, "new": new, "old": old})
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("a") as lines:
                        lines.write(json.dumps(runs[-1]) + "\n")
                    print(runs[-1], flush=True)


if __name__ == "__main__":
    main()
