"""Import of the theorems' experiments: the package `theorems` at the top of a checkout, which an
installed copy does not have.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from coterie.core.errors import Refused

PACKAGE = "theorems"
NAMES = ("comigs/theorem-2.1", "comigs/theorem-g.2", "cobo/theorem-1", "ddome/theorem-1")


def checkout() -> Path | None:
    """Return the checkout that this file is in, if it has the theorems; otherwise None."""
    source = Path(__file__).resolve().parents[2]
    there = source.name == "src" and (source.parent / PACKAGE / "__init__.py").is_file()
    return source.parent if there else None


def load(name: str) -> ModuleType:
    """Import the theorems' package, needed for `name`. Raises Refused if this is not a checkout."""
    folder = checkout()
    if folder is None:
        raise Refused(
            f"{name} needs a checkout of the repository: the theorems' experiments are not "
            f"installed",
            f"Clone the repository with git, and there: pip install -e '.[scipy]', then coterie "
            f"reproduce {name}",
        )
    # Only while importing: the checkout has other folders whose names libraries have, too.
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(str(folder))
