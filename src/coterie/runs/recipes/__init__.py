"""Recipes: their fields, and the shipped ones by name: YAML files here and in installed packages.

A package provides one by an entry point of the group `coterie.recipes`, `NAME = "my_package"`: the
file `NAME.yaml` in that package.
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError, Refused
from coterie.core.foreign import yaml_file
from coterie.core.importing import installed

FOLDER = Path(__file__).parent
GROUP = "coterie.recipes"  # of the entry points
_LOOKED_AT = 1000  # files by which conversations are told


def names() -> list[str]:
    """Return the names of the shipped recipes, then of those of installed packages."""
    shipped = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [*shipped, *sorted(set(installed(GROUP)) - set(shipped))]


def find(recipe: str) -> Path:
    """Return the file of a shipped recipe, or of a path to a YAML file. Raises Refused."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if path.is_file() and path.suffix.lower() not in (".yaml", ".yml", ""):
            from coterie.data.rows import ENDINGS

            problem = f"{recipe} is neither a recipe nor a table that is read"
            tables = f"Tables end in {', '.join(ENDINGS)} (of Excel: save it as CSV UTF-8)"
            raise Refused(problem, f"{tables}; unpack a .zip file; a recipe is a .yaml file.")
        if not path.is_file():
            remedy = "Check the path, or name a shipped recipe: " + ", ".join(names())
            raise Refused(f"recipe {recipe}: no such file", remedy)
        return path
    if recipe not in names():
        problem = f"recipe {recipe!r}: there is no shipped recipe with that name"
        raise Refused(problem, "Choose one of: " + ", ".join(names()))
    shipped = FOLDER / f"{recipe}.yaml"
    return shipped if shipped.is_file() else _brought(recipe)


def section_of(source: str) -> dict[str, Any]:
    """Return the fields of a recipe: a shipped one, or of a YAML file or a run's folder; or for a
    folder with one folder per client, or a table that names clients. Raises Refused.
    """
    from coterie.data.rows import ending_of

    path = Path(source).expanduser()
    if source in names() or not (path.is_dir() or (ending_of(path.name) and path.is_file())):
        path = find(source)
    elif (path / "recipe.yaml").is_file():
        path = path / "recipe.yaml"
    else:
        name = "folders" if path.is_dir() else "table"
        section = read(FOLDER / f"{name}.yaml")
        data = section["data"]
        assert isinstance(data, dict)
        return {"name": name, **section, "data": {**data, "path": source}}
    return {"name": path.stem, **read(path)}


def with_content(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recipe's fields, with `data.content` by the files of its clients if not given."""
    data = section.get("data")
    if not isinstance(data, dict) or data.get("kind") not in ("folders", "table"):
        return section
    if "content" in data or not isinstance(data.get("path"), str):
        return section
    path = Path(data["path"]).expanduser()
    paths = [path] if path.is_file() else sorted(islice(path.glob("*/**/*"), _LOOKED_AT))
    return {**section, "data": {**data, "content": "chats"}} if _hold_chats(paths) else section


def _hold_chats(paths: list[Path]) -> bool:
    """Whether there is an archive, or the first table has the columns of conversations."""
    from coterie.data import archives
    from coterie.data.fetching import PLAIN
    from coterie.data.rows import CHATS, ending_of, rows_of

    with suppress(DataError, OSError):  # which the reader says better
        if archives.archives_in(paths):
            return True
        table = next((p for p in paths if p.is_file() and ending_of(p.name)), None)
        if table is not None and not any(p.suffix.lower() in PLAIN for p in paths):
            return not CHATS.isdisjoint(next((row for _, row in rows_of([table])), {}))
    return False


def _brought(recipe: str) -> Path:
    """Return the file of an installed package's recipe. Raises Refused."""
    package, folders = installed(GROUP)[recipe].value, list[str]()
    with suppress(ImportError):
        if (spec := find_spec(package)) is not None:
            folders = list(spec.submodule_search_locations or ())
    for folder in folders:
        if (path := Path(folder) / f"{recipe}.yaml").is_file():
            return path
    problem = f"recipe {recipe!r}: the installed package {package} has no file {recipe}.yaml"
    raise Refused(problem, "Reinstall the package, or ask its authors.")


def read(path: Path) -> dict[str, object]:
    """Return the mapping in a recipe's file. Raises Refused if it is unreadable or has none."""
    values = yaml_file(path, "recipe", "Check the path, or see `coterie recipes`.")
    if not isinstance(values, dict):
        problem = f"recipe {path}: not a mapping of sections"
        raise Refused(problem, "It needs at least `data:` and `method:`.")
    return values
