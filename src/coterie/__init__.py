"""coterie: personal models, trained together without sharing data.

Names are imported on first use, because importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie.core.version import __version__

if TYPE_CHECKING:
    from coterie.api import Run, compare, dry_run, run, tune
    from coterie.core.callback import Callback
    from coterie.core.errors import CallbackError, CoterieError, Refused
    from coterie.core.result import ClientResult, Comparison, Result, Row, TunedRow, Tuning
    from coterie.personal import evaluate, load, load_all, load_many
    from coterie.runs.estimate import Estimate
    from coterie.runs.recipes.recipe import Recipe

_HOMES = {
    "coterie.api": ("Run", "compare", "dry_run", "run", "tune"),
    "coterie.core.callback": ("Callback",),
    "coterie.core.errors": ("CallbackError", "CoterieError", "Refused"),
    "coterie.core.result": ("ClientResult", "Comparison", "Result", "Row", "TunedRow", "Tuning"),
    "coterie.personal": ("evaluate", "load", "load_all", "load_many"),
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
    "Recipe",
    "Refused",
    "Result",
    "Row",
    "Run",
    "TunedRow",
    "Tuning",
    "__version__",
    "compare",
    "dry_run",
    "evaluate",
    "load",
    "load_all",
    "load_many",
    "run",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
