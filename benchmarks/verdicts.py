"""One page of all statements of the three papers, from the committed results of their tables:
`results/README.md`, written by `python benchmarks/tables.py --page`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.papers import tables
from coterie.papers.tables import Reproduction

PAPERS = {"comigs": "CoMiGS", "cobo": "CoBo", "ddome": "DDOME"}
NOT_RUN = "not run"
TEN = "-ten-seeds"  # ends the name of results of ten seeds
LARGER = {  # by the suffix of its results
    f"small{TEN}": "ten seeds",
    "smollm2": "SmolLM2-135M",
    "smollm2-long": "SmolLM2-135M, ten times the text",
}
ONLY = {"fixed": "one fixed learning rate for all rows", "tuned": "every row tuned"}
HEADER = """# What the papers say, and what holds

Written by `python benchmarks/tables.py --page` from the JSON files in this folder. Each statement
of a table or figure is judged twice: *fixed*, with the settings of the table's file, which all rows
share (where that names several, as for Ditto's lambda, a row's best of these by validation); and
*tuned*, with the same search on validation for every row. Verdicts and intervals are explained in
[docs/tables.md](../../docs/tables.md): Student's 95 % intervals over three seeds of the difference
between runs of the same seed. `undecided`: the interval reaches across the bound. `unfinished`: a
row still improves, and the verdict would be another if all went on at this pace for as long again.
Behind each verdict stands which rows still improved in the last fifth of their runs, and by how
much in that fifth (by more than 0.5 points of accuracy or 1 % of perplexity, and by more than it
varies over seeds). The verdict is that of the small scale: orders and signs can be compared with
the papers, values cannot. Where a table was run on SmolLM2-135M too, columns say what came of it
there. Hours are those of the runs on a machine that was also busy with other work; what tables
share is counted in each. Where three seeds left a verdict open and a run takes seconds, there are
ten, each with a split of its own but the first three, which share one: these decide what holds with
fixed settings.
Why some of it does not hold is told in
[docs/tables.md](../../docs/tables.md#what-does-not-hold-and-why).
"""
Found = Mapping[str, Any]  # a table's JSON file
Key = tuple[str, str]  # what a statement says, and the id of a column


@dataclass(frozen=True)
class Table:
    """A table or figure, with what was found of it.

    Args:
        name: `<paper>/<table or figure>`.
        reproduction: Its file.
        fixed: Its results with fixed settings; None where it was not run.
        tuned: Those with every row tuned.
        larger: Those of ten seeds and on larger bases, with fixed settings, by title.
    """

    name: str
    reproduction: Reproduction
    fixed: Found | None
    tuned: Found | None
    larger: Mapping[str, Found]

    @property
    def judged(self) -> dict[str, Found]:
        """Those of `larger` of which a statement could be judged: all its rows were run."""
        return {title: found for title, found in self.larger.items() if found["statements"]}

    @property
    def columns(self) -> dict[str, str]:
        """Titles of the columns that were run, or else of all at the small scale, by id."""
        run = {c for found in (self.fixed, self.tuned) if found for c in found["columns"]}
        own = self.reproduction.columns
        return {c: own[c].title for c in own if c in run or (not run and "small" in own[c].recipes)}

    @property
    def not_run(self) -> list[str]:
        """Titles of the rows that may stand in a column that was run, and were not."""
        run = {row for found in (self.fixed, self.tuned) if found for row in found["rows"]}
        own = self.reproduction
        return [
            row.title
            for r, row in own.rows.items()
            if r not in run
            and any(
                c in (row.columns or [c]) and r in (own.columns[c].only or [r])
                for c in self.columns
            )
        ]

    @property
    def statements(self) -> list[tuple[Key, str]]:
        """Statements and columns, with where each stands in the paper."""
        found = []
        for s in self.reproduction.statements:
            found += [((s.says, c), s.source) for c in s.columns if c in self.columns]
        return found


def page(results: Path) -> str:
    """Return the page of all statements, from the JSON files of a folder."""
    names = sorted(tables.names(), key=_place)
    known = [table for name in names if (table := _table(name, results)) is not None]
    lines = [HEADER, *_summary(known)]
    for paper, title in PAPERS.items():
        lines += [f"## {title}", ""]
        for table in known:
            if table.name.startswith(f"{paper}/"):
                lines += _section(table)
    return "\n".join(lines).rstrip() + "\n"


def _place(name: str) -> tuple[str, bool, int, str]:
    """Return what names are ordered by: tables before figures, by number."""
    paper, _, own = name.partition("/")
    number = re.search(r"\d+", own)
    return paper, own.startswith("figure"), int(number[0]) if number else 0, own


def _table(name: str, results: Path) -> Table | None:
    """Return a table of the papers with what was found of it; None for one without statements,
    and for those beyond the papers.
    """
    paper, _, own = name.partition("/")
    reproduction = tables.load(name)
    if paper not in PAPERS or own.startswith("with-") or not reproduction.statements:
        return None
    stem = name.replace("/", "-")
    return Table(
        name,
        reproduction,
        _found(results / f"{stem}-small.json"),
        _found(results / f"{stem}-small-tuned.json"),
        {
            title: found
            for suffix, title in LARGER.items()
            if (found := _found(results / f"{stem}-{suffix}.json"))
        },
    )


def _found(path: Path) -> Found | None:
    """Return a table's results; None where there are none, or they are from before statements had
    intervals.
    """
    if not path.exists():
        return None
    found: Found = json.loads(path.read_text(encoding="utf-8"))
    return found if "hours" in found else None


def _summary(known: Sequence[Table]) -> list[str]:
    """Return how many statements there are of each verdict, by paper."""
    counts = {paper: Counter[str]() for paper in PAPERS}
    for table in known:
        for key, _ in table.statements:
            verdict = _overall(table, key)
            kind = "holds only with ..." if verdict.startswith("holds only") else verdict
            counts[table.name.partition("/")[0]][kind] += 1
    kinds = ["holds", "holds only with ...", "unfinished", "undecided", "does not hold", NOT_RUN]
    return [
        f"| paper | {' | '.join(kinds)} |",
        "| --- |" + " ---: |" * len(kinds),
        *(
            f"| {PAPERS[paper]} | {' | '.join(str(own[kind]) for kind in kinds)} |"
            for paper, own in counts.items()
        ),
        "",
    ]


def _section(table: Table) -> list[str]:
    """Return the lines of a table: its commands, and its statements."""
    lines = [f"### {table.reproduction.title}", ""]
    runs = {"Fixed": table.fixed, "Tuned": table.tuned, **table.larger}
    for kind, found in runs.items():
        if found is not None:
            scale = f" --scale {found['scale']}" if found["scale"] != "small" else ""
            command = " ".join(
                [
                    f"coterie reproduce {table.name}{scale} --seeds {len(found['seeds'])}",
                    *found["part"],
                    *(f"--set {text}" for text in found["overrides"]),
                ]
            )
            lines += [f"{kind}: `{command}`, {found['hours']:.1f} hours of one thread.  "]
    if table.fixed is None and table.tuned is None:
        return [*lines, f"`coterie reproduce {table.name} --seeds 3`: not run yet.", ""]
    if missing := table.not_run:
        lines += [f"Rows not run yet: {'; '.join(missing)}.  "]
    larger = "".join(f" {title} |" for title in table.judged)
    lines += ["", f"| verdict | statement | on | fixed | tuned |{larger}"]
    lines += ["| --- | --- | --- | --- | --- |" + " --- |" * len(table.judged)]
    lines += [_line(table, key, source) for key, source in table.statements]
    return [*lines, ""]


def _line(table: Table, key: Key, source: str) -> str:
    says, column = key
    found = (table.fixed, table.tuned, *table.judged.values())
    told = [_told(of, key) for of in found]
    cells = [_overall(table, key), f"{says} ({source})", table.columns[column], *told]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _verdict(found: Found | None, key: Key) -> Mapping[str, Any] | None:
    """Return the verdict of a statement in a column; None where it was not judged."""
    said: Iterator[Mapping[str, Any]] = iter(found["statements"] if found else ())
    return next((s for s in said if (s["says"], s["column"]) == key), None)


def _told(found: Found | None, key: Key) -> str:
    """Return a verdict with by how much, or nothing."""
    verdict = _verdict(found, key)
    if verdict is None:
        return ""
    progress = verdict.get("progress") or "how finished is not known"
    return f"{verdict['verdict']}: {verdict['by'] or verdict['detail']}; {progress}"


def _overall(table: Table, key: Key) -> str:
    """Return the verdict of a statement from both of its verdicts."""
    fixed = _verdict(table.larger.get("ten seeds"), key) or _verdict(table.fixed, key)
    both = {"fixed": fixed, "tuned": _verdict(table.tuned, key)}
    words = {kind: str(found["verdict"]) for kind, found in both.items() if found is not None}
    if not words:
        return NOT_RUN
    if len({*words.values()}) == 1:
        return next(iter(words.values()))
    if {*words.values()} == {"holds", "does not hold"}:
        kind = next(kind for kind, word in words.items() if word == "holds")
        return f"holds only with {ONLY[kind]}"
    for open_ in ("unfinished", "undecided"):
        if open_ in words.values():
            return open_
    return next(word for word in words.values() if word.startswith("holds only"))
