"""Each room imports only from those below it, and Flower's names stay in one file."""

import ast
from pathlib import Path

import coterie

SOURCE = Path(coterie.__file__).parent
# From the ground up. A room may import from its own line and from those before it; `protocol` and `roles` are one room.
ROOMS = [
    {"errors", "names", "printing", "tensors"},
    {"profiling", "threads"},
    {"limits"},
    {"theory"},
    {"protocol", "roles"},
    {"data"},
    {"models"},
    {"optimisers"},
    {"attackers"},
    {"aggregation"},
    {"account"},
    {"client"},
    {"cohort"},
    {"methods"},
    {"engines"},
    {"evaluation", "observations", "records"},
    {"recipes"},
    {"reproductions"},
    {"reports"},
    {"personal"},
    {"recipe"},
    {"modality"},
    {"prepared"},
    {"inputs"},
    {"device"},
    {"estimate"},
    {"places"},
    {"run"},
    {"personalise"},
    {"adapt", "audit", "reproduce"},
    {"apps"},
    {"front", "keys"},
    {"deploy"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def imports(path: Path) -> set[str]:
    """Dotted names of everything of ours that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_file_has_a_room() -> None:
    assert {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__", "__main__"} == LEVEL.keys()


def test_rooms_import_only_from_those_above_them_in_the_plan() -> None:
    for path in SOURCE.rglob("*.py"):
        if room_of(path) in ("__init__", "__main__"):
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "coterie" and len(parts) > 1 and parts[1] in LEVEL:
                assert LEVEL[parts[1]] <= LEVEL[room_of(path)], f"{path.relative_to(SOURCE)} imports {name}"


def test_methods_import_nothing_of_each_other_but_what_they_extend() -> None:
    for path in (SOURCE / "methods").glob("*.py"):
        if path.stem in ("__init__", "method"):
            continue
        extended = {
            base.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name)
        }
        others = {n for n in imports(path) if n.startswith("coterie.methods.") and not n.startswith("coterie.methods.method.")}
        assert {name.rpartition(".")[2] for name in others} <= extended, f"{path.name}: {others}"


def test_flower_stays_in_one_file_and_its_older_interface_in_another() -> None:
    users = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if any(n.split(".")[0] == "flwr" for n in imports(path))}
    assert users <= {"engines/flower.py", "engines/secagg.py"}
