"""Names of the files of a run."""

from typing import Any

RECIPE, COMPARISON, ROUTING = "recipe.yaml", "comparison.json", "routing.json"
SECRET = "secret"  # the file of the server's key, see `Execution.secret`
AUDIT, CANARIES = "audit", "canaries.json"  # a folder of the run, and the list in it
Json = dict[str, Any]
