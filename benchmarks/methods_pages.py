"""The figures on the pages of methods that others compare with, from the tables with rivals.

    python benchmarks/methods_pages.py

Writes two sections of `docs/methods/METHOD.md` anew, before "When to use it": "Published", from
`published.yaml`, and "Measured beside others", from `results/*-with-rivals-small.json`.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, table

PAGES = Path(__file__).parents[1] / "docs/methods"
TITLE, NEXT = "## Measured beside others", "## When to use it"
PUBLISHED = "## Published"
KNOWN = ("local", "fedavg", "comigs-1g1s", "cobo", "ddome", "interpolation")  # have other pages
ALSO = {"feddpa-f": "feddpa-t"}  # methods that share a page
TABLES = {
    "comigs": "one learning rate for all rows, Ditto's prox chosen on validation",
    "cobo": "every row tuned with the same effort; the mixture with `shared_prior`",
    "ddome": "every row tuned: three settings, Ditto five, pFedMe and FedProto four",
}


def value(cell: Mapping[str, Any] | None) -> str | None:
    """A cell of a table, with its deviation over seeds."""
    return None if cell is None else f"{cell['mean']:.1f} ± {cell['std']:.1f}"


@cache
def rivals(paper: str) -> Any:
    """A table with rivals."""
    return json.loads((RESULTS / f"{paper}-with-rivals-small.json").read_text())


def published(method: str) -> str | None:
    """What others, or its own paper, measured of a method; None where nothing is at hand."""
    found = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text("utf-8"))
    if said := found["papers"].get(method):
        text = f"Its paper measured it {said}. The figures are of other bases, texts and metrics."
    elif method in (rows := found["pfllib"]["rows"]):
        heading = (PAGES / f"{method}.md").read_text("utf-8").splitlines()[0]
        titles = {method: heading.removeprefix("# "), "fedavg": "FedAvg"}
        lines = [
            {"test data": column} | {title: rows[m][at] for m, title in titles.items()}
            for at, column in enumerate(found["pfllib"]["columns"])
        ]
        text = (
            "Test accuracy in % of [PFLlib's benchmark](http://pfllib.com/benchmark.html), of its "
            "code, on 20 clients of few classes each (pathological) or of Dirichlet's shares "
            f"(practical):\n\n{table(lines)}"
        )
    else:
        return None
    return f"{PUBLISHED}\n\n{text}\n\n"


def section(method: str) -> str | None:
    """A method's figures beside others'; None for one in no table with rivals."""
    tables, sources = [], []
    for paper, effort in TABLES.items():
        found = rivals(paper)
        if method not in found["rows"]:
            continue
        shown = [m for m in (method, ALSO.get(method), *KNOWN) if m in found["rows"]]
        lines = []
        for column, title in found["columns"].items():
            cells = {cell["row"]: cell for cell in found["cells"] if cell["column"] == column}
            # a row of its own where a column has other rounds
            of = {m: cells.get(m) or cells.get(f"{m}-{column}") for m in shown}
            values = {found["rows"][m]: value(cell) for m, cell in of.items()}
            lines.append({"test data": f"{title}: {found['metrics'][column]['name']}", **values})
        tables.append(table(lines))
        rows = len(set(found["rows"].values()))
        link = f"[{rows} rows](../../benchmarks/results/{paper}-with-rivals-small.md)"
        sources.append(f"`coterie reproduce {paper}/with-rivals` ({link}; {effort})")
    if not tables:
        return None
    return "\n\n".join([TITLE, *tables, f"Three seeds: {', '.join(sources)}."]) + "\n\n"


def page(path: Path) -> str:
    """A page with its sections as they should be."""
    text, name = path.read_text(encoding="utf-8"), path.stem
    text = re.sub(rf"({PUBLISHED}|{TITLE})\n.*?(?={NEXT})", "", text, flags=re.DOTALL)
    if name in KNOWN:
        return text
    found = [part for part in (published(name), section(name)) if part is not None]
    return text.replace(NEXT, "".join([*found, NEXT]))


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(page(path), encoding="utf-8")


if __name__ == "__main__":
    main()
