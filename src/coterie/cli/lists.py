"""Commands that list: methods, recipes."""

from collections.abc import Mapping
from typing import Annotated

import typer

from coterie.cli.base import _stopping, app


@app.command("methods")
def list_methods() -> None:
    """List the methods, one line each, with where they come from."""
    from coterie.methods import METHODS

    _list({name: entry.paper for name, entry in METHODS.items()})


@app.command("recipes")
def list_recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="A shipped recipe, whose YAML is printed.", show_default=False),
    ] = None,
) -> None:
    """List the shipped recipes, one line each; or print the YAML of one, to start from: coterie
    recipes quickstart > mine.yaml.
    """
    from coterie.runs import recipes

    if name is not None:
        with _stopping("stopped."):
            print(recipes.find(name).read_text(encoding="utf-8"), end="")
        return
    found = {name: recipes.read(recipes.find(name)) for name in recipes.names()}
    _list(
        {
            n: f"{s.get('description', '')}" + (f" [{s['paper']}]" if s.get("paper") else "")
            for n, s in found.items()
        }
    )


def _list(items: Mapping[str, str]) -> None:
    """Print names and what they are, within 80 columns: what is longer goes on below."""
    from textwrap import wrap

    margin = max(map(len, items)) + 2
    for name, text in items.items():
        lines = wrap(text, 80 - margin, break_on_hyphens=False) or [""]
        print(f"{name:<{margin}}{lines[0]}".rstrip())
        for line in lines[1:]:
            print(" " * margin + line)
