"""The pages of the methods: what docs/methods/ says of each, and what the code and results say."""

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.methods import METHODS, Entry
from coterie.methods.base import Method

sys.path.insert(0, str(Path(__file__).parents[1]))
from recipe_reference import fields_of_method

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks/results"
TEXTS = REPOSITORY / "docs/methods"
WHEN = "## When to use it"
BESIDE = ("pretrained", "local", "fedavg", "comigs-1g1s", "cobo", "ddome")  # to compare with
ROWS = 8  # of a table that is shown whole


def groups() -> dict[str, dict[str, Entry]]:
    """Return the shipped methods by the page that they are on: names of one class share one."""
    pages: dict[type[Method], str] = {}
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in METHODS.items():
        found.setdefault(pages.setdefault(entry.method, name), {})[name] = entry
    return found


def page(slug: str) -> str:
    """Return the page of a group: its text, with what is generated before when to use it."""
    text = (TEXTS / f"{slug}.md").read_text(encoding="utf-8")
    before, found, after = text.partition(WHEN)
    if not found:
        raise ValueError(f"docs/methods/{slug}.md has no heading {WHEN!r}")
    said, _, algorithm = before.partition("## Algorithm")
    entries = groups()[slug]
    parts = [said.strip(), names(entries), f"## Algorithm{algorithm.rstrip()}", *code(entries)]
    parts += recipe(entries)
    return "\n\n".join([*parts, *measured(entries), found + after])


def names(entries: Mapping[str, Entry]) -> str:
    """Return the table of the names that a recipe may give."""
    rows = ["| `method.name` | title | fixes | from |", "| --- | --- | --- | --- |"]
    for name, entry in entries.items():
        fixed = ", ".join(f"`{k}: {v}`" for k, v in entry.fixed.items())
        rows.append(f"| `{name}` | {entry.title} | {fixed} | {entry.paper} |")
    return "\n".join(rows)


def code(entries: Mapping[str, Entry]) -> list[str]:
    """Return the whole source file of the method, as it is."""
    method = next(iter(entries.values())).method
    path = Path(inspect.getsourcefile(method) or "")
    shown = path.relative_to(REPOSITORY)
    bases = [base.__name__ for base in method.__mro__[1:] if issubclass(base, Method)]
    built = ", ".join(f"`{name}`" for name in bases)
    return [
        "## The code",
        f"The class is built on {built}: see [what a method is made of](../reference/methods.md).",
        f'```python title="{shown}"\n{path.read_text(encoding="utf-8").strip()}\n```',
    ]


def recipe(entries: Mapping[str, Entry]) -> list[str]:
    """Return how a recipe names the method, and its fields."""
    name, entry = next(iter(entries.items()))
    return [
        "## In a recipe",
        f"```yaml\nmethod:\n  name: {name}\n```",
        "On the command line: "
        f"`--set method.name={name}`, and any field below as `--set FIELD=VALUE`.",
        fields_of_method(entry.method, ()),
    ]


def measured(entries: Mapping[str, Entry]) -> list[str]:
    """Return what was measured of the method: the papers' tables with a row of it, and its regret
    against all others.
    """
    parts = ["## Measured"]
    for path in sorted(RESULTS.glob("*-small*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        # As for the page of the statements: results without hours are from before it.
        if "hours" in found and any(cell["method"] in entries for cell in found["cells"]):
            parts += table(found, entries, path)
    parts += regret(entries)
    if len(parts) == 1:
        parts.append(
            "Not measured yet. [What the papers say](../results/index.md) lists the tables that "
            "have this method as a row, and the commands that measure them."
        )
    return parts


def table(found: Mapping[str, Any], entries: Mapping[str, Entry], path: Path) -> list[str]:
    """Return one table: the rows of the method, and of a long one those that one compares with."""
    own = {cell["row"] for cell in found["cells"] if cell["method"] in entries}
    short = len(found["rows"]) <= ROWS
    shown = [row for row in found["rows"] if short or row in own or row in BESIDE]
    cells = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    columns = found["columns"]
    lines = [f"| | {' | '.join(columns.values())} |", "| --- |" + " ---: |" * len(columns)]
    for row in shown:
        title = f"**{found['rows'][row]}**" if row in own else found["rows"][row]
        values = " | ".join(figure(cells.get((row, column))) for column in columns)
        lines.append(f"| {title} | {values} |")
    settings = "every row tuned" if path.stem.endswith("-tuned") else "fixed settings"
    return [
        f"**{found['title']}, {settings}**",  # no heading: the contents would list each
        "\n".join(lines),
        f"`coterie reproduce {found['name']}`, {len(found['seeds'])} seeds, in parentheses what "
        f"the paper has; small scale, so that values cannot be compared with the paper's. From "
        f"`benchmarks/results/{path.name}`.",
    ]


def regret(entries: Mapping[str, Entry]) -> list[str]:
    """Return what `benchmarks/regret.py` found of the method on each base."""
    lines = []
    for path in sorted(RESULTS.glob("regret-*-small.md")):
        base = path.name.removeprefix("regret-").removesuffix("-small.md")
        for line in path.read_text(encoding="utf-8").splitlines():
            name, colon, found = line.removeprefix("- ").partition(": ")
            if line.startswith("- ") and colon and name in entries:
                lines.append(f"- Base {base}: {found} From `benchmarks/results/{path.name}`.")
    if not lines:
        return []
    return [
        "**Regret of each client, every row tuned**",
        "Against the row that is best for this client, over unlike federations of the library's "
        "own texts (`python benchmarks/regret.py`).",
        "\n".join(lines),
    ]


def figure(cell: Mapping[str, Any] | None) -> str:
    """Return the mean and deviation of a cell, and what was published."""
    if cell is None:
        return ""
    published = cell.get("published")
    beside = f" ({published:g})" if published is not None else ""
    return f"{cell['mean']:.2f} ± {cell['std']:.2f}{beside}"


def index() -> str:
    """Return the page of all methods."""
    text = (TEXTS / "README.md").read_text(encoding="utf-8")
    parts = [text.strip()]
    for title, slugs in by_group().items():
        rows = ["| method | names in a recipe | from |", "| --- | --- | --- |"]
        for slug in slugs:
            entries = groups()[slug]
            listed = ", ".join(f"`{name}`" for name in entries)
            first = next(iter(entries.values()))
            rows.append(f"| [{first.title}]({slug}.md) | {listed} | {first.paper} |")
        parts += [f"### {title}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def by_group() -> dict[str, list[str]]:
    """Return the pages in each group of `coterie methods`."""
    found: dict[str, list[str]] = {}
    for slug, entries in groups().items():
        found.setdefault(next(iter(entries.values())).group, []).append(slug)
    return found
