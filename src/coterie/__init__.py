"""coterie: personal models, trained together without sharing data."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.personal import load, load_all

__version__ = "0.1.0"
__all__ = ["__version__", "load", "load_all"]


def __getattr__(name: str) -> Any:
    """`load` and `load_all` of `coterie.personal`, imported when asked for: torch takes seconds."""
    if name in ("load", "load_all"):
        from coterie import personal

        return getattr(personal, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
