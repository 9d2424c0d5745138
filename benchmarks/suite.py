"""All benchmarks of speed and scale in a row, each in a process of its own, and one table of what
was aimed at.

    python benchmarks/suite.py [--quick] [--only NAME ...] [--table] [--folder benchmarks/results]

`--quick`: so short that figures mean nothing, to see whether all run; goes to a temporary folder.
`--only`: those whose results' names begin so. `--table`: nothing runs, the table is of the JSONs
that are there. What needs an accelerator is left out where there is none. A figure that no JSON has
is said not to be measured; one benchmark that fails stops no other, but the command ends with 1.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, accelerator, table

Rows = Sequence[Mapping[str, Any]]
# the folder with results of the same benchmarks on an older tree: PYTHONPATH=OLDER/src python
# benchmarks/...
BEFORE = "before"


@dataclass(frozen=True)
class Benchmark:
    """A command whose results go to NAME.json.

    Args:
        name: Of the results.
        command: The script in this folder, and its arguments.
        quick: What is added for a smoke run: of an option given twice the last one counts.
        gpu: Whether it needs an accelerator: the one that this machine has.
    """

    name: str
    command: str
    quick: str = ""
    gpu: bool = False


DEVICE = accelerator() or "cuda"
GPU = f"--device {DEVICE} --dtype bf16"
BENCHMARKS = (
    Benchmark("startup", "startup.py", "--repeats 1"),
    Benchmark(
        "local_step_embedded_cpu_1",
        "local_step.py --shape embedded --threads 1",
        "--repeats 1 --rows 1 --blocks 1",
    ),
    Benchmark(
        "local_step_embedded_cpu_2",
        "local_step.py --shape embedded --threads 2",
        "--repeats 1 --rows 1 --blocks 1",
    ),
    Benchmark(
        "local_step_gpt2_cpu_1",
        "local_step.py --shape gpt2 --threads 1 --repeats 5",
        "--repeats 1 --rows 1 --blocks 1",
    ),
    Benchmark(
        "local_step_gpt2_cpu_2",
        "local_step.py --shape gpt2 --threads 2",
        "--repeats 1 --rows 1 --blocks 1",
    ),
    Benchmark(
        "local_step_llama1b_cpu_2",
        "local_step.py --shape llama1b --threads 2 --repeats 5",
        "--repeats 1 --blocks 1",
    ),
    Benchmark(
        "local_step_smollm2_cpu_2",
        "local_step.py --shape smollm2 --blocks 30 --threads 2 --repeats 3",
        "--repeats 1 --rows 1 --blocks 1",
    ),
    Benchmark(
        "local_step_embedded_gpu_1",
        f"local_step.py --shape embedded {GPU}",
        "--repeats 1",
        gpu=True,
    ),
    Benchmark(
        "local_step_gpt2_gpu_1",
        f"local_step.py --shape gpt2 {GPU} --rows 16",
        "--repeats 1",
        gpu=True,
    ),
    Benchmark(
        "local_step_llama1b_gpu_1",
        f"local_step.py --shape llama1b {GPU} --rows 16 --blocks 16",
        "--repeats 1",
        gpu=True,
    ),
    Benchmark(
        "local_step_smollm2_gpu_1",
        f"local_step.py --shape smollm2 --blocks 30 {GPU} --repeats 5",
        "--repeats 1 --rows 1 --blocks 1",
        gpu=True,
    ),
    Benchmark("head", "head.py", "--repeats 1 --tokens 64 --words 4096"),
    Benchmark("clients", "clients.py memory --base gpt2", "--base embedded --few 2 --many 4"),
    Benchmark(
        "clients_scale",
        "clients.py scale --base gpt2 --memory 8",
        "--base embedded --clients 4 8 --rounds 2",
    ),
    Benchmark(
        "engines_overhead",
        "engines.py --clients 4 32 --deployed 0",
        "--clients 2 --rounds 4 --steps 1 --batch 2",
    ),
    Benchmark("cobo_pull", "cobo.py pull"),
    Benchmark(
        "cobo_speed", "cobo.py speed --network mlp cnn", "--clients 4 --repeats 1 --network mlp"
    ),
    Benchmark(
        "cobo_resnet9",
        "cobo.py speed --network resnet9 --clients 8 80 --batch 8 --repeats 3",
        "--clients 4 --repeats 1 --width 4",
    ),
    Benchmark(
        "cobo_resnet9_gpu",
        f"cobo.py speed --network resnet9 --clients 8 80 --batch 8 --device {DEVICE}",
        "--repeats 1",
        gpu=True,
    ),
    Benchmark("cobo_memory", "cobo.py memory --network resnet9 --clients 80", "--clients 2"),
    Benchmark("at_once", "at_once.py", "--repeats 1 --steps 1 --work comigs digits"),
    Benchmark("ddome", "ddome.py", "--repeats 1 --data digits"),
    Benchmark("ddome_gpu", f"ddome.py --device {DEVICE}", "--repeats 1 --data digits", gpu=True),
    Benchmark("next_token", "next_token.py", "--repeats 1 --shape embedded"),
    Benchmark(
        "two_parts",
        "next_token.py --parts --shape embedded gpt2 smollm2",
        "--repeats 1 --shape embedded",
    ),
    Benchmark("many_models", "next_token.py --many 64", "--repeats 1 --shape embedded --many 4"),
    Benchmark("serving", "serving.py", "--requests 4 --rows 2 --repeats 1"),
)


def all_of(rows: Rows, key: str, **where: Any) -> list[float]:
    """The figures under `key` of the rows that have these values. Raises LookupError where there
    is none.
    """
    found = [float(row[key]) for row in rows if where.items() <= row.items()]
    if not found:
        raise LookupError(where)
    return found


def of(key: str, **where: Any) -> Callable[[Rows], float]:
    """The figure under `key` of the first row that has these values."""
    return lambda rows: all_of(rows, key, **where)[0]


def least(key: str, **where: Any) -> Callable[[Rows], float]:
    """The least one of all rows that have these values."""
    return lambda rows: min(all_of(rows, key, **where))


def growth(rows: Rows) -> float:
    """The exponent g of seconds per round ~ N^g, by least squares over all numbers of clients N:
    1 where cost is linear.
    """
    clients = [math.log(n) for n in all_of(rows, "clients")]
    rounds = [
        math.log(s) + n
        for s, n in zip(all_of(rows, "seconds_per_client_and_round"), clients, strict=True)
    ]
    return statistics.linear_regression(clients, rounds).slope


def against_peft(rows: Rows) -> float:
    """The time of PEFT's step in that of 1G1S in bf16, at equal active rank."""
    return 1 / of("ratio", work="step", variant="1G1S, bf16")(rows)


@dataclass(frozen=True)
class Aim:
    """What was aimed at.

    Args:
        what: In words, with the unit.
        file: Name of the results that tell.
        value: The figure, of the results' rows.
        most: It may be.
        least: It must be.
    """

    what: str
    file: str
    value: Callable[[Rows], float]
    most: float | None = None
    least: float | None = None

    def row(self, folder: Path) -> dict[str, str]:
        """Its line in the table."""
        wanted = f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"
        before, found = (self._of(path / f"{self.file}.json") for path in (folder / BEFORE, folder))
        met = (
            found is not None
            and (self.most is None or found <= self.most)
            and (self.least is None or found >= self.least)
        )
        return {
            "aim": self.what,
            "wanted": wanted,
            "before": "" if before is None else f"{before:.3g}",
            "measured": "not measured" if found is None else f"{found:.3g}",
            "": "" if found is None else "met" if met else "MISSED",
            "from": f"{self.file}.json",
        }

    def _of(self, path: Path) -> float | None:
        """The figure that some results have; None where nobody measured it, or long ago."""
        try:
            return self.value(json.loads(path.read_text())["rows"])
        except (OSError, ValueError, LookupError, TypeError):
            return None


def over(key: str, work: str, above: str, below: str) -> Callable[[Rows], float]:
    """One variant of a local step over another."""
    return lambda rows: (
        of(key, work=work, variant=above)(rows) / of(key, work=work, variant=below)(rows)
    )


def _local_step(machine: str, words: str) -> list[Aim]:
    """Of the gradient of a local step: against a single LoRA of equal active rank, and against
    the naive formula.
    """
    single, (two, four) = "single LoRA, rank 16", ("1G1S", "1G3S, top 4")
    kinds: dict[str, tuple[Callable[[Rows], float], dict[str, float]]] = {
        "1G1S / single LoRA, time": (over("seconds", "step", "1G1S", single), {"most": 1.10}),
        "1G7S top 2 / single LoRA, time": (
            over("seconds", "step", "1G7S, top 2", single),
            {"most": 1.25},
        ),
        "1G1S / single LoRA, peak memory": (
            over("peak_mb", "step", "1G1S", single),
            {"most": 1.15},
        ),
        "1G7S top 2 / single LoRA, peak memory": (
            over("peak_mb", "step", "1G7S, top 2", single),
            {"most": 1.15},
        ),
        "naive / ours, n = 2, time of the MLP with its experts": (
            over("seconds", "layer", f"{two}, naive formula", two),
            {"least": 1.7},
        ),
        "naive / ours, n = 4, time of the MLP with its experts": (
            over("seconds", "layer", f"{four}, naive formula", four),
            {"least": 2},
        ),
        "naive / ours, n = 2, time of the whole step": (
            over("seconds", "step", f"{two}, naive formula", two),
            {"least": 1.7},
        ),
        "naive / ours, n = 4, time of the whole step": (
            over("seconds", "step", f"{four}, naive formula", four),
            {"least": 2},
        ),
        "naive / ours, n = 2, memory kept": (
            over("kept_mb", "step", f"{two}, naive formula", two),
            {"least": 2},
        ),
    }
    return [
        Aim(f"{shape}, {words}: {what}", f"local_step_{shape}_{machine}", value, **limits)
        for shape in ("embedded", "gpt2", "llama1b")
        if any(benchmark.name == f"local_step_{shape}_{machine}" for benchmark in BENCHMARKS)
        for what, (value, limits) in kinds.items()
    ]


AIMS = (
    *_local_step("cpu_1", "one thread"),
    *_local_step("cpu_2", "two threads"),
    *_local_step("gpu_1", "GPU, bf16"),
    Aim(
        "SmolLM2-135M, two threads: step of PEFT (rank 16, fp32) / of 1G1S in bf16",
        "local_step_smollm2_cpu_2",
        against_peft,
        least=1.8,
    ),
    Aim(
        "SmolLM2-135M, GPU, bf16: step of 1G1S / of PEFT (rank 16)",
        "local_step_smollm2_gpu_1",
        over("seconds", "step", "1G1S, bf16", "PEFT, rank 16, bf16"),
        most=1.1,
    ),
    Aim(
        "output head of GPT-2, 1,024 tokens: loss and gradient / their matrix products alone",
        "head",
        of("ratio", variant="words in blocks"),
        most=1.15,
    ),
    Aim("memory of one more GPT-2 client / its own tensors", "clients", of("ratio"), most=1.2),
    Aim("1,000 GPT-2 clients: peak, GiB", "clients_scale", of("peak_gib", clients=1000), most=24),
    Aim(
        "g of seconds per round ~ N^g, up to 1,000 GPT-2 clients",
        "clients_scale",
        growth,
        most=1.05,
    ),
    Aim(
        "a round in process / a bare loop, 4 clients",
        "engines_overhead",
        of("ratio", clients=4),
        most=1.03,
    ),
    Aim(
        "bytes on the wire / of the tensors, 4 clients",
        "engines_overhead",
        of("bytes_ratio", clients=4),
        most=1.05,
    ),
    Aim(
        "CoBo, 80 ResNet-9, GPU: a round one by one / as chosen",
        "cobo_resnet9_gpu",
        of("chosen x", clients=80, part="round"),
        least=5,
    ),
    Aim(
        "CoBo, ResNet-9, CPU: one by one / as chosen, slowest part",
        "cobo_resnet9",
        least("chosen x"),
        least=0.95,
    ),
    Aim(
        "CoBo, MLP and CNN, CPU: one by one / as chosen, slowest part",
        "cobo_speed",
        least("chosen x"),
        least=0.95,
    ),
    *(
        Aim(
            f"two clients at once / one by one, {words}, a round",
            "at_once",
            of("x", work=work),
            least=least_ratio,
        )
        for work, words, least_ratio in (
            ("comigs", "CoMiGS-1G1S on the embedded base", 1.7),
            ("fedavg", "FedAvg on the embedded base", 1.7),
            ("cobo", "CoBo with ResNet-9", 1.5),
            ("ddome", "DDOME with ResNet-20", 1.5),
        )
    ),
    *(
        Aim(
            f"next token of a personal model / the base, {shape}, {variant}",
            "next_token",
            of("ratio", shape=shape, work="next token", variant=variant),
            most=1.10,
        )
        for shape in ("embedded", "gpt2")
        for variant in ("1G1S", "1G3S, top 2")
    ),
    *(
        Aim(
            f"{work} of two models, mixed / of one, {shape}",
            "two_parts",
            of("ratio", shape=shape, work=work, variant="two, mixed"),
            most=most,
        )
        for shape in ("embedded", "gpt2", "smollm2")
        for work, most in (("next token", 1.6), ("first token", 1.8))
    ),
    *(
        Aim(
            f"64 personal models in one batch / the base, {shape}, {work}, throughput",
            "many_models",
            least("throughput", shape=shape, work=work, variant="in one batch"),
            least=0.7,
        )
        for shape in ("embedded", "gpt2")
        for work in ("next token", "prefill")
    ),
    Aim(
        "requests of 32 clients in one running batch / to one model, throughput",
        "serving",
        of("throughput", shape="embedded", requests="of many clients"),
        least=0.7,
    ),
    Aim(
        "requests of 32 clients in one running batch / one after the other, throughput",
        "serving",
        lambda rows: (
            of("throughput", shape="embedded", requests="of many clients")(rows)
            / of("throughput", shape="embedded", requests="of many clients, one after the other")(
                rows
            )
        ),
        least=3,
    ),
    Aim("coterie --help, s", "startup", of("seconds", what="coterie --help"), most=0.5),
)


def measure(benchmarks: Sequence[Benchmark], folder: Path, quick: bool) -> list[str]:
    """Run them one after the other; returns the names of those that failed."""
    failed = []
    for benchmark in benchmarks:
        script, *words = f"{benchmark.command} {benchmark.quick if quick else ''}".split()
        command = [
            sys.executable,
            str(Path(__file__).parent / script),
            *words,
            "--json",
            str(folder / f"{benchmark.name}.json"),
        ]
        print(f"\n## {benchmark.name}: {script} {' '.join(words)}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(benchmark.name)
    return failed


def origins(folder: Path) -> list[dict[str, str]]:
    """Which command each result is by, and on what."""
    found = []
    for benchmark in BENCHMARKS:
        path = folder / f"{benchmark.name}.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        if "rows" in known and "command" in known:
            machine = ", ".join(
                f"{value} thread{'s' * (value > 1)}" if name == "threads" else _named(name, value)
                for name, value in known["machine"].items()
            )
            found.append(
                {"file": path.name, "command": f"`{_short(known['command'])}`", "machine": machine}
            )
    return found


def _named(name: str, value: Any) -> str:
    return str(value) if name in ("processor", "gpu") else f"{name} {value}"


def _short(command: str) -> str:
    """Without where the results went."""
    return command.partition(" --json")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = (args.folder or (Path(tempfile.mkdtemp()) if args.quick else RESULTS)).resolve()
    chosen = [
        b
        for b in BENCHMARKS
        if b.name.startswith(tuple(args.only)) and (accelerator() is not None or not b.gpu)
    ]
    failed = [] if args.table else measure(chosen, folder, args.quick)
    lines = [
        "# Speed and scale: what was aimed at",
        "",
        table([aim.row(folder) for aim in AIMS]),
        "",
    ]
    if found := origins(folder):
        lines += [
            "Each figure is by one command; machines are noisy, and of time only ratios within "
            "one process mean much.",
            f"`{BEFORE}/` is of the tree before these benchmarks were first made (commit "
            f"587c9ee), by the same commands.",
            "",
            table(found),
            "",
        ]
    (folder / "suite.md").write_text("\n".join(lines))
    print("\n" + "\n".join(lines))
    print(f"Written to {folder}/suite.md")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
