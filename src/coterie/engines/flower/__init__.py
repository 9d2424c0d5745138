"""Flower as the engine. No other folder imports `flwr`."""

from importlib.util import find_spec

from coterie.core.errors import Refused, extra

if find_spec("flwr") is None:  # pragma: no cover - the extra is not installed
    raise Refused("Flower is not installed", extra("flower"))
