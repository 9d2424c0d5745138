"""Classes that do not come with coterie, by the name of their module and class:
`my_package.my_file:MyClass`.
"""

import sys
from functools import cache
from importlib import import_module


def is_own(name: object) -> bool:
    """Return whether a name is that of a module and a class in it."""
    return isinstance(name, str) and ":" in name


@cache
def imported(name: str) -> object:
    """Import `module:Class`, also from the folder that one works in.

    Raises:
        ImportError: Saying what went wrong.
    """
    if "" not in sys.path:
        sys.path.append("")
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ImportError(f"{type(error).__name__}: {error}") from error
