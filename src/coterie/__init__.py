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
    from coterie.personal import load, load_all, load_many
    from coterie.runs.estimate import Estimate
    from coterie.runs.recipes.recipe import Recipe

_HOMES = {
    "Callback": "coterie.core.callback",
    "CallbackError": "coterie.core.errors",
    "ClientResult": "coterie.core.result",
    "Comparison": "coterie.core.result",
    "CoterieError": "coterie.core.errors",
    "Estimate": "coterie.runs.estimate",
    "Recipe": "coterie.runs.recipes.recipe",
    "Refused": "coterie.core.errors",
    "Result": "coterie.core.result",
    "Row": "coterie.core.result",
    "Run": "coterie.api",
    "TunedRow": "coterie.core.result",
    "Tuning": "coterie.core.result",
    "compare": "coterie.api",
    "dry_run": "coterie.api",
    "load": "coterie.personal",
    "load_all": "coterie.personal",
    "load_many": "coterie.personal",
    "run": "coterie.api",
    "tune": "coterie.api",
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
    "load",
    "load_all",
    "load_many",
    "run",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
