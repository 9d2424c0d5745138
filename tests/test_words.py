"""Variables are named after what they hold: some names say nothing, and are forbidden."""

import ast
from pathlib import Path

import coterie

FORBIDDEN = frozenset(
    ["found", "told", "said", "own", "asked", "made", "wanted", "lacking", "gone", "anew"]
)
PACKAGE = Path(coterie.__file__).parent
THEOREMS = PACKAGE.parents[1] / "theorems"


def bound_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of all variables, attributes, parameters, functions, classes and constants;
    fields of classes, which are read with their class in view, apart.
    """
    fields = {
        id(statement.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.lineno, node.name))
        if isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in fields
        ):
            names.append((node.lineno, node.id))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.attr))
    return names


def forbidden(text: str) -> list[str]:
    return [
        f"{line}: {name}"
        for line, name in bound_names(ast.parse(text))
        if name.strip("_").lower() in FORBIDDEN
    ]


def test_no_name_is_one_of_those_that_say_nothing() -> None:
    paths = [*PACKAGE.rglob("*.py"), *THEOREMS.rglob("*.py")]
    assert len(paths) > 300
    problems = [f"{path}:{name}" for path in paths for name in forbidden(path.read_text())]
    assert problems == []


def test_such_names_are_seen_wherever_they_are_bound() -> None:
    text = (
        "class Found:\n    own: int\n\n"
        "def _told(asked, *, made=0):\n    self.said = [gone for gone in asked]\n"
    )
    assert {line.split(": ")[1] for line in forbidden(text)} == {
        "Found", "_told", "asked", "made", "said", "gone",
    }  # fmt: skip
