"""Extensions: classes named `my_package.my_file:MyClass`, and entry points of packages."""

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points


def is_own(name: object) -> bool:
    """Return whether a name has the form `module:Class`."""
    return isinstance(name, str) and ":" in name


def own_name(kind: type) -> str:
    """Return the name of a class, `module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group that installed packages declare, by their names."""
    return {point.name: point for point in entry_points(group=group)}


def package_of(point: EntryPoint) -> str:
    """Return the name and version of the package that declares an entry point."""
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def imported(name: str) -> object:
    """Import `module:Class`, also from the current folder. Raises ImportError with the reason."""
    if "" not in sys.path:
        sys.path.append("")
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ImportError(f"{type(error).__name__}: {error}") from error
