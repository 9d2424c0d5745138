"""Shipped recipes: YAML files in this folder, found by their names."""

from pathlib import Path

import yaml

from coterie.errors import Refused

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(recipe: str) -> Path:
    """The file of a shipped recipe, or of a path to a YAML file.

    Raises:
        Refused: There is neither.
    """
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise Refused(f"recipe {recipe}: no such file", "Check the path, or name a shipped recipe: " + ", ".join(names()))
        return path
    if recipe not in names():
        raise Refused(f"recipe {recipe!r}: there is no shipped recipe of that name", "Choose one of: " + ", ".join(names()))
    return FOLDER / f"{recipe}.yaml"


def read(path: Path) -> dict[str, object]:
    """The mapping in a recipe's file.

    Raises:
        Refused: It is not YAML, or not a mapping.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"recipe {path}: not valid YAML\n  {error}", "See `coterie recipes` for recipes to start from.") from None
    if not isinstance(found, dict):
        raise Refused(f"recipe {path}: not a mapping of sections", "It needs at least `data:` and `method:`.")
    return found
