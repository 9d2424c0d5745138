"""The contract of a method (`base`), families (`templates`), one file for each method, their names.

The names are what `coterie methods` lists and `method.name` of a recipe may be. Each is imported
when it is asked for: a list of their names needs no torch. Your own method has the name of its
module and class, `my_package.my_file:MyMethod`; a method of an installed package is an entry point
of the group `coterie.methods`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.foreign import read_text, yaml_of
from coterie.core.importing import imported, installed, is_own, own_name, package_of

if TYPE_CHECKING:
    from coterie.methods.base import Method


@dataclass(frozen=True)
class Entry:
    """A name on the command line."""

    home: str  # the class, `file.Class` in this room, or `module:Class` anywhere
    title: str  # in tables and figures
    paper: str  # its source
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that the name fixes
    group: str = "Of other packages"  # in lists

    @cached_property
    def method(self) -> "type[Method]":
        """The class."""
        home = self.home if ":" in self.home else f"{__name__}.{self.home.replace('.', ':')}"
        module, _, name = home.partition(":")
        method_class: type[Method] = getattr(import_module(module), name)
        return method_class


@cache
def _shipped() -> Mapping[str, Entry]:
    """Return the shipped methods by name."""
    groups = yaml_of(read_text(Path(__file__).with_name("methods.yaml")))
    return {
        name: Entry(**fields, group=group)
        for group, entries in groups.items()
        for name, fields in entries.items()
    }


GROUP = "coterie.methods"  # of the entry points
_SIZES = re.compile(r"comigs-(\d{1,2})g(\d{1,2})s")  # as the parts of `comigs-auto` are called


class _Methods(Mapping[str, Entry]):
    """The shipped methods, those of installed packages, and any other by its module and class."""

    def __iter__(self) -> Iterator[str]:
        yield from _shipped()
        yield from (name for name in installed(GROUP) if name not in _shipped())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Entry:
        if name in _shipped():
            return _shipped()[name]
        if sizes := _SIZES.fullmatch(name):
            fixed = dict(zip(("generalists", "specialists"), map(int, sizes.groups()), strict=True))
            title = f"CoMiGS-{name.removeprefix('comigs-').upper()}"
            return replace(_shipped()["comigs"], title=title, fixed=fixed)
        if name in installed(GROUP):
            point = installed(GROUP)[name]
            return _entry(point.value, package_of(point))
        if is_own(name) and import_problem(name) is None:
            return _entry(name, f"{name.partition(':')[0]}, a method of one's own")
        raise KeyError(name)


METHODS: Mapping[str, Entry] = _Methods()


@cache
def import_problem(name: str) -> str | None:
    """Import `module:Class`, also from the current folder; return why it is no method, or None."""
    from coterie.methods.base import Method

    try:
        candidate = imported(name)
    except ImportError as error:
        return str(error)
    if isinstance(candidate, type) and issubclass(candidate, Method):
        return None
    return f"{name.partition(':')[2]} is not a subclass of coterie.methods.Method"


def name_of(method: "str | type[Method]") -> str:
    """Return the name of a method, given by its class or name."""
    return method if isinstance(method, str) else own_name(method)


@cache
def _entry(home: str, paper: str) -> Entry:
    return Entry(home, home.partition(":")[2], paper)


__all__ = ["GROUP", "METHODS", "Entry", "Method", "import_problem", "is_own", "name_of"]


def __getattr__(name: str) -> Any:
    """Return `Method`, imported when asked for."""
    if name == "Method":
        return import_module("coterie.methods.base").Method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
