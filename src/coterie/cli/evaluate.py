"""The command that scores personal models on given data."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.base import Base, Clients, Run, Trust, _stopping, app


@app.command()
def evaluate(
    run: Run,
    data: Annotated[
        Path,
        typer.Option(help="A text, conversations, or JSON lines of questions: a file or a folder."),
    ],
    client: Clients = None,
    words: Annotated[
        int, typer.Option(min=0, help="Words of a text on which suggestions are scored.")
    ] = 100,
    json_: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    base: Base = None,
    trust_remote_code: Trust = False,
) -> None:
    """Score clients' models on any text (perplexity, words foreseen, keystrokes saved), or on a
    task: choices by likelihood, answers by exact match.
    """
    with _stopping():
        from coterie import personal
        from coterie.reports.tables import evaluated

        scores = personal.evaluate(run, data, client, words=words, base=base)
        if json_:
            print(json.dumps({i: of.to_json() for i, of in scores.items()}, indent=2))
            return
        from rich.console import Console

        Console().print(evaluated(scores))
