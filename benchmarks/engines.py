"""What an engine costs beside the work: the same recipe as a bare training loop, in process, over
bytes, under simulation, and deployed.

    python benchmarks/engines.py [--clients 4 32 100] [--rounds 6] [--deployed 4] [--json FILE]

FedAvg on the embedded base, each client with a folder of text of its own. Every engine does all
that `coterie run` does: checks, metrics, checkpoints. The bare loop takes the same steps on the
same batches with nothing around them. Deployed means a SuperLink and SuperNodes on this machine
with TLS and keys, and a resident process each; `--deployed 0` leaves that out, `--without-resident`
those processes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import in_turns, ratios, report

from coterie.client.client import Client
from coterie.core.callback import Callback
from coterie.core.roles import GENERALIST
from coterie.deploy import server
from coterie.runs import run
from coterie.runs.backends import LocalBackend
from coterie.runs.execution import Execution
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe
from coterie.runs.recipes.recipe import Recipe

TEXTS = sorted(
    path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size > 30_000
)


def folders(root: Path, clients: int) -> Path:
    """A folder of text for each client: parts of the standard library."""
    for k in range(clients):
        folder = root / f"client-{k:03d}"
        folder.mkdir(parents=True)
        text = TEXTS[k % len(TEXTS)].read_text(encoding="utf-8", errors="replace")
        (folder / "text.txt").write_text(text[: 30_000 - 11 * (k // len(TEXTS))], encoding="utf-8")
    return root


def the_recipe(data: Path, rounds: int, engine: str, steps: int = 5, batch: int = 8) -> Recipe:
    return recipe.validate(
        {
            "name": "engines",
            "data": {"kind": "folders", "path": str(data), "valid_tokens": 200, "test_tokens": 200},
            "model": {"base": "embedded", "context": 64},
            "method": {"name": "fedavg", "rounds": rounds, "local_steps": steps},
            "training": {"batch_size": batch},
            "engine": engine,
            "samples": False,
        },
        "of the benchmark",
    )


class Stopwatch(Callback):
    """When each round ended."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def begin(self, *about: Any, **more: Any) -> None:
        self.ends = [time.perf_counter()]

    def round(self, done: int) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of each round but the first and the last, which has the scoring in it."""
        return [
            after - before for before, after in zip(self.ends[1:-2], self.ends[2:-1], strict=True)
        ]


def bare(chosen: Recipe) -> Callable[[], None]:
    """A loop that does one round of FedAvg on all clients, and nothing else."""
    prepared = prepare(chosen)
    site, experts = prepared.site, chosen.training.experts
    first = Client(
        "",
        site.model(prepared.clients[0]),
        site.data[prepared.clients[0]],
        chosen.training,
        {},
        0,
        1,
    )
    model, flat = first.model, first.state[f"parameters/{GENERALIST}"]
    parameters = list(model.parameters_by_role[GENERALIST].values())
    theta, memories, cursors = (
        flat.clone(),
        [dict[str, torch.Tensor]() for _ in prepared.clients],
        [0] * len(prepared.clients),
    )

    def one_round() -> None:
        nonlocal theta
        total = torch.zeros_like(theta)
        for k, i in enumerate(prepared.clients):
            flat.copy_(theta)
            for _ in range(prepared.method.local_steps):
                batch = site.data[i].train.batch(cursors[k], chosen.training.batch_size)
                cursors[k] += chosen.training.batch_size
                gradients, _ = model.gradient(batch, parameters)
                experts.step(
                    flat, torch.cat([g.flatten() for g in gradients]), experts.lr, memories[k], ""
                )
            total += flat
        theta = total / len(prepared.clients)

    return one_round


def beside_the_bare_loop(chosen: Recipe, folder: Path) -> dict[str, Any]:
    """Seconds of a round, bare and in process with all that a run does; rounds alternate, for
    the machine is never the same twice.
    """
    loop = bare(chosen)
    execution = Execution(prepare(chosen), folder, Callback(), "", LocalBackend("inprocess"))
    folder.mkdir(parents=True)
    with execution.running():
        loops = {"bare": loop, "inprocess": execution.one_round}
        found = ratios(in_turns(loops, chosen.method["rounds"] - 2), "bare")
    return {f"{name}_s": own["seconds"] for name, own in found.items()} | {
        "ratio": found["inprocess"]["ratio"]
    }


def whole(chosen: Recipe, folder: Path) -> dict[str, Any]:
    """Seconds of a round in a whole run, and bytes on the wire beside those of the tensors."""
    watch = Stopwatch()
    result = run.run(chosen, folder, reporter=watch)[-1].to_json()
    return {f"{chosen.engine}_s": statistics.median(watch.seconds)} | wire(folder, result)


def wire(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Bytes that Flower's messages had, and those of the tensors that the method shared, over
    all rounds.
    """
    newest = sorted((folder / "checkpoints").glob("round-*"))[-1]
    sent = (
        json.loads((newest / "checkpoint.json").read_text())["progress"]
        .get("engine", {})
        .get("traffic")
    )
    shared = sum(
        client[key] for client in result["clients"].values() for key in ("bytes_up", "bytes_down")
    )
    return (
        {}
        if sent is None
        else {"bytes": sum(sent), "tensor_bytes": shared, "bytes_ratio": sum(sent) / shared}
    )


def deployed(chosen: Recipe, folder: Path, resident: bool) -> dict[str, Any]:
    """The same of real devices on this machine. Rounds are timed by when their checkpoints were
    written.
    """
    clients = list(prepare(chosen).clients)
    server.demo(
        chosen, clients, folder, lambda line: print(f"  {line}", flush=True), resident=resident
    )
    before, after = (
        path.stat().st_mtime for path in sorted((folder / "checkpoints").glob("round-*"))
    )
    every = chosen.checkpoint_every
    return {"deployed_s": (after - before) / every} | wire(
        folder, json.loads((folder / "result.json").read_text())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 32, 100])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="local steps of a client in a round")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step")
    parser.add_argument(
        "--deployed", type=int, default=4, help="at most so many clients are deployed"
    )
    parser.add_argument("--without-resident", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in args.clients:
            root = Path(folder) / str(n)
            data = folders(root / "data", n)
            work = {"steps": args.steps, "batch": args.batch}
            row: dict[str, Any] = {"clients": n} | beside_the_bare_loop(
                the_recipe(data, args.rounds, "inprocess", **work), root / "pair"
            )
            for engine in ("loopback", "flower"):
                row |= whole(the_recipe(data, args.rounds, engine, **work), root / engine)
            row["deployed_s"] = None
            if n <= args.deployed:
                spread = recipe.changed(
                    the_recipe(data, args.rounds, "flower", **work),
                    {"checkpoint_every": args.rounds // 2},
                )
                row |= deployed(spread, root / "deployed", not args.without_resident)
            rows.append(row)
    report(rows, args.json, work=work, resident=not args.without_resident)


if __name__ == "__main__":
    main()
