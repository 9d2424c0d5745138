"""Names of the files of a run."""

RECIPE = "recipe.yaml"
SECRET = "secret"  # the file of the server's key, see `Execution.secret`
AUDIT, CANARIES = "audit", "canaries.json"  # a folder of the run, and the list in it
