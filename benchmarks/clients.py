"""What clients cost in one process with one backbone: the memory of one more, and rounds of ever
more of them within a bound of memory.

    python benchmarks/clients.py memory [--base embedded] [--few 8] [--many 72] [--json FILE]
    python benchmarks/clients.py scale [--base embedded] [--clients 4 32 100 316 1000] [--memory
    GIB] [--folder DIR] [--json FILE]

`memory`: the process's growth over many clients of CoMiGS-1G1S, which take one local round each (so
that parameters, moments and counters exist), against the tensors that a client must own. `scale`:
for each number of clients, in a process of its own, rounds of CoMiGS-1G1S with one step of each
client on `--rows` x `--context` tokens, without checkpoints; states beyond `--memory` lie in files
in `--folder`. `gpt2` is GPT-2 124M with random weights.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import machine, report, seconds

from coterie.client.blueprint import Blueprint
from coterie.client.settings import Training
from coterie.client.site import Site
from coterie.core.devices import peak_memory
from coterie.core.protocol import Ask, State, drive
from coterie.core.roles import GENERALIST
from coterie.core.tensors import nbytes
from coterie.data.federation import ClientData
from coterie.data.splits import TokenSplit
from coterie.engines.inprocess import InProcess
from coterie.methods.comigs import CoMiGS
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

GIB = 2**30


def resident(trim: bool) -> int:
    """Bytes of this process that are in memory; `trim`: without what is free but was not handed
    back to the system.
    """
    gc.collect()
    if trim:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def backbone_of(base: str) -> Backbone:
    """`gpt2`: GPT-2 124M with random weights."""
    if base != "gpt2":
        return Backbone.load(base)
    from transformers import GPT2Config, GPT2LMHeadModel

    return Backbone(GPT2LMHeadModel(GPT2Config()))


def engine_of(
    base: str,
    clients: int,
    method: CoMiGS,
    rows: int,
    context: int,
    memory: float | None,
    folder: Path | None,
) -> InProcess:
    """Clients of random tokens, the same for all.

    Args:
        base: Of the backbone.
        clients: That many.
        method: Theirs.
        rows: Of a batch.
        context: Tokens of a row.
        memory: GiB of states that stay in memory; None: all.
        folder: For files.
    """
    backbone = backbone_of(base)
    names = [f"client-{k:04d}" for k in range(clients)]
    tokens = (
        np.random.default_rng(0)
        .integers(0, backbone.architecture.vocabulary, 4096)
        .astype(np.uint16)
    )
    splits = [TokenSplit(name, tokens, context, 0) for name in ("train", "valid", "test")]
    layouts = dict.fromkeys(names, method.layout(0, Layout()))
    data = {i: ClientData(i, *splits) for i in names}
    site = Site(
        partial(LanguageModel, backbone),
        layouts,
        data,
        Training(batch_size=rows),
        0,
        method.total_iterations,
    )
    if memory is None:
        return InProcess(site, method)
    from coterie.engines.states import States

    return InProcess(site, method, kept=States(folder, memory * GIB))


def initial(engine: InProcess) -> State:
    """The server's first state."""
    model = next(engine.site.model(i) for i in engine.site.data)
    assert isinstance(model, LanguageModel)
    return Blueprint(partial(Adapter, model.backbone.architecture), engine.site.layouts, 0).read(
        GENERALIST
    )


def memory(args: argparse.Namespace) -> None:
    method = CoMiGS(rounds=1, local_steps=1, router_every=1, router_steps=1)
    engine = engine_of(args.base, args.many, method, 2, 32, None, None)
    names, shared = list(engine.site.data), initial(engine)

    def take_part(clients: list[str]) -> None:
        for i in clients:
            engine.answer(Ask(method.local_round, {i: shared}), 0, 0)

    take_part(names[: args.few])
    before = resident(trim=True)
    elapsed = seconds(lambda: take_part(names[args.few :]))
    untrimmed, marginal = (
        (resident(trim) - before) / (args.many - args.few) for trim in (False, True)
    )
    model = engine.site.model(names[0])
    own = nbytes(engine.states()[names[-1]])
    row = {
        "base": args.base,
        "clients": args.many,
        "trainable_parameters": sum(
            p.numel() for named in model.parameters_by_role.values() for p in named.values()
        ),
        "state_bytes": own,
        "marginal_bytes": round(marginal),
        "ratio": round(marginal / own, 3),
        "ratio_with_free_memory": round(untrimmed / own, 3),
        "seconds_per_client": round(elapsed / (args.many - args.few), 4),
    }
    report([row], args.json, aim=1.2)


def scale(args: argparse.Namespace) -> None:
    rows = []
    for clients in args.clients:
        one = vars(args) | {
            "clients": clients,
            "folder": None if args.folder is None else str(args.folder),
            "json": None,
        }
        del one["run"]
        done = subprocess.run(
            [sys.executable, __file__, "one", json.dumps(one)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows.append(json.loads(done.stdout))
        print(rows[-1], file=sys.stderr, flush=True)
    report(
        rows,
        args.json,
        base=args.base,
        rounds=args.rounds,
        batch=[args.rows, args.context],
        memory_gib=args.memory,
    )


def one(args: argparse.Namespace) -> None:
    """A row of `scale`, as JSON: this process is for it alone."""
    given = argparse.Namespace(**json.loads(args.settings))
    method = CoMiGS(rounds=given.rounds, local_steps=1, router_every=1, router_steps=0)
    engine = engine_of(
        given.base,
        given.clients,
        method,
        given.rows,
        given.context,
        given.memory,
        given.folder and Path(given.folder),
    )
    state, clients, alone = initial(engine), tuple(engine.site.data), peak_memory() or math.nan
    taken = []
    for t in range(method.rounds):

        def work(t: int = t) -> None:
            nonlocal state
            state = drive(
                method.round(state, clients, torch.Generator()),
                lambda ask, phase: engine.answer(ask, t, phase),
            )

        taken.append(seconds(work))
    states = engine.states()
    sizes = {
        i: size
        for i, size in engine.state_bytes().items()
        if given.memory is not None and states.entry(i) is not None
    }  # type: ignore[attr-defined]
    row = {
        "clients": given.clients,
        "seconds_per_client_and_round": statistics.median(taken[1:]) / given.clients,
        "seconds_per_client_in_the_first": taken[0] / given.clients,
        "peak_gib": (peak_memory() or math.nan) / GIB,
        "peak_gib_before_the_first": alone / GIB,
        "states_gib": sum(engine.state_bytes().values()) / GIB,
        "in_files_gib": sum(sizes.values()) / GIB,
        "clients_in_files": len(sizes),
        "replies_gib": given.clients * nbytes(state) / GIB,
        "threads": machine()["threads"],
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    marginal, more, inner = (commands.add_parser(name) for name in ("memory", "scale", "one"))
    marginal.set_defaults(run=memory)
    marginal.add_argument("--few", type=int, default=8, help="clients before what is counted")
    marginal.add_argument("--many", type=int, default=72, help="clients in all")
    more.set_defaults(run=scale)
    more.add_argument("--clients", type=int, nargs="+", default=[4, 32, 100, 316, 1000])
    more.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="the first one, in which states begin, counts by itself",
    )
    more.add_argument("--rows", type=int, default=1, help="of a batch")
    more.add_argument("--context", type=int, default=32, help="tokens of a row")
    more.add_argument(
        "--memory", type=float, help="GiB of states that stay in memory; default: all"
    )
    more.add_argument(
        "--folder", type=Path, help="for files; default: the system's for temporary ones"
    )
    for command in (marginal, more):
        command.add_argument(
            "--base",
            default="embedded",
            help="embedded, gpt2 (random weights), or a Hub id or folder",
        )
        command.add_argument("--json", type=Path)
    inner.set_defaults(run=one)
    inner.add_argument("settings")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
