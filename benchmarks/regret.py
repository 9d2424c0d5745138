"""Regret of personal methods: how much worse each client fares than with the best other row.

    python benchmarks/regret.py run [--size small] [--federations NAME ...] [--rows NAME ...]
        [--seeds 0 1 2] [--base embedded] [--folder benchmarks/results/regret]
    python benchmarks/regret.py table [--ours ROW ...] [--base embedded] [--folder ...]

Every row gets the same effort: four learning rates with the first seed, and others beyond them
until the best mean validation loss lies inside the grid; then the other seeds with that one. Each
client keeps the evaluation with its least validation loss (`--last`: the last one), of every row
alike. What is done is kept in FOLDER/runs.jsonl, a line for each run, and goes on where it stopped.
`table` writes FOLDER-BASE-SIZE.md.

Work is counted in passes of a token through the base, forward or backward, evaluations by the run
left out: what the rows do themselves, validation by a method included.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import RESULTS, table
from federations import CORPORA, FOLDERS, ROUTERS, recipe_of

import coterie
from coterie.models.language import LanguageModel
from coterie.runs.scoring import Scorer

GRID = (2.5e-3, 5e-3, 1e-2, 2e-2)
LIMITS = (1e-4, 0.2)
REFERENCES = ("pretrained", "local", "fedavg", "comigs-2g", "comigs-2s", "comigs-1g1s")
ROWS: dict[str, dict[str, Any]] = {
    "pretrained": {"name": "pretrained"},
    "local": {"name": "local"},
    "fedavg": {"name": "fedavg"},
    "comigs-2g": {"name": "comigs-2g", **ROUTERS},
    "comigs-2s": {"name": "comigs-2s", **ROUTERS},
    "comigs-1g1s": {"name": "comigs-1g1s", **ROUTERS},
    "comigs-1g2s": {"name": "comigs", "specialists": 2, "top_k": 3, **ROUTERS},
    "interpolation": {"name": "interpolation"},
}
Run = dict[str, Any]


class Work:
    """Passes of tokens through the base, counted where models compute them."""

    def __init__(self) -> None:
        self.passes, self.counting = 0, True

    @contextmanager
    def counted(self) -> Iterator["Work"]:
        """Count within the block."""
        gradient, score = LanguageModel.gradient, LanguageModel.score
        parts = {name: getattr(Scorer, name) for name in ("evaluate", "synced")}

        def counted_gradient(model: Any, batch: Any, *rest: Any, **more: Any) -> Any:
            self.passes += 2 * batch[:, 1:].numel() * self.counting
            return gradient(model, batch, *rest, **more)

        def counted_score(model: Any, batches: Any) -> Any:
            found = score(model, batches)
            self.passes += int(found[1]) * self.counting
            return found

        def uncounted(name: str) -> Any:
            def call(scorer: Any) -> Any:
                self.counting = False
                try:
                    return parts[name](scorer)
                finally:
                    self.counting = True

            return call

        LanguageModel.gradient = counted_gradient  # type: ignore[method-assign]
        LanguageModel.gradient_elsewhere = counted_gradient  # type: ignore[method-assign]
        LanguageModel.score = counted_score  # type: ignore[method-assign]
        for name in parts:
            setattr(Scorer, name, uncounted(name))
        try:
            yield self
        finally:
            LanguageModel.gradient, LanguageModel.score = gradient, score  # type: ignore[method-assign]
            LanguageModel.gradient_elsewhere = gradient  # type: ignore[method-assign]
            for name, own in parts.items():
                setattr(Scorer, name, own)


class Sweep:
    """All runs of one folder.

    Args:
        folder: Of `runs.jsonl`.
        size: Of the federations.
        base: Of all rows; in `runs.jsonl` a folder goes by its name.
        grid: Learning rates that every row begins with.
    """

    def __init__(self, folder: Path, size: str, base: str, grid: Sequence[float] = GRID) -> None:
        self.grid = grid
        self.file, self.size, self.base, self.folder = folder / "runs.jsonl", size, base, folder
        lines = self.file.read_text().splitlines() if self.file.is_file() else []
        self.runs: list[Run] = [json.loads(line) for line in lines]

    def find(self, **wanted: Any) -> list[Run]:
        """Return the runs with these values."""
        wanted |= {"size": self.size, "base": Path(self.base).name}
        return [r for r in self.runs if all(r[k] == v for k, v in wanted.items())]

    def run(self, federation: str, row: str, lr: float, seed: int) -> Run:
        """Do one run, or find it."""
        key = {"federation": federation, "row": row, "lr": lr, "seed": seed}
        if found := self.find(**key):
            return found[0]
        recipe, changes = recipe_of(federation, self.size, self.folder / "texts")
        changes["method"] = changes.get("method", {}) | ROWS[row]
        if row == "pretrained":
            changes["method"] = {"name": "pretrained", "rounds": 0}
        changes.setdefault("training", {})["experts"] = {"lr": lr, "schedule": "cosine"}
        changes.setdefault("model", {})["base"] = self.base
        with tempfile.TemporaryDirectory() as out, Work().counted() as work:
            result = coterie.run(recipe, out=Path(out) / "run", seed=seed, **changes).result
        evaluations = [
            {
                "round": e.round,
                "clients": {i: [s.valid_loss, s.test_loss] for i, s in e.clients.items()},
            }
            for e in result.evaluations
        ]
        about = {
            "size": self.size,
            "base": Path(self.base).name,
            "work": work.passes,
            "wall": result.wall_s,
        }
        self.runs.append(key | about | {"evaluations": evaluations})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as lines:
            lines.write(json.dumps(self.runs[-1]) + "\n")
        print(
            f"{federation} {row} lr {lr:g} seed {seed}: {mean_loss(self.runs[-1]):.4f}", flush=True
        )
        return self.runs[-1]

    def tune(self, federation: str, row: str, seed: int) -> float:
        """Return the learning rate with the least validation loss, inside a grid that grows."""
        if row == "pretrained":
            self.run(federation, row, GRID[0], seed)
            return GRID[0]
        grid = list(self.grid)
        while True:
            loss = {lr: mean_loss(self.run(federation, row, lr, seed)) for lr in grid}
            best = min(loss, key=lambda lr: loss[lr])
            if best == min(grid) and best / 2 > LIMITS[0]:
                grid.append(best / 2)
            elif best == max(grid) and best * 2 < LIMITS[1]:
                grid.append(best * 2)
            else:
                return best


def kept(run: Run, client: str, last: bool = False) -> tuple[float, float]:
    """Return validation and test loss of the evaluation that a client keeps, nats."""
    own = [e["clients"][client] for e in run["evaluations"]]
    valid, test = own[-1] if last else min(own)
    return valid, test


def mean_loss(run: Run) -> float:
    """Return the mean validation loss of the clients, each at the evaluation that it keeps."""
    return statistics.mean(kept(run, i)[0] for i in run["evaluations"][-1]["clients"])


def rows_of(sweep: Sweep, federation: str, ours: Sequence[str], last: bool) -> list[dict[str, Any]]:
    """Return a line for each client of a federation: test perplexity of each row that was run, and
    the regret of ours against the best of the references that were, in percent of perplexity, with
    its standard deviation over seeds.
    """
    names = [row for row in ROWS if sweep.find(federation=federation, row=row)]
    chosen = {row: best_runs(sweep, federation, row) for row in names}
    references = [row for row in REFERENCES if row in names]
    if not references:
        return []
    lines = []
    for client in chosen[references[0]][0]["evaluations"][-1]["clients"]:
        loss = {row: {r["seed"]: kept(r, client, last)[1] for r in chosen[row]} for row in names}
        mean = {row: statistics.mean(own.values()) for row, own in loss.items()}
        best = min(references, key=lambda row: mean[row])
        line: dict[str, Any] = {"client": f"{federation}/{client}"}
        line |= {row: math.exp(mean[row]) for row in names} | {"best": best}
        for row in ours:
            if row in names:
                against = loss[best]
                paired = [
                    100 * math.expm1(own - against.get(seed, next(iter(against.values()))))
                    for seed, own in loss[row].items()
                ]
                line[f"regret of {row}, %"] = statistics.mean(paired)
                line[f"sd of {row}"] = statistics.stdev(paired) if len(paired) > 1 else None
        lines.append(line)
    return lines


def best_runs(sweep: Sweep, federation: str, row: str) -> list[Run]:
    """Return the runs of a row with the learning rate that was chosen, one for each seed."""
    runs = sweep.find(federation=federation, row=row)
    first = [r for r in runs if r["seed"] == min(r["seed"] for r in runs)]
    lr = min(first, key=mean_loss)["lr"]
    return [r for r in runs if r["lr"] == lr]


def page(sweep: Sweep, ours: Sequence[str], last: bool) -> str:
    """Return the tables of regret as Markdown, federation by federation, each with the learning
    rate that was chosen for each row and its work, in that of 1G1S; above them the regret of
    every row over all clients, and the hours.
    """
    parts, lines = [], []
    for federation in (*CORPORA, *FOLDERS):
        if not (every := rows_of(sweep, federation, list(ROWS), last)):
            continue
        lines += every
        others = [row for row in ROWS if row not in ours]
        hidden = {f"regret of {row}, %" for row in others} | {f"sd of {row}" for row in others}
        own = [{k: v for k, v in line.items() if k not in hidden} for line in every]
        runs = {
            row: best_runs(sweep, federation, row)
            for row in ROWS
            if sweep.find(federation=federation, row=row)
        }
        unit = runs["comigs-1g1s"][0]["work"] if "comigs-1g1s" in runs else None
        chosen = "; ".join(
            f"{row} {found[0]['lr']:g}" + (f" ({found[0]['work'] / unit:.2f})" if unit else "")
            for row, found in runs.items()
            if row != "pretrained"
        )
        seeds = sorted({run["seed"] for found in runs.values() for run in found})
        parts += [f"## {federation}", table(own), f"Learning rate (work): {chosen}. Seeds {seeds}."]
    hours = sum(run["wall"] for run in sweep.find()) / 3600
    summary = [
        over_clients(row, judged)
        for row in ROWS
        if (judged := [line for line in lines if f"regret of {row}, %" in line])
    ]
    head = (
        f"Base {Path(sweep.base).name}, size {sweep.size}, {len(sweep.find())} runs, {hours:.1f} "
        "hours of one thread. Test perplexity of each client, lower is better, mean over seeds; "
        "regret is against the row that is best for this client on its test text, in percent, "
        "paired over seeds. Level: no worse than that row, or within one deviation over seeds."
    )
    return "\n\n".join(["# Regret of personal methods", head, table(summary), *parts]) + "\n"


def over_clients(row: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the regret of a row over all clients: its mean, how many are level with their best
    other row within one deviation over seeds, and the largest.
    """
    regret, deviation = f"regret of {row}, %", f"sd of {row}"
    worst = max(lines, key=lambda line: line[regret])
    return {
        "row": row,
        "clients": len(lines),
        "mean regret, %": statistics.mean(line[regret] for line in lines),
        "level": sum(line[regret] <= (line[deviation] or 0) for line in lines),
        "over 5 %": sum(line[regret] > 5 for line in lines),
        "largest, %": worst[regret],
        "its sd": worst[deviation],
        "of": worst["client"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--federations", nargs="+", default=[*CORPORA, *FOLDERS])
    parser.add_argument("--rows", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--grid", nargs="+", type=float, default=list(GRID))
    parser.add_argument("--base", default="embedded")
    parser.add_argument("--folder", type=Path, default=RESULTS / "regret")
    parser.add_argument("--ours", nargs="+", default=[])
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--more", type=json.loads, default={}, help="other rows, JSON by name")
    args = parser.parse_args()
    ROWS.update(args.more)
    sweep = Sweep(args.folder, args.size, args.base, args.grid)
    if args.do == "table":
        found = page(sweep, args.ours or [r for r in ROWS if r not in REFERENCES], args.last)
        print(found)
        name = f"{args.folder.name}-{Path(args.base).name}-{args.size}.md"
        args.folder.with_name(name).write_text(found)
        return None
    for federation in args.federations:
        for row in args.rows or ROWS:
            lr = sweep.tune(federation, row, args.seeds[0])
            for seed in args.seeds[1:]:
                sweep.run(federation, row, lr, seed)
    return None


if __name__ == "__main__":
    main()
