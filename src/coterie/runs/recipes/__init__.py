"""Recipes: their fields, and the shipped ones by name: YAML files here and in installed packages.

A package provides one by an entry point of the group `coterie.recipes`, `NAME = "my_package"`: the
file `NAME.yaml` in that package.
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from coterie.core.errors import Refused
from coterie.core.foreign import yaml_file
from coterie.core.own import installed

FOLDER = Path(__file__).parent
GROUP = "coterie.recipes"  # of the entry points


def names() -> list[str]:
    """Return the names of the shipped recipes, then of those of installed packages."""
    shipped = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [*shipped, *sorted(set(installed(GROUP)) - set(shipped))]


def find(recipe: str) -> Path:
    """Return the file of a shipped recipe, or of a path to a YAML file. Raises Refused."""
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
    shipped = FOLDER / f"{recipe}.yaml"
    return shipped if shipped.is_file() else _brought(recipe)


def _brought(recipe: str) -> Path:
    """Return the file of an installed package's recipe. Raises Refused."""
    package, folders = installed(GROUP)[recipe].value, list[str]()
    with suppress(ImportError):
        if (spec := find_spec(package)) is not None:
            folders = list(spec.submodule_search_locations or ())
    for folder in folders:
        if (path := Path(folder) / f"{recipe}.yaml").is_file():
            return path
    raise Refused(
        f"recipe {recipe!r}: the installed package {package} has no file {recipe}.yaml",
        "Reinstall the package, or ask its authors.",
    )


def read(path: Path) -> dict[str, object]:
    """Return the mapping in a recipe's file. Raises Refused if it is unreadable or has none."""
    values = yaml_file(path, "recipe", "Check the path, or see `coterie recipes`.")
    if not isinstance(values, dict):
        raise Refused(
            f"recipe {path}: not a mapping of sections", "It needs at least `data:` and `method:`."
        )
    return values
