"""Flower as the engine. No other folder imports `flwr`."""

from importlib.util import find_spec

from coterie.core.errors import Refused, extra

if find_spec("flwr") is None:  # pragma: no cover - the extra is not installed
    raise Refused("Flower is not installed", extra("flower"))

# In a run's environment: the file that it touches once it has sent messages to devices. The proxy,
# which holds their questions for messages, looks at it.
POSTED = "COTERIE_POSTED"
