"""What the shared part gives away, by protection: exposure of canaries, membership, rare words, for
FedAvg and CoMiGS-1G1S.

python benchmarks/privacy_audit.py [--seeds 0 1] [--runs DIR] [--done]

Four topics of Python's standard library on the embedded base; runs that are there already are not
done again.
"""

import argparse
import json
import platform
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine

import coterie
from coterie.audit import Settings, audit
from coterie.core.errors import ClientError
from coterie.core.files import read_json, write_json
from coterie.core.result import RESULT, Result
from coterie.core.result.audit import AuditResult, Estimate
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run

Json = dict[str, Any]
METHODS = {"fedavg": "FedAvg", "comigs-1g1s": "CoMiGS-1G1S"}
CLIP, CLIP_OF_WINDOWS, DELTA = 2.0, 0.1, 1e-5
SETTINGS = (
    "compare_with=[]",
    "samples=false",
    "checkpoint_every=3",
    "data.train_tokens=8000",
    "data.valid_tokens=1200",
    "data.test_tokens=2400",
    "model.context=32",
    "method.rounds=3",
    "method.local_steps=10",
    "training.batch_size=8",
    "audit={canaries: 24, repeats: 4, references: 64, exchanges: 3}",
)


def private(where: str, noise: float) -> str:
    return f"privacy={{where: {where}, clip: {CLIP}, noise: {noise}, delta: {DELTA:.0e}}}"


def of_windows(noise: float) -> str:
    return f"privacy={{unit: example, clip: {CLIP_OF_WINDOWS}, noise: {noise}, delta: {DELTA:.0e}}}"


# by name: what is set, and whether the server sees sums alone
ROWS: dict[str, tuple[list[str], bool]] = {
    "plain": ([], False),
    "secure aggregation": ([], True),
    "clipped": ([private("central", 0.0)], False),
    "central, z = 0.01": ([private("central", 0.01)], False),
    "central, z = 1": ([private("central", 1.0)], False),
    "local, z = 0.01": ([private("local", 0.01)], False),
    "local, z = 2": ([private("local", 2.0)], False),
    "single windows, z = 0.5": ([of_windows(0.5)], False),
    "single windows, z = 1": ([of_windows(1.0)], False),
}


@dataclass(frozen=True)
class Audited:
    """A run, its audit, and the seconds of processor time that both took."""

    result: Result
    audit: AuditResult
    cpu_s: float


def one(
    folder: Path, method: str, seed: int, changes: Sequence[str], secure: bool
) -> Audited | str:
    """One run and its audit, which may have been done before; what went wrong in a run that
    failed.
    """
    name = "audited-secure.json" if secure else "audited.json"
    begun = time.process_time()
    recipe = load("quickstart", [*SETTINGS, f"method.name={method}", *changes, f"seed={seed}"])
    try:
        result = (
            Result.read(folder)
            if (folder / RESULT).exists()
            else run(recipe, folder, resume=folder.exists())[-1]
        )
    except ClientError as error:
        return error.problem
    if not (folder / name).exists():
        settings = Settings(windows=36, words=1 if secure else 8, secure=secure)
        found = audit(folder, settings).to_json()
        write_json(folder / name, found | {"cpu_s": time.process_time() - begun})
    known = read_json(folder / name)
    return Audited(result, AuditResult.from_json(known), known.get("cpu_s", 0.0))


def row(method: str, name: str, found: Sequence[Audited | str]) -> Json:
    """Means over seeds; intervals are the means of those of the seeds."""
    done = [each for each in found if isinstance(each, Audited)]
    line: Json = {
        "method": method,
        "row": name,
        "seeds": len(done),
        "failed": [each for each in found if isinstance(each, str)],
    }
    if not done:
        return line
    audits = [each.audit for each in done]
    spent = done[0].result.privacy
    line["epsilon"] = None if spent is None else spent.epsilon
    line["private"] = spent is not None
    line["perplexity"] = statistics.fmean(each.result.mean for each in done)
    losses = [each.result.mean_loss for each in done]
    line["loss"] = statistics.fmean(loss for loss in losses if loss is not None)
    for observer in ("server", "others"):
        own = [found.observers[observer] for found in audits]
        canaries = [o.canaries for o in own if o.canaries]
        line[observer] = {
            "exposure": averaged([c.exposure for c in canaries]),
            "canaries": averaged([c.auc for c in canaries]),
            "epsilon": [c.epsilon.at_least for c in canaries],
            "membership": averaged([o.membership.auc for o in own]),
            "tpr": averaged([o.membership.tpr for o in own]),
            "min_k": averaged([o.min_k and o.min_k.auc for o in own]),
        }
    line["chance"] = canaries[0].exposure.chance
    words = [found.words for found in audits if found.words]
    line["shift"] = averaged([found.shift.auc for found in audits])
    line["words_others"] = averaged([w.others for w in words])
    line["words_shared"] = averaged([w.shared for w in words])
    line["words_owner"] = averaged([w.owner for w in words])
    line["words_control"] = averaged([w.control for w in words])
    line["words"] = [w.words for w in words]
    line["cpu_s"] = sum(each.cpu_s for each in done)
    return line


def averaged(values: Sequence[Estimate | None]) -> Json | None:
    """The mean of some estimates, and of the ends of their intervals; None where one is not
    there.
    """
    known = [v for v in values if v is not None]
    return (
        {key: statistics.fmean(getattr(v, key) for v in known) for key in ("value", "low", "high")}
        if len(known) == len(values)
        else None
    )


def shown(value: Json | None, digits: int = 2, factor: float = 1) -> str:
    if value is None:
        return ""
    middle, low, high = (f"{factor * value[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{middle} ({low}-{high})"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(
        f"| {' | '.join(line)} |"
        for line in (header, ["---", *["---:"] * (len(header) - 1)], *lines)
    )


def epsilon(line: Json) -> str:
    if not line.get("private"):
        return ""
    return "infinite" if line["epsilon"] is None else f"{line['epsilon']:.1f}"


def tables(lines: Sequence[Json]) -> list[str]:
    """The page's tables: what each observer can tell, and rare words."""
    parts = []
    for key, who in (("server", "the server"), ("others", "another client")):
        parts.append(f"## What {who} can tell")
        header = [
            "",
            "seeds",
            "epsilon claimed",
            "epsilon is at least, by seed",
            "exposure, bits",
            "canaries, AUC",
            "windows, AUC",
            "windows, TPR at 1 % FPR",
            "Min-K%++, AUC",
        ]
        body = [
            [
                f"{METHODS[line['method']]}, {line['row']}",
                str(line["seeds"]),
                epsilon(line),
                ", ".join(f"{e:.2f}" for e in line[key]["epsilon"]),
                *(shown(line[key][name]) for name in ("exposure", "canaries", "membership")),
                shown(line[key]["tpr"], 1, 100),
                shown(line[key]["min_k"]),
            ]
            for line in lines
            if "server" in line
        ]
        parts.append(table(header, body))
    parts.append("## Rare words among the first three suggestions, %, and what protection costs")
    header = [
        "",
        "other clients' models",
        "shared part alone",
        "own model",
        "others, words nobody trained on",
        "test perplexity",
        "test loss, nats",
    ]
    body = [
        [
            f"{METHODS[line['method']]}, {line['row']}",
            *(
                shown(line[f"words_{name}"], 1, 100)
                for name in ("others", "shared", "owner", "control")
            ),
            f"{line['perplexity']:,.1f}",
            f"{line['loss']:.3f}",
        ]
        for line in lines
        if "server" in line
        and not ROWS[line["row"]][1]  # others see the same, however the server sees it
    ]
    return [*parts, table(header, body)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", type=Path, default=Path("runs/privacy-audit"))
    parser.add_argument(
        "--done", action="store_true", help="show what has been measured so far, and run nothing"
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, found = time.time(), dict[tuple[str, str], list[Audited | str]]()
    for seed in args.seeds:
        for name in args.rows:
            for method in METHODS:
                changes, secure = ROWS[name]
                secured = "audited-secure.json" if secure else "audited.json"
                folder = (
                    args.runs / f"{method}-{'plain' if secure else name.replace(' ', '')}-{seed}"
                )
                if args.done and not (folder / secured).exists():
                    continue
                found.setdefault((method, name), []).append(
                    one(folder, method, seed, changes, secure)
                )
                print(f"{time.time() - began:.0f} s", seed, name, method, flush=True)
    lines = [row(method, name, some) for (method, name), some in found.items()]
    lines.sort(key=lambda line: list(METHODS).index(line["method"]))
    command = f"python benchmarks/privacy_audit.py --seeds {' '.join(map(str, args.seeds))}"
    command += "" if args.rows == list(ROWS) else f" --rows {shlex.join(args.rows)}"
    hours = sum(line.get("cpu_s", 0.0) for line in lines) / 3600
    about = {
        "command": command,
        "seeds": args.seeds,
        "settings": SETTINGS,
        "cpu_hours": hours,
        "coterie": coterie.__version__,
    }
    write_json(args.results / "privacy-audit.json", about | {"machine": machine(), "rows": lines})
    text = "\n\n".join(
        [
            "# What the shared part gives away, by protection",
            f"    {command}",
            f"{platform.machine()}, one thread, {hours:.1f} hours of processor time in all; "
            f"Python {platform.python_version()}, torch "
            f"{torch.__version__}, coterie {coterie.__version__}. Recipe `quickstart` (four "
            f"topics of Python's standard library, embedded "
            "base) with "
            + ", ".join(f"`{s}`" for s in SETTINGS)
            + ". Means over seeds; in brackets the means of the seeds' 95 % intervals.",
            *notes(lines),
            *tables(lines),
        ]
    )
    (args.results / "privacy-audit.md").write_text(text + "\n", encoding="utf-8")
    print(json.dumps({"hours": hours}))


def notes(lines: Sequence[Json]) -> list[str]:
    """What is needed to read the tables."""
    line = next(line for line in lines if "server" in line)
    return [
        f"Noise: clip C = {CLIP}, all four clients in all three exchanges, delta = {DELTA:g}; "
        f"epsilon claimed: the accountant's. Guessing "
        f"has an exposure of {line['chance']:.2f} bits and an AUC of 0.50. What the data alone "
        f"tell of membership (the base, which was "
        f"trained on neither): AUC {shown(line['shift'])}. `secure aggregation`: the same runs "
        f"as `plain`, seen by a server that gets the "
        "mean alone.",
    ]


if __name__ == "__main__":
    main()
