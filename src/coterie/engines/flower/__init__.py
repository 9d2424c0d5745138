"""Flower as the engine. No other folder imports `flwr`."""

from coterie.core.importing import require

require("the engine flower", "flower", "flwr")

# In a run's environment: the file that it touches once it has sent messages to devices. The proxy,
# which holds their questions for messages, looks at it.
POSTED = "COTERIE_POSTED"
