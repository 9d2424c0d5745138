"""coterie: personal models, trained together without sharing data."""

from typing import TYPE_CHECKING, Any

from coterie.core.version import __version__

if TYPE_CHECKING:
    from coterie.personal import load, load_all, load_many
__all__ = ["__version__", "load", "load_all", "load_many"]


def __getattr__(name: str) -> Any:
    """What is loaded by `coterie.personal`, imported when asked for: torch takes seconds."""
    if name in ("load", "load_all", "load_many"):
        from coterie import personal

        return getattr(personal, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
