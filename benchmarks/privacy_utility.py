"""Quality against epsilon, where privacy is possible: of whole clients with a thousand of them, of
single examples with four.

    python benchmarks/privacy_utility.py clients [--seeds 0 1] [--runs DIR] [--results DIR]
    python benchmarks/privacy_utility.py examples [...]
    python benchmarks/privacy_utility.py digits [...]
    python benchmarks/privacy_utility.py step [--repeats 15] [...]

`clients`: a thousand clients with twelve handwritten digits each (a part of MNIST), one linear
layer, FedAvg with central noise in twenty exchanges; C was chosen on validation data, with a seed
of its own. `examples`: the recipe `quickstart`, CoMiGS-1G1S with DP-SGD of what is shared, its
settings as they are without privacy. `digits`: FedAvg with DP-SGD, twenty clients with some 540
digits each. `step`: what a private step costs. Each writes a table as JSON and Markdown; runs that
are in --runs already are not done again.
"""

import argparse
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import in_turns, ratios
from scipy import optimize

import coterie
from coterie.aggregation.accountant import epsilon_of, epsilon_of_gaussians
from coterie.aggregation.dpsgd import rate_of, rdp_of_steps
from coterie.client.client import Client
from coterie.core.files import read_json, write_json
from coterie.core.result import RESULT
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load, validate
from coterie.runs.run import run

Json = dict[str, Any]
EPSILONS = (8.0, 4.0, 2.0, 1.0)
DELTA, DELTA_OF_EXAMPLES = 1e-5, 1e-4  # well below one of 1,000 clients, and of 109 windows
CLIP, CLIP_OF_EXAMPLES = 1.0, 0.1
TRIED = (0.25, 1.0, 2.0, 4.0)  # C of clients, on validation data
OWN_SEED = 100  # with which C was chosen
THOUSAND: Json = {
    "name": "thousand",
    "data": {
        "kind": "mnist",
        "partition": "quantity",
        "clients": 1000,
        "classes_per_client": 4,
        "test_examples": 20,
    },
    "model": {"kind": "classifier", "network": "mlp", "hidden": []},
    "method": {"name": "fedavg", "rounds": 20, "local_steps": 5},
    "training": {"batch_size": 10, "experts": {"optimiser": "sgd", "lr": 0.1}},
    "metrics_every": 1000,
    "checkpoint_every": 1000,
}


DIGITS: Json = THOUSAND | {
    "name": "digits",
    "data": {
        "kind": "mnist",
        "partition": "dirichlet",
        "clients": 20,
        "alpha": 1.0,
        "test_examples": 300,
    },
    "training": {"batch_size": 128, "experts": {"optimiser": "sgd", "lr": 0.1}},
}


def multiplier(epsilon: float, of: Callable[[float], float]) -> float:
    """The noise multiplier, rounded up to two decimals, with which no more than so much is
    spent.
    """
    found = float(optimize.brentq(lambda z: min(of(z), 1e3) - epsilon, 0.25, 100))
    return -(-found * 100 // 1) / 100


def of_clients(rounds: int, z: float) -> float:
    return epsilon_of_gaussians([(rounds, 1.0, z)], DELTA)


def of_examples(rate: float, steps: int, z: float) -> float:
    return epsilon_of(0.0, rdp_of_steps(rate, z, steps), DELTA_OF_EXAMPLES)


def thousand(seed: int, *privacy: float, method: str = "fedavg") -> Recipe:
    """The recipe of a thousand clients; with C and z: central noise."""
    found = validate({**THOUSAND, "seed": seed}, "thousand").with_method(method)
    if not privacy:
        return found
    clip, z = privacy
    section = found.model_dump(mode="json") | {
        "privacy": {"where": "central", "clip": clip, "noise": z, "delta": DELTA}
    }
    return validate(section, "thousand")


def twenty(seed: int, z: float | None = None, method: str = "fedavg") -> Recipe:
    """The recipe of twenty clients; with z: private for each of their digits."""
    found = validate({**DIGITS, "seed": seed}, "digits").with_method(method)
    if z is None:
        return found
    private = {"unit": "example", "clip": CLIP, "noise": z, "delta": DELTA_OF_EXAMPLES}
    return validate(found.model_dump(mode="json") | {"privacy": private}, "digits")


def quickstart(seed: int, z: float | None = None, method: str = "comigs-1g1s") -> Recipe:
    """The quickstart; with z: private for each of its windows."""
    private = (
        []
        if z is None
        else [
            f"privacy={{unit: example, clip: {CLIP_OF_EXAMPLES}, noise: {z}, delta: "
            f"{DELTA_OF_EXAMPLES:.1e}}}"
        ]
    )
    return load(
        "quickstart", ["compare_with=[]", "samples=false", f"seed={seed}", *private]
    ).with_method(method)


def done(recipe: Recipe, folder: Path) -> Json:
    """The result of a run, which may have been done before."""
    torch.set_num_threads(1)
    result: Json = (
        read_json(folder / RESULT)
        if (folder / RESULT).exists()
        else run(recipe, folder, resume=folder.exists())[-1].to_json()
    )
    found = {
        "test": result["mean"],
        "synced": result["mean_synced"],
        "valid": result["evaluations"][-1]["valid"],
    }
    print(folder.name, found, flush=True)
    return found | {"privacy": result["privacy"], "wall_s": result["wall_s"]}


def mean(values: Sequence[float]) -> str:
    """Mean and, of several seeds, standard deviation."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(line)} |"
        for line in (header, ["---", *["---:"] * (len(header) - 1)], *rows)
    )


def rows(cells: Mapping[str, Sequence[Json]], noises: Mapping[str, float]) -> list[list[str]]:
    """A line for each condition: epsilon as it was counted, z, and the figures."""
    lines = []
    for name, found in cells.items():
        privacy = found[0]["privacy"]
        epsilon = "" if privacy is None else f"{privacy['epsilon']:.2f}"
        figures = [mean([own[key] for own in found]) for key in ("test", "synced", "valid")]
        lines.append([name, epsilon, f"{noises[name]:g}" if name in noises else "", *figures])
    return lines


def write(args: argparse.Namespace, stem: str, text: Sequence[str], figures: Json) -> None:
    versions = {
        "coterie": coterie.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    machine = f"{platform.machine()} machine, shared with other jobs, one thread a run"
    about = (
        f"    {args.command}\n\n{machine}; Python {versions['python']}, torch "
        f"{versions['torch']}, coterie {versions['coterie']}."
    )
    (args.results / f"{stem}.md").write_text(
        "\n\n".join([text[0], about, *text[1:]]) + "\n", encoding="utf-8"
    )
    write_json(
        args.results / f"{stem}.json",
        {"command": args.command, **versions, "machine": machine, **figures},
    )


def clients(args: argparse.Namespace) -> None:
    """Central noise on the updates of a thousand clients."""
    rounds = THOUSAND["method"]["rounds"]
    noises = {
        f"epsilon {epsilon:g}": multiplier(epsilon, partial(of_clients, rounds))
        for epsilon in EPSILONS
    }
    tried = {
        clip: done(
            thousand(OWN_SEED, clip, noises["epsilon 2"]), args.runs / f"clip-{clip:g}-{OWN_SEED}"
        )
        for clip in TRIED
    }
    recipes: dict[str, Callable[[int], Recipe]] = {
        "alone (Local)": partial(thousand, method="local"),
        "FedAvg, no privacy": thousand,
        **{name: lambda seed, z=z: thousand(seed, CLIP, z) for name, z in noises.items()},  # type: ignore[misc]
    }
    cells: dict[str, list[Json]] = {name: [] for name in recipes}
    for seed in args.seeds:
        for name, recipe in recipes.items():
            cells[name].append(
                done(recipe(seed), args.runs / f"clients-{name.replace(' ', '-')}-{seed}")
            )
    found = ", ".join(f"C = {clip:g}: {own['valid']:.2f}" for clip, own in tried.items())
    page = [
        "# What central privacy costs a thousand clients",
        "A part of MNIST, 12,000 digits: a thousand clients with twelve of them each, of four "
        "classes, one of which is for validation; 20 "
        f"test digits of their classes each. One linear layer, d = 7,850 values, all shared: "
        f"FedAvg, {rounds} exchanges with all clients, "
        f"five steps of ten digits. `where: central`, `clip: {CLIP:g}`, delta = {DELTA:g}. C is "
        f"the best of four by validation accuracy "
        f"at epsilon 2 with seed {OWN_SEED} ({found}); nothing else was tuned for noise, and "
        f"nothing on test data. Accuracy in percent, "
        f"mean over clients, seeds {', '.join(map(str, args.seeds))}, ± their standard "
        f"deviation. Higher is better. A client's model is "
        "scored right after its last local iteration; shared: after one more synchronisation, "
        "where it is the server's.",
        table(["", "epsilon", "z", "test accuracy", "shared", "validation"], rows(cells, noises)),
    ]
    write(
        args,
        "privacy-1000-clients",
        page,
        {"seeds": args.seeds, "clip": CLIP, "tried": tried, "cells": cells},
    )


def examples(args: argparse.Namespace) -> None:
    """DP-SGD of what the four clients of the quickstart share."""
    own = quickstart(0)
    windows = max(data.train.windows for data in prepare(own).problem.federation.clients.values())
    rate, steps = (
        rate_of(windows, own.training.batch_size),
        own.method["rounds"] * own.method["local_steps"],
    )
    noises = {
        f"epsilon {epsilon:g}": multiplier(epsilon, partial(of_examples, rate, steps))
        for epsilon in args.epsilons
    }
    recipes: dict[str, Callable[[int], Recipe]] = {
        "the base (Pretrained)": partial(quickstart, method="pretrained"),
        "alone (Local)": partial(quickstart, method="local"),
        "CoMiGS-1G1S, no privacy": quickstart,
        **{name: partial(quickstart, z=z) for name, z in noises.items()},
    }
    cells: dict[str, list[Json]] = {name: [] for name in recipes}
    for seed in args.seeds:
        for name, recipe in recipes.items():
            cells[name].append(
                done(recipe(seed), args.runs / f"examples-{name.replace(' ', '-')}-{seed}")
            )
    page = [
        "# What privacy of single windows costs four clients",
        f"Recipe `quickstart`, CoMiGS-1G1S with DP-SGD of what is shared (`unit: example`, "
        f"`clip: {CLIP_OF_EXAMPLES:g}`, delta = "
        f"{DELTA_OF_EXAMPLES:g}), {steps} steps of eight of {windows} windows on average; "
        f"specialists and routers learn as ever. The "
        f"recipe's learning rates, chosen without noise; nothing was tuned for it. Mean test "
        f"perplexity, lower is better, seeds "
        f"{', '.join(map(str, args.seeds))}. Each client's model right after its last local "
        f"iteration, or after one more synchronisation.",
        table(
            ["", "epsilon", "z", "test perplexity", "synchronised", "validation"],
            rows(cells, noises),
        ),
    ]
    write(
        args,
        "privacy-examples",
        page,
        {
            "seeds": args.seeds,
            "clip": CLIP_OF_EXAMPLES,
            "rate": rate,
            "steps": steps,
            "cells": cells,
        },
    )


def digits(args: argparse.Namespace) -> None:
    """DP-SGD of the digits of twenty clients, whose numbers differ: z is for the client that has
    least.
    """
    federation = prepare(twenty(0)).problem.federation
    sizes = [data.train.windows for data in federation.clients.values()]
    rate, steps = (
        rate_of(min(sizes), 128),
        DIGITS["method"]["rounds"] * DIGITS["method"]["local_steps"],
    )
    noises = {
        f"epsilon {epsilon:g}": multiplier(epsilon, partial(of_examples, rate, steps))
        for epsilon in args.epsilons
    }
    recipes: dict[str, Callable[[int], Recipe]] = {
        "alone (Local)": partial(twenty, method="local"),
        "FedAvg, no privacy": twenty,
        **{name: partial(twenty, z=z) for name, z in noises.items()},
    }
    cells: dict[str, list[Json]] = {name: [] for name in recipes}
    for seed in args.seeds:
        for name, recipe in recipes.items():
            cells[name].append(
                done(recipe(seed), args.runs / f"digits-{name.replace(' ', '-')}-{seed}")
            )
    page = [
        "# What privacy of single digits costs twenty clients",
        f"A part of MNIST, shared out to twenty clients by a Dirichlet distribution (alpha = 1): "
        f"{min(sizes)} to {max(sizes)} digits to "
        f"train on. One linear layer, FedAvg, {steps} steps of 128 digits on average, in twenty "
        f"exchanges; `unit: example`, "
        f"`clip: {CLIP:g}`, delta = {DELTA_OF_EXAMPLES:g}. Epsilon is that of the client that "
        f"has least, each of whose digits takes part "
        f"most often; nothing was tuned. Accuracy in percent, mean over clients, seeds "
        f"{', '.join(map(str, args.seeds))}, ± their standard "
        "deviation. Higher is better.",
        table(["", "epsilon", "z", "test accuracy", "shared", "validation"], rows(cells, noises)),
    ]
    write(
        args, "privacy-examples-digits", page, {"seeds": args.seeds, "clip": CLIP, "cells": cells}
    )


def step(args: argparse.Namespace) -> None:
    """Seconds of a step with and without privacy, within one process, taking turns."""
    torch.set_num_threads(1)
    found = {}
    for method in ("fedavg", "comigs-1g1s"):
        roles = (GENERALIST,) if method == "fedavg" else (GENERALIST, SPECIALIST)
        work: dict[str, Callable[[], object]] = {}
        for name, z in (("plain", None), ("private", 1.0)):
            prepared = prepare(quickstart(0, z, method))
            client = prepared.site.client(prepared.clients[0], {})
            client.total_iterations = 1000
            assert prepared.site.outbound is not None
            client.sanitizer = prepared.site.outbound.sanitizer(
                prepared.method, 10**9, 0, 0, client.id
            )
            work[name] = partial(_stepped, client, roles)
        found[method] = ratios(in_turns(work, args.repeats), "plain")
    lines = [
        [name, *(f"{own[kind]['seconds']:.3f}" for kind in own), f"{own['private']['ratio']:.2f}"]
        for name, own in found.items()
    ]
    page = [
        "# What a private step costs",
        f"The embedded base, batches of eight windows of 64 tokens, on average where they are "
        f"drawn; medians of {args.repeats} repeats "
        "that take turns, and the median of their ratios. With CoMiGS-1G1S the private step has "
        "two gradients: that of what is shared, "
        "example by example, and that of the specialists, at the whole model.",
        table(["method", "plain, s", "private, s", "ratio"], lines),
    ]
    write(args, "privacy-step", page, {"repeats": args.repeats, "cells": found})


def _stepped(client: Client, roles: Sequence[Any]) -> None:
    client.bind()
    client.step(*roles, on=client.train)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("clients", "examples", "digits", "step"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--epsilons",
        type=float,
        nargs="+",
        default=list(EPSILONS),
        help="of examples",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--runs", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    seeds, epsilons = (
        " ".join(map(str, args.seeds)),
        " ".join(f"{epsilon:g}" for epsilon in args.epsilons),
    )
    chosen = {"clients": f" --seeds {seeds}", "step": f" --repeats {args.repeats}"}.get(
        args.table, f" --seeds {seeds} --epsilons {epsilons}"
    )
    args.command = f"python benchmarks/privacy_utility.py {args.table}{chosen}"
    {
        "clients": clients,
        "examples": examples,
        "digits": digits,
        "step": step,
    }[args.table](args)


if __name__ == "__main__":
    main()
