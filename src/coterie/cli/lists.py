"""Commands that show what there is: methods, recipes, and the data of a run."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from textwrap import wrap
from typing import Annotated

import typer

from coterie.cli.base import Client, Set, Trust, _load, _stopping, app
from coterie.cli.completion import _recipes
from coterie.core.importing import uncollected


@app.command()
def data(
    source: Annotated[
        str,
        typer.Argument(
            help="A recipe, a folder with one folder per client, or a table that names clients."
        ),
    ],
    set_: Set = None,
    client: Client = None,
    examples: Annotated[int, typer.Option(min=0, help="Training rows shown of each client.")] = 1,
    files: Annotated[
        bool, typer.Option("--files", help="Name the splits of each file or row.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Look at the data of a recipe as a run would read them, without training: sizes, what is not
    read, what clients share, odd characters, and examples as the model sees them.
    """
    with _stopping("stopped."):
        from coterie.runs.problems import data_summary

        recipe = _load(source, set_, None)
        with uncollected():
            summary = data_summary.summary_of(recipe, examples, files, client)
        if as_json:
            print(json.dumps(asdict(summary), ensure_ascii=False, indent=1))
            return
        from rich.console import Console

        from coterie.reports.data import print_data

        print_data(Console(), summary)


@app.command("methods")
def list_methods() -> None:
    """List the methods by what they are for, with the paper of each."""
    from coterie.methods import METHODS

    margin = max(map(len, METHODS)) + 2
    for group, entries in groupby(METHODS.items(), lambda item: item[1].group):
        print(f"{group}:")
        _list({name: entry.paper for name, entry in entries}, margin)
        print()
    print("Which one to take, by data, clients, bytes and privacy: docs/methods/README.md")


@app.command("recipes")
def list_recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A shipped recipe to print as YAML.", show_default=False, autocompletion=_recipes
        ),
    ] = None,
) -> None:
    """List the shipped recipes, or print one as YAML: coterie recipes quickstart > mine.yaml."""
    from coterie.runs import recipes

    if name is not None:
        with _stopping("stopped."):
            print(recipes.find(name).read_text(encoding="utf-8"), end="")
        return
    names = recipes.names()
    _list({name: _about(name) for name in names}, max(map(len, names)) + 2)


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


def _list(items: Mapping[str, str], margin: int) -> None:
    """Print names with their descriptions, wrapped at 80 columns, which begin at `margin`."""
    for name, text in items.items():
        lines = wrap(text, 80 - margin, break_on_hyphens=False) or [""]
        print(f"{name:<{margin}}{lines[0]}".rstrip())
        for line in lines[1:]:
            print(" " * margin + line)
