"""coterie: personal models, trained together without sharing data.

Names are imported on first use, because importing torch takes seconds.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from coterie.core.version import __version__

if TYPE_CHECKING:
    from coterie.api import Run, compare, dry_run, run, tune
    from coterie.api.models import Served, adapt, data, export, pull, push, serve
    from coterie.core.callback import Callback
    from coterie.core.errors import CallbackError, CoterieError, Refused
    from coterie.core.result import ClientResult, Comparison, Result, Row, TunedRow, Tuning
    from coterie.personal import PersonalModel, evaluate, load, load_all, load_many
    from coterie.runs.estimate import Estimate
    from coterie.runs.recipes.recipe import Recipe

_HOMES = {
    "coterie.api": ("Run", "compare", "dry_run", "run", "tune"),
    "coterie.api.models": ("Served", "pull", "push", "serve"),
    "coterie.core.callback": ("Callback",),
    "coterie.core.errors": ("CallbackError", "CoterieError", "Refused"),
    "coterie.core.result": ("ClientResult", "Comparison", "Result", "Row", "TunedRow", "Tuning"),
    "coterie.personal": ("PersonalModel", "evaluate", "load", "load_all", "load_many"),
    "coterie.runs.estimate": ("Estimate",),
    "coterie.runs.recipes.recipe": ("Recipe",),
}
__all__ = [
    "Callback",
    "CallbackError",
    "ClientResult",
    "Comparison",
    "CoterieError",
    "Estimate",
    "PersonalModel",
    "Recipe",
    "Refused",
    "Result",
    "Row",
    "Run",
    "Served",
    "TunedRow",
    "Tuning",
    "__version__",
    "adapt",
    "compare",
    "data",
    "dry_run",
    "evaluate",
    "export",
    "load",
    "load_all",
    "load_many",
    "pull",
    "push",
    "run",
    "serve",
    "tune",
]
_CALLED = ("adapt", "data", "export")  # rooms of the package, and functions


class _Room(ModuleType):
    """A room that is called like the command of its name, and has its help."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.__wrapped__(*args, **settings)

    @property
    def __wrapped__(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module("coterie.api.models"), name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        doc: str | None = self.__wrapped__.__doc__
        return doc


class _Package(ModuleType):
    """This package, whose rooms of `_CALLED` become functions too when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED:
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name in _CALLED:
        return import_module(f"coterie.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
