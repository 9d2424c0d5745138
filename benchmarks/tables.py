"""The papers' tables and figures at the small scale, in order of value.

    python benchmarks/tables.py [NAME ...] [--folder runs/tables] [--hours H] [--jobs 2]
        [--set KEY=VALUE ...]
    python benchmarks/tables.py --list
    python benchmarks/tables.py --page
    python benchmarks/tables.py --keep

Every entry of `PLAN`, or of those NAMEs (comigs/table2), is a call of `coterie reproduce`, with
three seeds (some with ten), column by column, in processes of their own with one thread. Runs are
kept in FOLDER; the same command goes on where it stopped (Ctrl-C, SIGTERM, or after H hours), and
skips what is complete. What is complete is copied to `results/`: the JSON and the Markdown of a
table, and FOLDER has the HTML. `results/README.md`, all statements with their verdicts, is written
anew each time, and by `--page` alone. Checkpoints and models are removed then: FOLDER keeps results
and metrics. So does `results/runs/`, from which any machine goes on: what is there is unpacked into
FOLDER at the start, and what ended since is added at the end, and by `--keep` alone.

With `--jobs 2` two columns run at a time, never the same one of two tables of a paper, as these
share runs.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import md5
from pathlib import Path

import kept_runs
import verdicts

from coterie.papers import tables

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "runs"
TABLES = Path(__file__).parents[1] / "src/coterie/papers/tables"
SEEDS = 3
DONE = ".done"  # beside a log: the command that came to an end
POLL = 2.0  # seconds between two looks at what runs


@dataclass(frozen=True)
class Entry:
    """One call of `coterie reproduce`.

    Args:
        name: Of the table or figure.
        trials: Candidates of each row's search; None without one.
        columns: Only these; () for all that have a small scale.
        rows: Only these; () for all.
        seeds: How many.
    """

    name: str
    trials: int | None = None
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    seeds: int = SEEDS

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]

    @property
    def stem(self) -> str:
        """The name of its files in the folder of its paper, without their endings."""
        return self.name.replace("/", "-") + ("" if self.trials is None else "-tuned")

    @property
    def result(self) -> str:
        """The name of its files in `results/`, without their endings."""
        kind = ("" if self.trials is None else "-tuned") + (
            verdicts.TEN if self.seeds > SEEDS else ""
        )
        return self.name.replace("/", "-") + "-small" + kind

    @cached_property
    def small_columns(self) -> list[str]:
        """The columns that are run."""
        own = tables.load(self.name).columns
        return [c for c in self.columns or own if "small" in own[c].recipes]

    def command(self, folder: Path, overrides: Sequence[str]) -> list[str]:
        """Return the command, whose runs are in a folder for all of the paper's tables."""
        found = ["coterie", "reproduce", self.name, "--seeds", str(self.seeds)]
        found += ["--columns", ",".join(self.columns)] if self.columns else []
        found += ["--rows", ",".join(self.rows)] if self.rows else []
        found += [] if self.trials is None else ["--tune", "--trials", str(self.trials)]
        found += ["--out", str(folder / self.paper)]
        return found + [part for text in overrides for part in ("--set", text)]

    def identity(self, folder: Path, overrides: Sequence[str]) -> str:
        """Return what tells what an entry is from what it was before its table changed."""
        texts = [(TABLES / name).read_bytes() for name in (f"{self.name}.yaml", "regimes.yaml")]
        return " ".join([*self.command(folder, overrides), md5(b"".join(texts)).hexdigest()])


DIGITS = ("digits-80", "digits")
IMAGES = ("digits", "cifar10-cnn")
SEARCHED = (  # of Table 2: without the bound and FDLoRA's plain averaging, which its search has
    *("pretrained", "local", "fedavg", "pcl", "pfedmoe", "fdlora"),
    *("comigs-2s", "comigs-2s-alone", "comigs-2s-published"),
    *("comigs-2g", "comigs-1g1s", "comigs-1g1s-published"),
)
ROUTED = ("local-moe", "fedavg-moe", "local-moe-tr", "fedavg-moe-tr", "comigs-tr", "comigs-1g1s")
UNEQUAL = ("agnews-4222", "multilingual-2244", "slimpajama-2442")
NEAR = (  # of 1G1S among its rivals: clients with an expert of their own beside a shared one
    *("local", "fedavg", "pfedmoe", "sdflora", "fedalt", "feddpa-t", "fedlease", "fedamole"),
    *("comigs-2g", "comigs-1g1s", "interpolation"),
)
CHEAP = ("local", "fedavg", "pfedmoe", "comigs-2s", "comigs-2g", "comigs-1g1s")
PLAN = (
    # Rows that no other table has: no page of a method stays without a figure.
    Entry("ddome/table8", columns=("digits",)),
    Entry("comigs/table1", columns=UNEQUAL),
    # Images: minutes each.
    Entry("ddome/table1", columns=(*DIGITS, "cifar10-cnn", "cifar10-resnet20")),
    Entry("ddome/table4", columns=IMAGES),
    Entry("ddome/figure3", columns=IMAGES),
    Entry("cobo/table1"),
    *(Entry(f"cobo/figure{k}") for k in ("2a", "2b", "3")),
    *(Entry(f"ddome/figure{k}") for k in (4, 7, 5, 6, 9, 10)),
    *(Entry(f"ddome/table{k}", columns=IMAGES) for k in (5, 6)),
    Entry("ddome/figure8", columns=IMAGES),
    *(Entry(f"ddome/figure{k}", columns=("digits",)) for k in (2, 11)),
    Entry("ddome/table7"),
    Entry("ddome/table3"),
    Entry("ddome/table1", trials=6, columns=DIGITS),
    Entry("ddome/table4", trials=6, columns=("digits",)),
    # Where three seeds leave it open and a run takes seconds.
    Entry("ddome/table1", columns=DIGITS, seeds=10),
    Entry("ddome/table7", seeds=10),
    Entry("ddome/table3", columns=("emnist-73", "emnist-80"), seeds=10),
    Entry("ddome/table4", columns=("digits",), seeds=10),
    Entry("cobo/table1", seeds=10),
    Entry("cobo/table2", columns=("device",), seeds=10),
    Entry("comigs/table2", columns=("multilingual",), rows=CHEAP, seeds=10),
    # Language: an hour of two cores each, or more.
    Entry("comigs/table2"),
    *(
        Entry(f"comigs/{name}") for name in ("figure7", "figure4", "figure8", "table4")
    ),  # from its runs
    Entry("comigs/figure3"),
    Entry("cobo/table2"),
    *(Entry(f"cobo/figure{k}") for k in (4, 5, 6)),  # likewise
    Entry("comigs/table6"),
    *(Entry(f"comigs/figure{k}") for k in (6, 11, 10, 9, 5)),
    Entry("comigs/table5"),
    Entry("ddome/table2", columns=("clinc150", "clinc150-head-61", "clinc150-head-68")),
    # Beyond the papers.
    Entry("comigs/with-auto"),
    Entry("ddome/with-rivals"),
    Entry("cobo/with-rivals"),
    Entry("comigs/with-rivals"),
    # Tuned, on one column of each kind: in and out of distribution.
    Entry("comigs/table2", trials=6, columns=("multilingual", "agnews"), rows=SEARCHED),
    Entry("comigs/table5", trials=6, columns=("multilingual",), rows=ROUTED),
    Entry("comigs/with-rivals", trials=6, columns=("multilingual",), rows=NEAR),
    Entry("comigs/table1", trials=4, columns=("multilingual-2244",)),
    Entry("comigs/table6", trials=4, columns=("multilingual-hetero",)),
)


@dataclass(frozen=True)
class Part:
    """The runs of one column of an entry, or of all of them: the table itself.

    Args:
        entry: Which one.
        column: Only this; None for all.
    """

    entry: Entry
    column: str | None = None

    @property
    def columns(self) -> tuple[str, str | None]:
        """What no two parts may have at a time: tables share the runs of a paper's columns."""
        return self.entry.paper, self.column

    def command(self, folder: Path, overrides: Sequence[str]) -> list[str]:
        own = self.entry if self.column is None else replace(self.entry, columns=(self.column,))
        return own.command(folder, overrides)


class Running:
    """A part that runs, and its log."""

    def __init__(self, part: Part, folder: Path, overrides: Sequence[str]) -> None:
        name = ".".join(filter(None, (part.entry.result, part.column)))
        self.part, self.log = part, folder / "logs" / f"{name}.log"
        command = part.command(folder, overrides)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | threads
            )
        print(time.strftime("%H:%M"), " ".join(command), flush=True)

    def ended(self) -> bool:
        """Whether it came to an end; says how."""
        code = self.process.poll()
        if code is None:
            return False
        said = "done" if code == 0 else f"failed with {code}, see {self.log}"
        print(time.strftime("%H:%M"), f"{self.log.stem}: {said}", flush=True)
        return True

    def stop(self) -> None:
        """Have it stop where it can be resumed, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def marker(entry: Entry, folder: Path) -> Path:
    """Return the file that says that an entry is complete."""
    return folder / "logs" / f"{entry.result}{DONE}"


def complete(entry: Entry, folder: Path, overrides: Sequence[str]) -> bool:
    """Whether an entry came to an end, as it is now."""
    path = marker(entry, folder)
    return path.exists() and path.read_text() == entry.identity(folder, overrides)


def publish(entry: Entry, folder: Path, overrides: Sequence[str]) -> None:
    """Copy what a complete entry found to `results/`, and write down that it is complete."""
    for ending in ("json", "md"):
        source = folder / entry.paper / f"{entry.stem}.{ending}"
        shutil.copyfile(source, RESULTS / f"{entry.result}.{ending}")
    write_page()
    without_models(folder / entry.paper)
    marker(entry, folder).write_text(entry.identity(folder, overrides))


def without_models(folder: Path) -> None:
    """Remove the checkpoints and models of runs that have a result: tables need that alone."""
    for result in folder.glob("*/*/*/result.json"):
        for name in ("checkpoints", "clients"):
            shutil.rmtree(result.parent / name, ignore_errors=True)


def write_page() -> None:
    """Write the page of all statements from the results that there are."""
    (RESULTS / "README.md").write_text(verdicts.page(RESULTS), encoding="utf-8")


def work(
    plan: Sequence[Entry], folder: Path, overrides: Sequence[str], jobs: int, until: float
) -> list[Entry]:
    """Run what is not complete, in order; return what failed."""
    left = [entry for entry in plan if not complete(entry, folder, overrides)]
    done: set[Part] = set()
    at_work: list[Running] = []
    failed: list[Entry] = []
    try:
        while (left or at_work) and time.monotonic() < until:
            for running in [running for running in at_work if running.ended()]:
                at_work.remove(running)
                done.add(part := running.part)
                if running.process.returncode != 0:
                    failed.append(part.entry)
                elif part.column is None:
                    publish(part.entry, folder, overrides)
                if part.entry in left and (part.entry in failed or part.column is None):
                    left.remove(part.entry)
            busy = [running.part for running in at_work]
            new = startable(left, done, busy, jobs)
            at_work.extend(Running(part, folder, overrides) for part in new)
            time.sleep(POLL)
    finally:
        for running in at_work:
            running.stop()
    return failed


def startable(
    left: Sequence[Entry], done: Collection[Part], at_work: Sequence[Part], jobs: int
) -> Iterator[Part]:
    """Yield the next parts that may start, in order: an entry's columns, then its table."""
    busy = {part.columns: part for part in at_work}
    for entry in left:
        parts = [Part(entry, column) for column in entry.small_columns]
        waiting = [part for part in parts if part not in done]
        for part in waiting or [Part(entry)]:
            if len(busy) < jobs and part.columns not in busy:
                busy[part.columns] = part
                yield part


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these tables or figures")
    parser.add_argument("--folder", type=Path, default=Path("runs/tables"))
    parser.add_argument("--hours", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also what is complete, from its runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--list", action="store_true", help="what is complete, and what is not")
    parser.add_argument("--page", action="store_true", help="write results/README.md alone")
    parser.add_argument("--keep", action="store_true", help="add to results/runs/ alone")
    asked = parser.parse_args()
    if asked.page:
        write_page()
        return 0
    folder = asked.folder.resolve()
    plan = [entry for entry in PLAN if not asked.names or entry.name in asked.names]
    if asked.keep:
        print(kept_runs.pack(KEPT, folder))
        return 0
    if asked.list:
        for entry in plan:
            state = "complete" if complete(entry, folder, asked.set) else "to do"
            print(f"{entry.result:<40} {state}")
        return 0
    for paper in {entry.paper for entry in plan}:
        without_models(folder / paper)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if asked.again:
        for entry in plan:
            marker(entry, folder).unlink(missing_ok=True)
    print(f"{kept_runs.unpack(KEPT, folder)} runs from {KEPT}", flush=True)
    try:
        failed = work(plan, folder, asked.set, asked.jobs, time.monotonic() + 3600 * asked.hours)
    finally:
        kept_runs.pack(KEPT, folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
