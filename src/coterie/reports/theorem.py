"""What an experiment on a theorem shows: its claims with their verdicts, its numbers, and its picture."""

import io
from dataclasses import asdict
from html import escape
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from coterie.records import write_json
from coterie.reports.parts import page, section, table, verdicts
from coterie.tensors import write_atomically
from coterie.theory import Experiment


def show(console: Console, experiment: Experiment, stem: Path) -> None:
    """Print an experiment, and write it as `<stem>.json` and as a self-contained `<stem>.html`.

    Args:
        console: Where to.
        experiment: What was found.
        stem: Of the files.

    Raises:
        SaveError: They could not be written.
    """
    console.print(f"\n{experiment.title}", style="bold", highlight=False)
    numbers = Table(box=SIMPLE, pad_edge=False)
    for k, name in enumerate(experiment.table.columns):
        numbers.add_column(name, justify="right" if k else "left", overflow="fold")
    for row in experiment.table.rows:
        numbers.add_row(*map(_text, row))
    console.print(numbers)
    for claim in experiment.claims:
        verdict = "[green]holds[/]" if claim.holds else "[yellow]does not hold[/]"
        console.print(f"{verdict}  {escape_markup(claim.text)}", highlight=False)
        console.print(f"       {claim.detail}", style="dim", markup=False, highlight=False)
    write_json(stem.with_name(f"{stem.name}.json"), asdict(experiment))
    write_atomically(stem.with_name(f"{stem.name}.html"), _page(experiment))


def escape_markup(text: str) -> str:
    """Text of which nothing is taken for rich's markup."""
    return text.replace("[", r"\[")


def _text(cell: str | float) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _page(experiment: Experiment) -> bytes:
    numbers = [[_text(cell) for cell in row] for row in experiment.table.rows]
    parts = (
        section("picture", "Picture", f'<div class="wide">{_picture(experiment)}</div>'),
        section("claims", "Claims", verdicts((claim.holds, claim.text, claim.detail) for claim in experiment.claims)),
        section("numbers", "Numbers", table(list(experiment.table.columns), numbers)),
    )
    header = f"<header><h1>{escape(experiment.title)}</h1><p class=about>{escape(experiment.source)}</p></header>"
    return page(experiment.title, f"{header}<main>{''.join(parts)}</main>")


def _picture(experiment: Experiment) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(experiment.panels), 4.8), layout="constrained")
    experiment.draw(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
