"""Personal methods and mixtures of their predictions, on text: is anybody worse off?

    python benchmarks/never_worse.py run [--federations NAME ...] [--rows NAME ...] [--seeds 0 1 2]
        [--settings fixed] [--cache /tmp/nw-cache]
    python benchmarks/never_worse.py table

Every row is trained by the recipe's own settings; each client's model is read twice: after the last
round, and at its best round by validation, of every second one in the second half (quickstart:
all). The log-likelihood of each token of the validation and
test text is kept in CACHE, and mixtures are computed from it without training again. What is done
is in `results/never-worse.json`, and is never done again; `table` writes `never-worse.md`.

Settings: `fixed`, the recipe's; `rounds-N`, N rounds of as many local steps.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import RESULTS
from federations import AS_KEPT, PEOPLE, write_folders
from never_worse_page import Table, costs, mean_perplexity
from rivals import PARTS, distilled, knn_mixture, mixed_parameters, text_losses

from coterie.client.client import Client
from coterie.models.interpolation import Follower, fit_weights, interpolate, settled
from coterie.runs.problems.auto import resolved
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.run import run as run_recipe

Array = npt.NDArray[np.float64]
Texts = dict[str, dict[str, Array]]  # by client and split: each token's log-likelihood, nats
READINGS, SPLITS = ("last", "best"), ("valid", "test")
FEDERATIONS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {"evaluate_every": 1},
    "topics": {},
    "multilingual": {},
    "agnews-ood": {},
    "agnews-id": {},
    "languages-topics": {},
    "unlike-amounts": {  # of CoMiGS' Figure 5, at the small scale of its tables
        "data.train_tokens": [1700, 5000, 6800, 1400],
        "data.valid_tokens": 2700,
        "data.test_tokens": 6000,
        "method.local_steps": 4,
        "method.router_every": 6,
        "method.router_steps": 2,
        "training.routers.lr": 5.0e-3,
    },
    "own-languages": {},
    "own-trades": {},
    "own-code-prose": {"model.context": 128},
}
AGAIN = 100  # added to the seed for a second model of the same kind
TRAINED: Mapping[str, Mapping[str, Any]] = {  # the method, and what of the recipe is multiplied
    "local": {"method": "local"},
    "fedavg": {"method": "fedavg"},
    "comigs-1g1s": {"method": "comigs-1g1s"},
    "finetuned-fedavg": {"method": "finetuned-fedavg"},
    "comigs-2g": {"method": "comigs-2g"},
    "mapper": {"method": "rivals:Mapper"},
    "local-again": {"method": "local", "seed": AGAIN},
    "fedavg-again": {"method": "fedavg", "seed": AGAIN},
    "comigs-1g1s-again": {"method": "comigs-1g1s", "seed": AGAIN},
    "local-rank-16": {"method": "local", "rank": 2},
    "fedavg-rank-16": {"method": "fedavg", "rank": 2},
    "comigs-1g1s-rank-16": {"method": "comigs-1g1s", "rank": 2},
    "local-steps-2": {"method": "local", "steps": 2},
    "fedavg-steps-2": {"method": "fedavg", "steps": 2},
    "comigs-1g1s-steps-2": {"method": "comigs-1g1s", "steps": 2},
}
PAIR = ("local", "fedavg")
KNN, ONE_PASS, ALONE = "knn-per", "parameters mixed", "local with memory"
DISTILLED = "distilled"
FORMER = ("comigs-elastic",)  # results of a method that is no longer here
MIXTURES: Mapping[str, Sequence[str]] = {
    "mixture of two": PAIR,
    "mixture of three": (*PAIR, "comigs-1g1s"),
    "with memory": (*PAIR, KNN),
    "two Locals": ("local", "local-again"),
    "two FedAvgs": ("fedavg", "fedavg-again"),
    "two 1G1S": ("comigs-1g1s", "comigs-1g1s-again"),
}
FOLLOWING, STARTED = "weights follow the text", "weights follow, from validation's"
SINGLE = ("local", "fedavg", "finetuned-fedavg", "comigs-1g1s", "comigs-2g")
REFERENCES = (*SINGLE, "mapper")
OURS = (
    "mixture of two",
    "mixture of three",
    FOLLOWING,
    STARTED,
    ONE_PASS,
    DISTILLED,
    "with memory",
)
ROWS = tuple(dict.fromkeys((*REFERENCES, *FORMER, KNN, ALONE, *OURS, *TRAINED, *MIXTURES)))

# Computed from trained models of a client.
COMBINED: Mapping[str, tuple[Sequence[str], Callable[..., dict[str, Array]]]] = {
    KNN: (("fedavg",), knn_mixture),
    ALONE: (("local",), knn_mixture),
    ONE_PASS: (PAIR, mixed_parameters),
    DISTILLED: (PAIR, distilled),
}
HEAD = """Test perplexity, lower is better, mean over clients and seeds; the embedded base, the
recipes' settings, one thread. Regret: how much more perplexity a client has than with the best
other one of Local, FedAvg, fine-tuned FedAvg, CoMiGS and MAPPER, on its test text; "with memory":
of kNN-Per too, which keeps the client's training text as a datastore."""


class Recorder:
    """What clients' models were at the last and at the best evaluation of a run; test text is read
    once the run is over, of these alone.

    Args:
        first: Rounds before the first evaluation that counts.
    """

    def __init__(self, first: float) -> None:
        self.first = first
        self.clients: dict[str, Client] = {}
        self.kept: dict[str, dict[str, dict[str, Any]]] = {}
        self.scoring = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every evaluation within the block."""
        score = Client.score

        def recorded(client: Client, split: Any, batches: int | None = None) -> Any:
            start = time.process_time()
            if split.name == "valid" and client.round >= self.first:
                self.note(client)
            loss = self.kept[client.id]["last"]["loss"] if client.id in self.kept else 0.0
            self.scoring += time.process_time() - start
            return torch.tensor([loss, 1.0], dtype=torch.float64)

        Client.score = recorded  # type: ignore[method-assign]
        try:
            yield
        finally:
            Client.score = score  # type: ignore[method-assign]

    def note(self, client: Client) -> None:
        """Keep a client's model as the last one, and as the best if its validation loss is."""
        names = [key for key in client.state if key.startswith("parameters/")]
        of = {name: client.state[name].clone() for name in names}
        more = {name: client.state[name].clone() for name in PARTS if name in client.state}
        entry: dict[str, Any] = {"tensors": of, "more": more, "round": client.round}
        entry["valid"] = text_losses(client, client.valid, of, more)
        entry["loss"] = float(-entry["valid"].mean())
        self.clients[client.id] = client
        before = self.kept.get(client.id, {}).get("best")
        best = entry if before is None or entry["loss"] < before["loss"] else before
        self.kept[client.id] = {"last": entry, "best": best}

    def texts(self, reading: str) -> Texts:
        """Return the log-likelihoods of both splits of every client."""
        texts: Texts = {}
        for i, client in self.clients.items():
            entry = self.kept[i][reading]
            if "test" not in entry:
                entry["test"] = text_losses(client, client.test, entry["tensors"], entry["more"])
            texts[i] = {split: entry[split] for split in SPLITS}
        return texts


class Bench:
    """All rows of all federations.

    Args:
        cache: For log-likelihoods and models.
        file: Of the results.
    """

    def __init__(self, cache: Path, file: Path) -> None:
        self.cache, self.file = cache, file
        self.lines: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []

    def find(self, **values: Any) -> list[dict[str, Any]]:
        """Return the results with these values."""
        return [x for x in self.lines if all(x[k] == v for k, v in values.items())]

    def recipe(self, federation: str, setting: str, seed: int, row: str) -> Recipe:
        """Return the recipe that trains a row."""
        changes: dict[str, Any] = dict(FEDERATIONS[federation])
        name = "multilingual" if federation == "unlike-amounts" else federation
        if federation in PEOPLE:
            folder, name = self.cache / "texts" / federation, "folders"
            if not folder.is_dir():
                write_folders(folder, PEOPLE[federation], 1)
            changes |= {"data.path": str(folder), **AS_KEPT}
        spec = TRAINED[row]
        changes |= {"compare_with": [], "curve_every": None, "samples": False, "keep": "last"}
        changes = {"evaluate_every": 2, "seed": seed + spec.get("seed", 0)} | changes
        recipe, _ = resolved(Recipe.load(name, **changes))
        recipe = recipe.with_method(spec["method"])
        more: dict[str, Any] = {}
        if setting.startswith("rounds-"):
            more["method.rounds"] = int(setting.removeprefix("rounds-"))
        more["method.local_steps"] = recipe.method["local_steps"] * spec.get("steps", 1)
        more["model.rank"] = recipe.model.rank * spec.get("rank", 1)
        return recipe.with_changes(**more)

    def folder(self, federation: str, setting: str, seed: int, row: str) -> Path:
        return self.cache / federation / setting / f"seed-{seed}" / row.replace(" ", "-")

    def texts(self, key: tuple[str, str, int], row: str) -> dict[str, Texts]:
        """Return a row's log-likelihoods by reading; train it, unless that was done."""
        folder = self.folder(*key, row)
        if not (folder / "about.json").is_file():
            found, about = self.compute(key, row)
            folder.mkdir(parents=True, exist_ok=True)
            flat = {
                f"{reading}|{i}|{split}": found[reading][i][split].astype(np.float32)
                for reading, i in ((r, i) for r in found for i in found[r])
                for split in found[reading][i]
            }
            np.savez_compressed(folder / "texts.npz", **flat)  # type: ignore[arg-type]
            (folder / "about.json").write_text(json.dumps(about))
        loaded: dict[str, Texts] = {}
        with np.load(folder / "texts.npz") as arrays:
            for name in arrays:
                reading, i, split = name.split("|")
                of = loaded.setdefault(reading, {}).setdefault(i, {})
                of[split] = arrays[name].astype(np.float64)
        return loaded

    def compute(
        self, key: tuple[str, str, int], row: str
    ) -> tuple[dict[str, Texts], dict[str, Any]]:
        """Return a row's log-likelihoods by reading, and what it costs."""
        start = time.process_time()
        if row in TRAINED:
            return self.train(key, row)
        if row in COMBINED:
            needed, work = COMBINED[row]
            for part in needed:
                self.texts(key, part)
            found = self.combined(key, needed, work)
            return found, {"cpu_s": time.process_time() - start}
        parts = {part: self.texts(key, part) for part in MIXTURES.get(row, PAIR)}
        found, weights = {}, {}
        for reading in READINGS:
            of = {part: texts[reading] for part, texts in parts.items()}
            found[reading], weights[reading] = mixture(of, row)
        return found, {"weights": weights, "cpu_s": time.process_time() - start}

    def combined(
        self, key: tuple[str, str, int], needed: Sequence[str], work: Callable[..., Any]
    ) -> dict[str, Texts]:
        """Return what is computed from the trained models of each client, by reading."""
        site = prepare(self.recipe(*key, "fedavg")).site
        models = [torch.load(self.folder(*key, part) / "models.pt") for part in needed]
        found: dict[str, Texts] = {reading: {} for reading in READINGS}
        for i in models[0]["last"]:
            last, best = ([of[reading][i] for of in models] for reading in READINGS)
            found["last"][i] = found["best"][i] = work(site.client(i, {}), *last)
            if not all(torch.equal(a[k], b[k]) for a, b in zip(last, best, strict=True) for k in a):
                found["best"][i] = work(site.client(i, {}), *best)
        return found

    def train(self, key: tuple[str, str, int], row: str) -> tuple[dict[str, Texts], dict[str, Any]]:
        """Train a row; keep the models of those that others need."""
        recipe = self.recipe(*key, row)
        recorder = Recorder(recipe.method["rounds"] / 2)
        start = time.process_time()
        with tempfile.TemporaryDirectory() as out, recorder.recording():
            (result,) = run_recipe(recipe, Path(out) / "run")
        seconds = time.process_time() - start - recorder.scoring
        costs = next(iter(result.clients.values()))
        about = {
            "cpu_s": seconds,
            "bytes_up": sum(c.bytes_up for c in result.clients.values()),
            "active": costs.active_parameters,
            "trained": costs.trainable_parameters,
            "rounds": {i: kept["best"]["round"] for i, kept in recorder.kept.items()},
        }
        found = {reading: recorder.texts(reading) for reading in READINGS}
        if row in PAIR:
            folder = self.folder(*key, row)
            folder.mkdir(parents=True, exist_ok=True)
            models = {
                reading: {i: kept[reading]["tensors"] for i, kept in recorder.kept.items()}
                for reading in READINGS
            }
            torch.save(models, folder / "models.pt")
        return found, about

    def measure(self, key: tuple[str, str, int], row: str) -> None:
        """Do a row of a federation, unless it was done."""
        federation, setting, seed = key
        about = {"federation": federation, "setting": setting, "seed": seed, "row": row}
        if self.find(**about):
            return
        texts = self.texts(key, row)
        costs = json.loads((self.folder(*key, row) / "about.json").read_text())
        weights = costs.pop("weights", {})
        for reading in READINGS:
            clients = {
                i: [float(-of[split].mean()) if split in of else None for split in SPLITS]
                for i, of in texts[reading].items()
            }
            line = about | {"reading": reading, "clients": clients, **costs}
            if reading in weights:
                line["weights"] = weights[reading]
            self.lines.append(line)
        self.file.write_text("[\n" + ",\n".join(json.dumps(x) for x in self.lines) + "\n]\n")
        means = [mean_perplexity(x) for x in self.lines[-2:]]
        print(*key, row, *(f"{m:.2f}" for m in means), f"{costs['cpu_s']:.0f} s", flush=True)


def mixture(parts: Mapping[str, Texts], row: str) -> tuple[Texts, dict[str, list[float]]]:
    """Return a mixture's log-likelihoods and weights by client."""
    texts: Texts = {}
    weights: dict[str, list[float]] = {}
    for i in next(iter(parts.values())):
        valid, test = (
            torch.from_numpy(np.stack([of[i][split] for of in parts.values()])) for split in SPLITS
        )
        of_client = settled(valid, fit_weights(valid))
        if row in (FOLLOWING, STARTED):
            follower = Follower(len(parts), of_client if row == STARTED else None)
            texts[i] = {"test": follower.observe(test).numpy()}
            weights[i] = [round(w, 4) for w in follower.weights.tolist()]
            continue
        texts[i] = {
            split: interpolate(of, of_client).numpy()
            for split, of in (("valid", valid), ("test", test))
        }
        weights[i] = [round(w, 4) for w in of_client.tolist()]
    return texts, weights


def page(bench: Bench) -> str:
    """Return all tables as Markdown."""
    text = [f"# Never worse than alone, never worse than together\n\n{HEAD}"]
    for setting in dict.fromkeys(line["setting"] for line in bench.lines):
        for reading in READINGS:
            of = Table(bench.find(setting=setting, reading=reading), ROWS, REFERENCES, [KNN])
            text += [f"## {setting}, {reading} round", of.summary(), of.against("mixture of two")]
            if reading == "last":
                text += [f"### {setting}, {f}\n\n{of.clients(f)}" for f in of.losses]
    parts = {row: MIXTURES.get(row, PAIR) for row in ROWS if row not in TRAINED}
    parts |= (
        {row: (row,) for row in (*TRAINED, *FORMER)}
        | {row: of for row, (of, _) in COMBINED.items()}
        | {"with memory": PAIR}
    )
    lines = bench.find(federation="quickstart", setting="fixed", seed=0, reading="last")
    return "\n\n".join([*text, "## What rows of the quickstart cost", costs(lines, parts)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--federations", nargs="+", default=[*FEDERATIONS], choices=FEDERATIONS)
    rows = [row for row in ROWS if row not in FORMER]
    parser.add_argument("--rows", nargs="+", default=rows, choices=rows)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=["fixed"])
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "nw-cache")
    parser.add_argument("--file", type=Path, default=RESULTS / "never-worse.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.cache, args.file)
    if args.do == "table":
        args.file.with_suffix(".md").write_text(page(bench))
        return
    for seed in args.seeds:
        for setting in args.settings:
            for federation in args.federations:
                for row in args.rows:
                    bench.measure((federation, setting, seed), row)


if __name__ == "__main__":
    main()
