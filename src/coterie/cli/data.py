"""The command that summarises data before training: data."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.base import Client, Set, Trust, _load, _stopping, app
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
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page (HTML), too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Look at the data of a recipe as a run would read them, without training: sizes, what is not
    read, what clients share, odd characters, and examples as the model sees them.
    """
    with _stopping("stopped."):
        from coterie.core.files import write_atomically
        from coterie.runs.problems import data_summary

        name, settings = data_summary.recipe_for(source)
        recipe = _load(name, [*settings, *(set_ or ())], None)
        with uncollected():
            summary = data_summary.summary_of(recipe, examples, files, client)
        if page is not None:
            from coterie.reports.data import data_page

            write_atomically(page, data_page(f"Data of {source}", summary))
        if as_json:
            print(json.dumps(asdict(summary), ensure_ascii=False, indent=1))
            return
        from rich.console import Console

        from coterie.reports.data import print_data

        print_data(Console(), summary)
        if page is not None:
            print(f"The page is {page}.")
