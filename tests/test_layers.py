"""Each room imports only from those before it, no files import each other in a circle, and
Flower's names stay in one folder.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import coterie

SOURCE = Path(coterie.__file__).parent
# A room may import from itself and from those on the lines before it.
ORDER = [
    {"core"},
    {"data"},
    {"models"},
    {"aggregation"},
    {"client"},
    {"methods"},
    {"engines", "reports"},
    {"personal"},
    {"runs"},
    {"audit", "deploy", "papers"},
    # The suite for methods runs them as commands do, on every engine: nothing is built on it.
    {"cli", "testing"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE]


def imports(path: Path, nodes: list[ast.stmt] | None = None) -> set[str]:
    """Dotted names of all that a file imports: wherever in the file, or by some of its
    statements.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def module_of(path: Path) -> str:
    return ".".join(("coterie", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def test_at_the_root_are_rooms_alone() -> None:
    assert {path.name for path in SOURCE.iterdir()} - {"__pycache__"} == LEVEL.keys() | {
        "__init__.py",
        "__main__.py",
        "py.typed",
    }


def test_rooms_import_only_from_those_before_them() -> None:
    for path in FILES:
        for name in imports(path):
            top, _, inner = name.partition(".")
            if top == "coterie":
                room = inner.partition(".")[0]
                assert room in LEVEL, f"{path.relative_to(SOURCE)} imports {name}"
                assert room == room_of(path) or LEVEL[room] < LEVEL[room_of(path)], (
                    f"{path.relative_to(SOURCE)} imports {name}"
                )


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        found = imports(path, ast.parse(path.read_text(encoding="utf-8")).body)
        graph[module] = (
            {name if name in modules else name.rpartition(".")[0] for name in found}
            & modules.keys()
        ) - {module}
    del graph["coterie.cli"]  # whose files need the `app` that it offers
    TopologicalSorter(graph).prepare()


def test_methods_import_nothing_of_each_other_but_what_they_extend() -> None:
    families = ("base", "templates", "pairwise")
    for path in (SOURCE / "methods").glob("*.py"):
        if path.stem in ("__init__", *families):
            continue
        extended = {
            base.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name)
        }
        others = {
            n
            for n in imports(path)
            if n.startswith("coterie.methods.") and n.split(".")[2] not in families
        }
        assert {name.rpartition(".")[2] for name in others} <= extended, f"{path.name}: {others}"


def test_flower_stays_in_one_folder() -> None:
    users = {
        path.parent for path in FILES if any(name.split(".")[0] == "flwr" for name in imports(path))
    }
    assert users == {SOURCE / "engines/flower"}
