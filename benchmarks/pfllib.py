"""Ours beside PFLlib, on its own splits of images, with its network and its hyperparameters.

    python benchmarks/pfllib.py run FOLDER [--python PATH] [--rows fedavg fedper ...]
        [--splits pat dir] [--seeds 0 1 2] [--rounds 30] [--also alike]
    python benchmarks/pfllib.py table

FOLDER is a checkout of PFLlib; PATH a Python that has what it imports (torch, h5py, ujson,
scikit-learn, matplotlib). Nothing of it is copied: its own functions divide MNIST
(`COTERIE_DATA`) among 20 clients, two classes each (`pat`) or by Dirichlet(0.1) (`dir`), into
FOLDER/dataset, and its servers train in a process of their own. Ours trains the same network on
the same files. What is done is in `results/pfllib.json`, and is not done again.

Accuracy is of all test images, after the last round: of the model that a client has at the start of
a round, as PFLlib scores it. Its Ditto and APFL are scored by the model that stays with the client.
So is FedALA here, by both codes after the last local training: PFLlib does it after the next
mixture with the global model, which is better by some points early on. Its pFedMe means to score
the personal models, but these are the tensors that the global one has just been written to: so we
score the global one (`global`), which our clients never have as their own.

PFLlib leaves out the last batch of an epoch where it is not full: 15 steps of a round where we take
16. With `--also complete` its code is also run with that batch. Its clients' own heads all start at
the values of one network, where FedPer's and FedRep's papers give each client its own: with
`--also alike` ours start so, too.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
CLIENTS, CLASSES, BATCH, LR = 20, 10, 10, 0.005
IMAGES = 4_000  # drawn by the seed, three quarters of them for training
# by row: PFLlib's server, its settings, our settings, and which of our scores is of the same model
ROWS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], str]] = {
    "local": ("serverlocal.Local", {}, {}, "test"),
    "fedavg": ("serveravg.FedAvg", {}, {}, "test_synced"),
    "fedprox": ("serverprox.FedProx", {"mu": 0.1}, {"mu": 0.1}, "test_synced"),
    "scaffold": ("serverscaffold.SCAFFOLD", {}, {}, "test_synced"),
    "ditto": ("serverditto.Ditto", {"mu": 0.1}, {"prox": 0.1}, "test"),
    "fedper": ("serverper.FedPer", {}, {}, "test_synced"),
    "fedrep": ("serverrep.FedRep", {}, {"local_epochs": 2, "head_share": 0.5}, "test_synced"),
    "apfl": ("serverapfl.APFL", {"alpha": 0.5}, {"alpha": 0.5}, "test"),
    "pfedme": (
        "serverpFedMe.pFedMe",
        {"lamda": 15, "beta": 1.0, "K": 5, "p_learning_rate": 0.01},
        {"local_epochs": 5, "inner_steps": 5, "prox": 15, "local_lr": LR},
        "global",
    ),
    "fedala": ("serverala.FedALA", {}, {"layers": 1, "share": 0.8}, "test"),
}
OURS = ("ours", "alike")
WHO = ("theirs", "complete", *OURS)
RATES = {"pfedme": 0.01}  # where the experts' is another one than LR
SPLIT = ("local", "fedavg", "fedper", "fedrep")  # of PFLlib's, whose models come in two parts


def name_of(split: str, seed: int) -> str:
    """Return the name of a data set in PFLlib's folder."""
    return f"coterie-mnist-{split}-{seed}"


# In PFLlib's process


def divide(folder: Path, split: str, seed: int, arrays: str) -> None:
    """Divide images and labels by PFLlib's own functions, and write its files."""
    sys.path.insert(0, str(folder / "dataset"))
    from utils import dataset_utils  # type: ignore[import-not-found]

    random.seed(seed)
    np.random.seed(seed)
    held = np.load(arrays)
    some = np.random.permutation(len(held["y"]))[:IMAGES]
    x, y, _ = dataset_utils.separate_data(
        (held["x"][some], held["y"][some]), CLIENTS, CLASSES, True, split == "pat", split, 2
    )
    train, test = dataset_utils.split_data(x, y)
    place = folder / "dataset" / name_of(split, seed)
    for part, clients in (("train", train), ("test", test)):
        (place / part).mkdir(parents=True, exist_ok=True)
        for k, client in enumerate(clients):
            np.savez_compressed(place / part / f"{k}.npz", data=client)


def theirs(
    folder: Path, row: str, split: str, seed: int, rounds: int, complete: bool = False
) -> dict[str, float]:
    """Train a row by PFLlib; return its accuracy and the seconds of a round. `complete`: with the
    last batch of each epoch too.
    """
    import torch

    os.chdir(folder / "system")
    sys.path.insert(0, str(folder / "system"))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    from flcore.trainmodel.models import (  # type: ignore[import-not-found]
        BaseHeadSplit,
        FedAvgCNN,
    )

    if complete:
        from flcore.clients import clientbase  # type: ignore[import-not-found]

        loader = clientbase.DataLoader
        clientbase.DataLoader = lambda *given, **named: loader(
            *given, **named | {"drop_last": False}
        )
    home, settings, _, _ = ROWS[row]
    network = FedAvgCNN(in_features=1, num_classes=CLASSES, dim=1024)
    if row in SPLIT:
        head, network.fc = network.fc, torch.nn.Identity()
        network = BaseHeadSplit(network, head)
    defaults = {
        "device": "cpu",
        "model": network,
        "dataset": name_of(split, seed),
        "algorithm": row,
        "goal": "test",
        "save_folder_name": "items",
        "num_classes": CLASSES,
        "global_rounds": rounds,
        "num_clients": CLIENTS,
        "local_epochs": 1,
        "plocal_epochs": 1,
        "batch_size": BATCH,
        "local_learning_rate": LR,
        "learning_rate_decay_gamma": 0.99,
        "join_ratio": 1.0,
        "eval_gap": 1,
        "top_cnt": 100,
        "dlg_gap": 100,
        "batch_num_per_client": 2,
        "time_threthold": 1e4,
        "server_learning_rate": 1.0,
        "eta": 1.0,
        "rand_percent": 80,
        "layer_idx": 2,
        "times": 1,
    }
    off = "learning_rate_decay random_join_ratio few_shot time_select auto_break client_drop_rate"
    off += " train_slow_rate send_slow_rate dlg_eval num_new_clients fine_tuning_epoch_new"
    zero = dict.fromkeys(off.split(), 0)
    from importlib import import_module

    module, _, kind = home.partition(".")
    server = getattr(import_module(f"flcore.servers.{module}"), kind)(
        SimpleNamespace(**zero | defaults | dict(settings)), 0
    )
    if trained := row == "fedala":
        server.global_rounds -= 1  # it trains once more than it says, before its last evaluation
    server.save_results = server.save_global_model = lambda: None
    started = time.monotonic()
    server.train()
    scores = getattr(server, "rs_test_acc_per", None) or server.rs_test_acc
    if trained:
        _, images, right, *_ = server.test_metrics()
        scores = [sum(right) / sum(images)]
    spent = getattr(server, "Budget", None) or [(time.monotonic() - started) / rounds]
    return {"accuracy": 100 * float(scores[-1]), "seconds": float(np.median(spent[1:] or spent))}


# In ours


def read(folder: Path, split: str, seed: int) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return PFLlib's files: images (N, 1, 28, 28) fp32 and labels of each client and part."""
    place = folder / "dataset" / name_of(split, seed)
    parts: dict[str, dict[str, tuple[Any, Any]]] = {}
    for k in range(CLIENTS):
        client = parts.setdefault(f"client-{k:02}", {})
        for part in ("train", "test"):
            held = np.load(place / part / f"{k}.npz", allow_pickle=True)["data"].item()
            client[part] = np.asarray(held["x"], np.float32), np.asarray(held["y"], np.int64)
    return parts


def ours(
    folder: Path, row: str, split: str, seed: int, rounds: int, alike: bool = False
) -> dict[str, float]:
    """Train a row by coterie on PFLlib's files; return its accuracy and the seconds of a round.
    `alike`: clients' own parts start at the same values, as PFLlib's do.
    """
    import torch

    from coterie.data.examples import ExampleSplit
    from coterie.data.federation import ClientData, Federation
    from coterie.models.networks import Network, initial
    from coterie.runs.execution import Execution
    from coterie.runs.problems.classification import Classification
    from coterie.runs.problems.prepare import assembled
    from coterie.runs.recipes.recipe import load

    class CNN(Network):
        """PFLlib's network of its tables."""

        def __init__(self) -> None:
            super().__init__()
            nn = torch.nn
            layers = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5)]
            more = [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 512), nn.ReLU()]
            self.features = nn.Sequential(*layers, *more)
            self.head = nn.Linear(512, CLASSES)

    class Shape:
        """The network as coterie's models see it."""

        classes, title = CLASSES, "PFLlib's CNN"

        def build(self, device: Any = "cpu") -> Network:
            from coterie.core.roles import GENERALIST, tag

            network = CNN()
            tag(network, GENERALIST)
            network.load_state_dict(initial(network, 0), strict=False)
            return network.to(device)

        def initial(self, own: int) -> Any:
            return initial(CNN(), seed if alike else own)

        def check_inputs(self, x: Any) -> None:
            assert x.shape[1:] == (1, 28, 28)

        def example(self) -> Any:
            return torch.zeros(1, 1, 28, 28)

    class Measured(Classification):
        """Classifiers that are scored and not kept, as their network has no file format."""

        def keep(self, *_: Any) -> None:
            pass

    clients = {}
    for id, parts in read(folder, split, seed).items():
        splits = [
            ExampleSplit(
                name, *parts[part], np.arange(len(parts[part][1])), seed, (0.0,), (1.0,), CLASSES
            )
            for name, part in (("train", "train"), ("valid", "train"), ("test", "test"))
        ]
        clients[id] = ClientData(id, *splits)
    method = {"name": row, "rounds": rounds, "local_epochs": 1} | dict(ROWS[row][2])
    if row not in ("local", "scaffold"):  # theirs too means without weights
        method["aggregation"] = {"weighting": "samples"}
    recipe = load(
        "cobo-digits",
        [
            f"method={json.dumps(method)}",
            f"seed={seed}",
            f"training.batch_size={BATCH}",
            f'training.experts={{"optimiser": "sgd", "lr": {RATES.get(row, LR)}}}',
            "evaluate_every=1",
            "keep=last",
            "compare_with=[]",
        ],
    )
    shape: Any = Shape()
    section: Any = recipe.model
    federation = Federation(clients, "PFLlib's split")
    problem = Measured(shape, None, section, torch.device("cpu"), federation)
    with tempfile.TemporaryDirectory() as place:
        execution = Execution(assembled(recipe, problem), Path(place))
        started = time.monotonic()
        result = execution.execute()
        seconds = (time.monotonic() - started) / rounds
    which = ROWS[row][3]
    sizes = {i: clients[i].test.windows for i in clients}
    if which == "global":
        scores = {i: accuracy_of(execution, i) for i in clients}
    else:
        scores = {i: getattr(c, which) for i, c in result.clients.items()}
    accuracy = sum(scores[i] * sizes[i] for i in sizes) / sum(sizes.values())
    return {"accuracy": float(accuracy), "seconds": seconds}


def accuracy_of(execution: Any, client: str) -> float:
    """Return the accuracy of the server's model on a client's test images, in %."""
    mine = execution.state.prepared.site.client(client, {})
    with mine.borrowing(execution.state.server):
        _, count, right = mine.score(mine.test).tolist()
    return 100 * float(right) / float(count)


def arrays(place: Path) -> Path:
    """Write MNIST as PFLlib has it, all images together, and return the file."""
    from coterie.data.images import Mnist
    from coterie.data.store import default_cache

    held = Mnist(clients=2).images(default_cache())
    images = np.concatenate([held.train, held.test]).astype(np.float32) / 255
    labels = np.concatenate([held.train_labels, held.test_labels])
    np.savez(place / "mnist.npz", x=(images - 0.5) / 0.5, y=labels)
    return place / "mnist.npz"


def run(asked: argparse.Namespace) -> None:
    """Do what is not done yet, ours and theirs in turn."""
    path, folder = RESULTS / "pfllib.json", asked.folder.resolve()
    done: list[dict[str, Any]] = []
    if path.exists():
        done = json.loads(path.read_text(encoding="utf-8"))
    for seed in asked.seeds:
        for split in asked.splits:
            if not (folder / "dataset" / name_of(split, seed)).exists():
                with tempfile.TemporaryDirectory() as place:
                    here = str(arrays(Path(place)))
                    child(asked.python, "divide", str(folder), split, str(seed), here)
            for row in asked.rows:
                keys = {"row": row, "split": split, "seed": seed, "rounds": asked.rounds}
                line: dict[str, Any] = next(
                    (old for old in done if keys.items() <= old.items()), {}
                )
                whose = ["theirs", "ours", *asked.also]
                if not (missing := [who for who in whose if who not in line]):
                    continue
                words = (str(folder), row, split, str(seed), str(asked.rounds))
                found = {who: child(asked.python, who, *words) for who in missing}
                done = [old for old in done if old is not line] + [keys | line | found]
                print(done[-1], flush=True)
                lines = ",\n".join(json.dumps(line) for line in done)
                path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def child(python: str, *words: str) -> Any:
    """Return what one call of this file in a process of its own says last."""
    uses = sys.executable if words[0] in OURS else python
    command = [uses, __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1] if words[0] != "divide" else "null")


def table() -> str:
    """Return the page of results."""
    done = json.loads((RESULTS / "pfllib.json").read_text(encoding="utf-8"))
    rounds = sorted({line["rounds"] for line in done})
    parts = [
        "# Beside PFLlib\n\n4,000 images of MNIST divided by PFLlib among 20 clients, its CNN and "
        "settings, "
        f"{', '.join(map(str, rounds))} rounds; what is compared and how: "
        "[`benchmarks/pfllib.py`](../pfllib.py). Test accuracy in %, mean and deviation over "
        "seeds; seconds of a round with its evaluation, one thread, ours and theirs in turn. "
        "PFLlib leaves out the last batch of an epoch where it is not full (15 steps of a round "
        "where we take 16); what its code comes to with it stands beside that where it was run. "
        "It starts the heads of all clients at the same values; ours start at each client's own, "
        "as in the papers, and in the column 'started alike' as PFLlib's. FedBN is not among the "
        "rows: the network has no normalisation layers, so it would be FedAvg."
    ]
    for split, title in (("pat", "Two classes a client"), ("dir", "Dirichlet(0.1)")):
        lines = [line for line in done if line["split"] == split]
        heads = "row | seeds | theirs | with incomplete batches | ours | started alike"
        rows = [f"| {heads} | difference | seconds theirs | ours | times |"]
        rows += ["| --- |" + " ---: |" * 9]
        by_row = {row: [line for line in lines if line["row"] == row] for row in ROWS}
        rows += [f"| {row} | {len(of)} | {cells(of)} |" for row, of in by_row.items() if of]
        parts.append(f"## {title}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def cells(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the cells of one row."""
    accuracies, seconds = (
        {who: [line[who][what] for line in found if who in line] for who in WHO}
        for what in ("accuracy", "seconds")
    )
    of_each = [
        f"{mean(v):.2f}"
        + (f" ± {stdev(v):.2f}" if len(v) > 1 else "")
        + (f" (seeds: {len(v)})" if len(v) < len(found) else "")
        if v
        else ""
        for v in accuracies.values()
    ]
    difference = mean(accuracies["ours"]) - mean(accuracies["theirs"])
    a, b = (math.exp(mean(map(math.log, seconds[who]))) for who in ("theirs", "ours"))
    return " | ".join([*of_each, f"{difference:+.2f}", f"{a:.2f}", f"{b:.2f}", f"{a / b:.1f}"])


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "divide":
        divide(Path(words[0]), words[1], int(words[2]), words[3])
    elif what in WHO:
        mine = partial(ours, alike=what == "alike")
        train = mine if what in OURS else partial(theirs, complete=what == "complete")
        print(json.dumps(train(Path(words[0]), words[1], words[2], int(words[3]), int(words[4]))))
    elif what == "table":
        (RESULTS / "pfllib.md").write_text(table(), encoding="utf-8")
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("folder", type=Path)
        parser.add_argument("--python", default=sys.executable)
        parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
        parser.add_argument("--splits", nargs="+", default=["pat", "dir"])
        parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
        parser.add_argument("--rounds", type=int, default=30)
        parser.add_argument("--also", nargs="*", default=[], choices=["complete", "alike"])
        run(parser.parse_args(words))


if __name__ == "__main__":
    main()
