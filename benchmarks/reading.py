"""How long it takes to read a table of 100 MB, and how much memory: rows of JSON lines and CSV.

    python benchmarks/reading.py [--before TREE/src] [--megabytes 100] [--json FILE]

Every reading is a process of its own, so that its peak is its own; `floor` is the same process
without reading. TREE is another checkout, which is read with in turns, such as
`git worktree add TREE 896921a` of before the readers were strict.
"""

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from common import RESULTS, report

SRC = Path(__file__).parent.parent / "src"
WORDS = ["the", "gate", "was", "left", "open", "all", "night,", "said", "ann;", "fine."]


def rows(megabytes: int) -> Iterator[dict[str, str]]:
    """Rows of about a kilobyte, of a hundred clients."""
    for number in range(megabytes * 1000):
        start = number % len(WORDS)
        text = " ".join((*WORDS[start:], *WORDS * 18))
        yield {"client": f"{number % 100:03}", "text": f'{number} "{text}"\n{text[:20]}'}


def write(folder: Path, megabytes: int) -> list[Path]:
    """The same rows as JSON lines and as CSV."""
    paths = [folder / f"table.{form}" for form in ("jsonl", "csv")]
    with paths[0].open("w") as lines, paths[1].open("w", newline="") as table:
        writer = csv.DictWriter(table, ["client", "text"])
        writer.writeheader()
        for row in rows(megabytes):
            lines.write(json.dumps(row) + "\n")
            writer.writerow(row)
    return paths


def read(path: Path) -> None:
    """Read a table row by row, keeping none, and print seconds and the peak in MB."""
    try:
        from coterie.data.rows import rows_of
    except ImportError:  # as it was called before
        from coterie.data.chats.files import rows_of

    start = time.perf_counter()
    count = sum(1 for _ in rows_of([path] if path.suffix else []))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([seconds, peak, count]))


def measured(path: Path, tree: Path) -> tuple[float, float]:
    """Seconds and peak in MB of another process that reads a table."""
    done = subprocess.run(
        [sys.executable, __file__, "--read", str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(Path(__file__).parent)))},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak, _ = json.loads(done.stdout)
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "reading.json")
    args = parser.parse_args()
    if args.read is not None:
        read(args.read)
        return
    trees = {"now": SRC} | ({"before": args.before} if args.before else {})
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path("floor"), *write(Path(folder), args.megabytes)]
        sizes = [path.stat().st_size / 1e6 if path.exists() else 0.0 for path in paths]
        every = product(range(args.repeats), paths, trees)
        taken = [(t, path.suffix or "floor", *measured(path, trees[t])) for _, path, t in every]
    table = [
        {
            "what": f"{form.removeprefix('.')}, {tree}",
            "megabytes": size,
            "seconds": statistics.median(s for t, f, s, _ in taken if (t, f) == (tree, form)),
            "peak_mb": max(peak for t, f, _, peak in taken if (t, f) == (tree, form)),
        }
        for form, size in zip(("floor", ".jsonl", ".csv"), sizes, strict=True)
        for tree in trees
    ]
    report(table, args.json, megabytes=args.megabytes, repeats=args.repeats)


if __name__ == "__main__":
    main()
