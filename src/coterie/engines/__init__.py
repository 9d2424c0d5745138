"""The engines by name: what `engine` of a recipe may be."""

from coterie.engines.engine import Engine, Observe
from coterie.engines.inprocess import InProcess
from coterie.engines.loopback import Loopback

ENGINES = {"inprocess": InProcess, "loopback": Loopback}

__all__ = ["ENGINES", "Engine", "Observe"]
