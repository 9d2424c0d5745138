"""The method of a recipe's `method` section, and its validation."""

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from coterie.core.importing import is_own
from coterie.methods import METHODS, Method, import_problem


def build_method(section: Mapping[str, Any]) -> Method:
    """Return the method of a recipe's `method` section. Raises ValueError if `name` is missing or
    unknown or fixes a given field; pydantic.ValidationError if a field is unknown or out of range.
    """
    name = section.get("name")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            "method.name: "
            + ("missing; see `coterie methods`" if name is None else unknown_method(str(name)))
        )
    entry = METHODS[name]
    given = {key: value for key, value in section.items() if key != "name"}
    for key, value in entry.fixed.items():
        if key in given and given[key] != value:
            raise ValueError(
                f"method.{key}: {name} fixes it to {value!r}, found {given[key]!r}; use name: "
                f"comigs to choose it"
            )
    return _adapter(entry.method).validate_python(given | dict(entry.fixed))


@lru_cache(maxsize=64)
def _adapter(kind: type[Method]) -> TypeAdapter[Method]:
    """Return the cached validator of a method's fields, which is slow to build."""
    return TypeAdapter(kind)


def unknown_method(name: str) -> str:
    """Return the message for an unknown method, with a suggestion."""
    if is_own(name):
        return f"{name!r} is not a method: {import_problem(name)}"
    close = difflib.get_close_matches(name, METHODS, n=1)
    return f"there is no method {name!r}" + (
        f", did you mean {close[0]}?" if close else "; see `coterie methods`"
    )
