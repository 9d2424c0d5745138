"""What all benchmarks share: the machine that figures are of, measures that take turns, and
results as JSON and as a table.
"""

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The hardware and the versions that figures are of."""
    import transformers

    found: dict[str, Any] = {"processor": _processor(), "threads": torch.get_num_threads()}
    if (kind := accelerator()) is not None:
        name = getattr(torch.get_device_module(kind), "get_device_name", lambda: kind)
        found["gpu"] = name()
    return found | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def accelerator() -> str | None:
    """The type of this machine's accelerator, as `cuda` or `xpu`; None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def synchronise() -> None:
    """Wait for the accelerator, where there is one."""
    if accelerator() is not None:
        torch.accelerator.synchronize()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.is_file()
        else []
    )
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long one call takes by a clock, until the accelerator is done where there is one."""
    synchronise()
    start = clock()
    work()
    synchronise()
    return clock() - start


def in_turns(
    work: Mapping[str, Callable[[], object]],
    repeats: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call in each repeat; nobody is always first, so that a noisy machine disturbs
    all alike.

    Args:
        work: What is measured, by name.
        repeats: That count.
        warm: Repeats before them.
        clock: In seconds.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for repeat in range(-warm, repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            elapsed = seconds(work[name], clock)
            if repeat >= 0:
                taken[name].append(elapsed)
    return taken


def ratios(taken: Mapping[str, Sequence[float]], reference: str) -> dict[str, dict[str, float]]:
    """Of each: `seconds`, the median; `ratio`, the median of the ratios within each repeat;
    `best_ratio`, of the fastest repeats.
    """
    return {
        name: {
            "seconds": statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, taken[reference], strict=True)),
            "best_ratio": min(own) / min(taken[reference]),
        }
        for name, own in taken.items()
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, with the columns of the first one."""
    columns = list(rows[0])
    lines = [
        columns,
        ["---"] + ["---:"] * (len(columns) - 1),
        *([_cell(row.get(column)) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def report(rows: Sequence[Mapping[str, Any]], path: Path | None, **about: Any) -> None:
    """Print the rows as a table and, with a path, write them as JSON with the command and the
    machine.

    Args:
        rows: All with the same keys.
        path: Of the JSON.
        about: What else the JSON says.
    """
    print(table(rows), flush=True)
    if path is not None:
        command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {"command": command, "machine": machine(), **about, "rows": list(rows)}, indent=2
            )
            + "\n"
        )
