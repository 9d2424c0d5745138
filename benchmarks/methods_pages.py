"""The figures on the pages of methods that others compare with, from the tables with rivals.

    python benchmarks/methods_pages.py

Writes the section "Measured beside others" of `docs/methods/METHOD.md` anew, before "When to use
it", for each row of `results/*-with-rivals-small.json` that has a page of its own.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import RESULTS, table

PAGES = Path(__file__).parents[1] / "docs/methods"
TITLE, NEXT = "## Measured beside others", "## When to use it"
KNOWN = ("local", "fedavg", "comigs-1g1s", "cobo", "ddome", "interpolation")  # have other pages
ALSO = {"feddpa-f": "feddpa-t"}  # methods that share a page
TABLES = {
    "comigs": "one learning rate for all rows",
    "cobo": "every row tuned with the same effort",
    "ddome": "every row tuned with the same effort",
}


def value(cell: Mapping[str, Any] | None) -> str | None:
    """A cell of a table, with its deviation over seeds."""
    return None if cell is None else f"{cell['mean']:.1f} ± {cell['std']:.1f}"


def section(method: str, results: Path = RESULTS) -> str | None:
    """A method's figures beside others'; None for one in no table with rivals."""
    lines, sources = [], []
    for paper, effort in TABLES.items():
        found = json.loads((results / f"{paper}-with-rivals-small.json").read_text())
        shown = [m for m in (method, ALSO.get(method), *KNOWN) if m in found["rows"]]
        if method not in shown:
            continue
        for column, title in found["columns"].items():
            cells = {cell["row"]: cell for cell in found["cells"] if cell["column"] == column}
            metric = found["metrics"][column]["name"]
            values = {found["rows"][m]: value(cells.get(m)) for m in shown}
            lines.append({"test data": f"{title}: {metric}", **values})
        link = f"[{len(found['rows'])} rows](../../benchmarks/results/{paper}-with-rivals-small.md)"
        sources.append(f"`coterie reproduce {paper}/with-rivals` ({link}; {effort})")
    if not lines:
        return None
    tables = [[row for row in lines if list(row) == names] for names in unique(lines)]
    parts = [TITLE, *map(table, tables), f"Three seeds: {', '.join(sources)}."]
    return "\n\n".join(parts) + "\n\n"


def unique(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The headers of rows, each once, in order."""
    return [list(names) for names in dict.fromkeys(tuple(row) for row in rows)]


def page(path: Path) -> str:
    """A page with its section as it should be."""
    text, name = path.read_text(encoding="utf-8"), path.stem
    text = re.sub(rf"{TITLE}\n.*?(?={NEXT})", "", text, flags=re.DOTALL)
    found = None if name in KNOWN else section(name)
    return text if found is None else text.replace(NEXT, found + NEXT)


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(page(path), encoding="utf-8")


if __name__ == "__main__":
    main()
