"""The town office of `coterie run team` over seeds, of facts, training and all else.

    python benchmarks/team.py run [--set model.base=FILE.gguf] [--seeds 0 1 2] [--runs FOLDER]
        [--file benchmarks/results/team.json]
    python benchmarks/team.py table [--file ...]

A run that was stopped goes on from its last checkpoint, and one that has ended is not repeated.
FedAvg's averaged model is the mean of what clients have after their last local steps.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, table

import coterie
from coterie.data.synthetic import Team
from coterie.personal import PersonalModel
from coterie.personal.evaluation import answer_scores
from coterie.runs.recipes.recipe import load

TITLES = {
    "pretrained": "Pretrained",
    "local": "Local",
    "averaged": "FedAvg, the averaged model",
    "fedavg": "FedAvg, after its local steps",
    "interpolation": "The mixture of predictions",
    "comigs-1g1s": "CoMiGS-1G1S",
}
SHARES = {"facts": "right facts, %", "manner": "right manner, %", "all": "both, %"}


def averaged(folder: Path, team: Team) -> list[dict[str, float]]:
    """The answers of FedAvg's averaged model to each client's questions."""
    models = [m for m in coterie.load_all(folder).values() if isinstance(m, PersonalModel)]
    with torch.no_grad():
        for each in zip(*(model.adapter.parameters() for model in models), strict=True):
            mean = torch.stack([parameter.data for parameter in each]).mean(dim=0)
            for parameter in each:
                parameter.copy_(mean)
    scores = (answer_scores(model, team.questions(model.about.client)) for model in models)
    return [of_client for of_client in scores if of_client is not None]


def seed_of(settings: Sequence[str], seed: int, folder: Path) -> dict[str, Any]:
    """Each row's perplexity and shares of right answers, the means over clients."""
    seeds = [f"seed={seed}", f"data.seed={seed}"]
    recipe = load("team", ["model.dtype=fp32", *seeds, *settings])  # the same on every machine
    run = coterie.run(recipe, out=folder, resume=(folder / "lock").exists(), progress=True)
    rows = {row.method: {"perplexity": row.mean, **(row.answers or {})} for row in run.rows}
    of_clients = averaged(folder / "baselines" / "fedavg", Team(seed=seed))
    shares = {name: statistics.fmean(of[name] for of in of_clients) for name in SHARES}
    synced = run.baselines["fedavg"].mean_synced
    return {**rows, "averaged": {"perplexity": synced, **shares}}


def page(seeds: Mapping[str, Any]) -> str:
    """The page of the figures."""
    rows = []
    for name, title in TITLES.items():
        row = {"": title}
        for figure, heading in {"perplexity": "perplexity of answers", **SHARES}.items():
            values = [of[name][figure] for of in seeds.values()]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            row[heading] = f"{statistics.fmean(values):.2f}{spread}"
        rows.append(row)
    head = "# Four people of one town office\n\n"
    return f"{head}Mean over clients, then over {len(seeds)} seeds.\n\n{table(rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/team-seeds"))
    parser.add_argument("--file", type=Path, default=RESULTS / "team.json")
    given = parser.parse_args()
    known = json.loads(given.file.read_text()) if given.file.exists() else {"seeds": {}}
    if given.what == "run":
        for seed in given.seeds:
            if str(seed) not in known["seeds"]:
                scores = seed_of(given.settings, seed, given.runs / f"seed-{seed}")
                known["seeds"][str(seed)] = scores
                known["machine"] = machine()
                given.file.write_text(json.dumps(known, indent=1) + "\n")
    given.file.with_suffix(".md").write_text(page(known["seeds"]))


if __name__ == "__main__":
    main()
