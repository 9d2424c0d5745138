"""What a shell completes: runs, clients, recipes and methods."""

import os
from pathlib import Path


def _runs(incomplete: str) -> list[str]:
    """Return the runs under runs/, the newest first, for a shell's completion."""
    matches = sorted(Path("runs").glob("*/recipe.yaml"), key=lambda path: -path.stat().st_mtime)
    return [str(path.parent) for path in matches if str(path.parent).startswith(incomplete)]


def _clients(incomplete: str) -> list[str]:
    """Return the clients of the run that is named before, for a shell's completion."""
    from coterie.core.names import decoded

    # of bash, and of other shells; an option without its value hides the arguments before it
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    matches = (sorted(Path(word).glob("clients/*/client.json")) for word in line.split())
    names = [decoded(path.parent.name) for path in next(filter(None, matches), [])]
    return [name for name in names if name.startswith(incomplete)]


def _recipes(incomplete: str) -> list[str]:
    from coterie.runs import recipes

    return [name for name in recipes.names() if name.startswith(incomplete)]


def _methods(incomplete: str) -> list[str]:
    from coterie.methods import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]
