"""Write what the code says into two pages of docs/, between the markers there.

python scripts/architecture.py [--check]
"""

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import coterie
from coterie.core import protocol
from coterie.methods.base import Method

SOURCE = Path(coterie.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
Graph = Mapping[str, set[str]]


def rooms() -> list[str]:
    """Return the packages right below `coterie`, and `api`, which is a file."""
    return sorted(["api", *(path.parent.name for path in SOURCE.glob("*/__init__.py"))])


def files(room: str) -> list[Path]:
    """Return the files of a room, the one that says what it holds first."""
    alone = SOURCE / f"{room}.py"
    first = alone if alone.exists() else SOURCE / room / "__init__.py"
    return [first, *sorted(set((SOURCE / room).rglob("*.py")) - {first})]


def imported(path: Path) -> set[str]:
    """Return the rooms that a file imports from, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = (name.split(".") for name in names)
    return {found[1] for found in parts if found[0] == "coterie" and len(found) > 1}


def imports() -> dict[str, set[str]]:
    """Return which rooms each room imports from."""
    names = rooms()
    graph: dict[str, set[str]] = {}
    for room in names:
        found = set().union(*map(imported, files(room)))
        graph[room] = (found & set(names)) - {room}
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """Return all rooms that a room imports from, directly or by way of others."""
    direct = graph[start]
    return direct.union(*(reachable(graph, other) for other in direct))


def reduction(graph: Graph) -> dict[str, set[str]]:
    """Return the fewest imports that imply all others: an acyclic graph's transitive reduction."""
    reduced = {}
    for room, direct in graph.items():
        implied = set().union(*(reachable(graph, other) for other in direct))
        reduced[room] = direct - implied
    return reduced


def picture(graph: Graph) -> str:
    """Draw the rooms for Mermaid: an arrow from each room to those that it is built on."""
    arrows = [f"    {room} --> {other}" for room in sorted(graph) for other in sorted(graph[room])]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```"])


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table in Markdown."""
    lines = [list(heads)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def first_sentence(thing: object) -> str:
    """Return what a docstring begins with, in one line."""
    text = inspect.getdoc(thing) or ""
    return first_paragraph(text).partition(". ")[0].removesuffix(".")


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a text in one line."""
    return " ".join(text.split("\n\n", maxsplit=1)[0].split())


def order(graph: Graph) -> list[str]:
    """Return the rooms so that each comes behind those that it imports from."""
    sorter, found = TopologicalSorter(graph), list[str]()
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found += ready
        sorter.done(*ready)
    return found


def the_rooms() -> str:
    """Write the table and the picture of the rooms."""
    graph = imports()
    rows = []
    for room in order(graph):
        tree = ast.parse(files(room)[0].read_text(encoding="utf-8"))
        rows.append((f"`{room}`", first_paragraph(ast.get_docstring(tree) or "")))
    return table(("room", "holds"), rows) + "\n\n" + picture(reduction(graph))


def remarks(cls: type) -> dict[str, tuple[str, str]]:
    """Return value and comment of each class attribute that has a comment.

    A comment stands beside the value, or on the lines above the attribute.
    """
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found_at = [token for token in tokens if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.lstrip("# ") for token in found_at}
    whole = {token.start[0] for token in found_at if token.line.lstrip().startswith("#")}
    found = {}
    for node in tree.body if isinstance(tree, ast.ClassDef) else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            lines = [line for line in inside if line in comments] or above(node.lineno, whole)
            if lines:
                text = " ".join(comments[line] for line in lines)
                found[ast.unparse(target)] = ast.unparse(node.value), text
    return found


def above(line: int, comments: set[int]) -> list[int]:
    """Return the lines of a block of comments that ends right above a line."""
    first = line
    while first - 1 in comments:
        first -= 1
    return list(range(first, line))


def the_promises() -> str:
    """Write the table of a method's class attributes, which are explained where they stand."""
    fields = {field.name for field in dataclasses.fields(Method)}  # of recipes
    found = [(k, *value) for k, value in remarks(Method).items() if k not in fields]
    return table(
        ("class attribute", "default", "says"), [(f"`{k}`", f"`{v}`", s) for k, v, s in found]
    )


def the_hooks() -> str:
    """Write the table of what a method may override."""
    rows = []
    for name, member in vars(Method).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        needed = "must" if name in Method.__abstractmethods__ else "may"
        what = "task" if hasattr(member, protocol._SENDS) else needed
        rows.append((f"`{name}`", what, first_sentence(member)))
    return table(("hook", "write it?", "does"), rows)


def the_kinds() -> str:
    """Write the table of what a task may declare, which is explained where it stands."""
    said = remarks(protocol.Sends)
    rows = [
        (f"`Sends.{kind.name}`", said.get(kind.name, ("", "empty"))[1]) for kind in protocol.Sends
    ]
    return table(("declared", "the reply is"), rows)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "architecture.md": {"rooms": the_rooms},
    "write-a-method.md": {"promises": the_promises, "hooks": the_hooks, "kinds": the_kinds},
}


def written(name: str) -> str:
    """Return a page with its parts as the code has them now."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for part, write in PARTS[name].items():
        begin, end = (
            f"<!-- {part}: written by scripts/architecture.py -->",
            f"<!-- end of {part} -->",
        )
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            sys.exit(f"{name} lacks the markers {begin} and {end}")
        page = f"{before}{begin}\n\n{write()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    for name in PARTS:
        page = written(name)
        if sys.argv[1:] != ["--check"]:
            (DOCS / name).write_text(page, encoding="utf-8")
        elif (DOCS / name).read_text(encoding="utf-8") != page:
            sys.exit(f"docs/{name} is out of date: run python scripts/architecture.py")
