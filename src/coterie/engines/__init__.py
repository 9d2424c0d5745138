"""Ways to carry requests and replies: in one process, in one process over bytes, over Flower.

Names are imported when asked for: the program of a device that hands its messages on needs no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engines.engine import Engine, Listener
    from coterie.engines.inprocess import ENGINES, InProcess, Loopback

__all__ = ["ENGINES", "Engine", "InProcess", "Listener", "Loopback"]
_IN_PROCESS = ("ENGINES", "InProcess", "Loopback")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "inprocess" if name in _IN_PROCESS else "engine"
    return getattr(import_module(f"coterie.engines.{module}"), name)
