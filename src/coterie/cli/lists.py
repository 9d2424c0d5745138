"""Commands that list: methods, recipes."""

from collections.abc import Mapping
from typing import Annotated

import typer

from coterie.cli.base import _stopping, app


@app.command("methods")
def list_methods() -> None:
    """List the methods, with the paper of each."""
    from coterie.methods import METHODS

    _list({name: entry.paper for name, entry in METHODS.items()})


@app.command("recipes")
def list_recipes(
    name: Annotated[
        str | None, typer.Argument(help="A shipped recipe to print as YAML.", show_default=False)
    ] = None,
) -> None:
    """List the shipped recipes, or print one as YAML: coterie recipes quickstart > mine.yaml."""
    from coterie.runs import recipes

    if name is not None:
        with _stopping("stopped."):
            print(recipes.find(name).read_text(encoding="utf-8"), end="")
        return
    _list({name: _about(name) for name in recipes.names()})


def _about(name: str) -> str:
    """Return a one-line description of a recipe, or why it cannot be read."""
    from coterie.core.errors import Refused
    from coterie.runs import recipes

    try:
        section = recipes.read(recipes.find(name))
    except Refused as error:
        return str(error).splitlines()[0]
    paper = section.get("paper")
    return f"{section.get('description', '')}" + (f" [{paper}]" if paper else "")


def _list(items: Mapping[str, str]) -> None:
    """Print names with their descriptions, wrapped at 80 columns."""
    from textwrap import wrap

    margin = max(map(len, items)) + 2
    for name, text in items.items():
        lines = wrap(text, 80 - margin, break_on_hyphens=False) or [""]
        print(f"{name:<{margin}}{lines[0]}".rstrip())
        for line in lines[1:]:
            print(" " * margin + line)
