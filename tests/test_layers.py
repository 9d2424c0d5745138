"""Each room imports only from those before it, no files import each other in a circle, and
Flower's names stay in one folder.
"""

import ast
import re
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
    {"engines"},
    {"runs"},  # the loop: no page, no keyboard and no server is below this line
    {"reports"},
    {"personal"},
    {"adapt"},
    {"audit", "deploy", "export"},
    {"api"},
    {"papers"},
    # The suite for methods runs them as commands do, on every engine: nothing is built on it.
    {"cli", "testing"},
]
# Names that this project once used and no other does, with what stands for them now. They may not
# be defined again, as a class, a function, a field or a constant.
RENAMED = {
    "Doorman": "JoinWarnings",
    "Owners": "Site",
    "Place": "Backend",
    "OnThisMachine": "LocalBackend",
    "OnDevices": "DeviceBackend",
    "places": "expert_slots",
    "hold": "bind_experts",
    "NUMBERS": "EXPERT_IDS",
    "forget": "reset_optimizer",
    "forgetful": "stateless",
    "elastic": "dynamic_membership",
    "universal": "serves_unseen_clients",
    "back": "reply_spec",
    "same": "as_sent",
    "nothing": "empty_reply",
    "mix": "derive_seed",
    "Cohort": "ClientBatch",
    "Dealing": "Partitioner",
    "Deal": "Partition",
    "Part": "ClientShare",
    "deal": "assign_experts",
    "seen_from_afar": "prepare_remote",
    "Modality": "LearningProblem",
    "modality": "problem",
    "pooled": "centralized",
    "POOL": "CENTRALIZED",
    "parcel": "download_for",
    "again": "independent_stream",
    "parted": "unflatten",
    "Here": "Engine",
    "badness": "sort_key",
    "front": "open_proxy",
    "Front": "Proxy",
}
# The same of methods alone: elsewhere these are plain words.
RENAMED_HOOKS = {"sums": "needs_only_mean", "shares": "row_stochastic", "size": "sample_count"}
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The room in which functions may import what imports their file: commands need the `app`.
TOP_LEVEL_ONLY = {"cli"}
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
    return path.relative_to(SOURCE).with_suffix("").parts[0]


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
    """Within functions and for type checking neither, but in `TOP_LEVEL_ONLY`."""
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        top_level = ast.parse(path.read_text(encoding="utf-8")).body
        found = imports(path, top_level if room_of(path) in TOP_LEVEL_ONLY else None)
        graph[module] = (
            {name if name in modules else name.rpartition(".")[0] for name in found}
            & modules.keys()
        ) - {module}
    del graph["coterie.cli"]  # whose files need the `app` that it offers
    TopologicalSorter(graph).prepare()


def test_methods_import_nothing_of_each_other_but_what_they_extend() -> None:
    families = ("base", "templates", "pairwise", "pools", "pool_choice", "parts", "section")
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


def defined(tree: ast.Module) -> set[str]:
    """Names of the classes and functions of a file, and of what its classes and itself assign."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        for part in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            if isinstance(part, ast.AnnAssign | ast.Assign):
                targets = [part.target] if isinstance(part, ast.AnnAssign) else part.targets
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_names_that_were_replaced_do_not_return() -> None:
    for path in FILES:
        renamed = RENAMED | (RENAMED_HOOKS if room_of(path) == "methods" else {})
        names = defined(ast.parse(path.read_text(encoding="utf-8")))
        again = {f"{name}: say {renamed[name]}" for name in names & renamed.keys()}
        assert not again, f"{path}: {sorted(again)}"
        assert not [name for name in names if name.endswith("_together")], path


def test_a_method_is_no_longer_than_its_algorithm_needs() -> None:
    """The contract, the families and the list of methods are no methods."""
    others = {"__init__", "base", "templates", "pairwise", "pools", "parts", "section"}
    long = {
        path.name: lines
        for path in (SOURCE / "methods").glob("*.py")
        if path.stem not in others
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > 150
    }
    assert not long


def test_a_comprehension_has_at_most_two_clauses() -> None:
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                clauses = sum(1 + len(part.ifs) for part in node.generators)
                assert clauses <= 2, f"{path}:{node.lineno}: write a loop, or a generator"


MOST_LINES = 400
REASON = re.compile(r"This file is longer than 400 lines because \w+")


def too_long(source: str) -> bool:
    """Whether a file has more lines than it should, and does not say why at its top."""
    says = REASON.search(" ".join((ast.get_docstring(ast.parse(source)) or "").split()))
    return len(source.splitlines()) > MOST_LINES and not says


def test_files_are_short_or_say_why_not() -> None:
    long = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if too_long(path.read_text(encoding="utf-8"))
    }
    assert not long, "split them, or say why they are longer"


def test_a_reason_for_a_long_file_is_looked_for_at_its_top() -> None:
    lines, reason = "x = 1\n" * 400, "This file is longer than 400 lines because it is a table."
    assert not too_long(lines)
    assert too_long(f"{lines}x = 1\n")
    assert too_long(f'"""A table."""\n{lines}')
    assert too_long(f'"""A table."""\n# {reason}\n{lines}')
    assert not too_long(f'"""A table.\n\n{reason}\n"""\n{lines}')
