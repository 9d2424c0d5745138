"""Recipes by their names: YAML files in this folder, and those that installed packages bring.

A package brings one by an entry point of the group `coterie.recipes`, `NAME = "my_package"`: it is
the file `NAME.yaml` in that package.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from coterie.core.errors import Refused
from coterie.core.own import installed

FOLDER = Path(__file__).parent
GROUP = "coterie.recipes"  # of the entry points
LARGEST = 1_000_000  # characters of a recipe
_MOST, _DEEPEST = (
    100_000,
    50,
)  # values of a recipe, and of sections within sections; aliases count as what they stand for


def names() -> list[str]:
    """Return the names of the shipped recipes, and then of those that installed packages bring."""
    shipped = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [*shipped, *sorted(set(installed(GROUP)) - set(shipped))]


def find(recipe: str) -> Path:
    """Return the file of a shipped recipe, or of a path to a YAML file.

    Raises:
        Refused: There is neither.
    """
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise Refused(
                f"recipe {recipe}: no such file",
                "Check the path, or name a shipped recipe: " + ", ".join(names()),
            )
        return path
    if recipe not in names():
        raise Refused(
            f"recipe {recipe!r}: there is no shipped recipe with that name",
            "Choose one of: " + ", ".join(names()),
        )
    own = FOLDER / f"{recipe}.yaml"
    return own if own.is_file() else _brought(recipe)


def _brought(recipe: str) -> Path:
    """Return the file of a recipe that an installed package brings. Raises Refused."""
    package = installed(GROUP)[recipe].value
    try:
        spec = find_spec(package)
    except ImportError:
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        if (path := Path(folder) / f"{recipe}.yaml").is_file():
            return path
    raise Refused(
        f"recipe {recipe!r}: the installed package {package} has no file {recipe}.yaml",
        "Reinstall the package, or ask its authors.",
    )


def parse(text: str) -> Any:
    """Return what a text in YAML says, if it is no longer and no deeper than a recipe can be.

    Raises:
        ValueError: It is not YAML, has a value that is none (a month 99, a number of 5,000 digits),
            or is too large.
    """
    if len(text) > LARGEST:
        raise ValueError(f"{len(text):,} characters, a recipe has at most {LARGEST:,}")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {}, 0)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"sections nested more than {_DEEPEST} deep") from None
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # of yaml's readers of dates and such
        raise ValueError(str(error)) from None


def _measure(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """How many values a node stands for. Raises ValueError for too many, and RecursionError for
    one within itself.
    """
    if depth > _DEEPEST:
        raise RecursionError
    if (found := known.get(id(node))) is not None:
        return found
    inner = (
        [n for pair in node.value for n in pair]
        if isinstance(node, yaml.MappingNode)
        else node.value
    )
    size = (
        1 + sum(_measure(n, known, depth + 1) for n in inner)
        if isinstance(node, yaml.CollectionNode)
        else 1
    )
    if size > _MOST:
        raise ValueError(f"aliases that stand for more than {_MOST:,} values")
    known[id(node)] = size
    return size


def read(path: Path) -> dict[str, object]:
    """Return the mapping in a recipe's file.

    Raises:
        Refused: It cannot be read, is not YAML, is too large, or not a mapping.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = parse(file.read(LARGEST + 1))
    except OSError as error:
        raise Refused(
            f"recipe {path}: cannot be read ({error.strerror})",
            "Check the path and its permissions.",
        ) from None
    except ValueError as error:
        raise Refused(
            f"recipe {path}: not valid YAML\n  {error}",
            "See `coterie recipes` for recipes to start from.",
        ) from None
    if not isinstance(found, dict):
        raise Refused(
            f"recipe {path}: not a mapping of sections", "It needs at least `data:` and `method:`."
        )
    return found
