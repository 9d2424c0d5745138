"""What an experiment on a theorem shows: its claims with their verdicts, its numbers, and its
pictures.
"""

from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from coterie.core.files import write_atomically, write_json
from coterie.reports import chart
from coterie.reports.chart import Line, Style
from coterie.reports.parts import COLOURS, page, section, table, verdicts
from coterie.reports.tables import verdicts as print_verdicts
from theorems.experiment import Claim, Experiment, Panel
from theorems.mathematics import plain, typeset


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
        numbers.add_column(plain(name), justify="right" if k else "left", overflow="fold")
    for row in experiment.table.rows:
        numbers.add_row(*(plain(_text(cell)) for cell in row))
    console.print(numbers)
    for heading, claims in _kinds(experiment):
        console.print(heading, style="bold", highlight=False)
        print_verdicts(
            console, ((claim.holds, plain(claim.text), plain(claim.detail)) for claim in claims)
        )
    write_json(stem.with_name(f"{stem.name}.json"), plain(asdict(experiment)))
    write_atomically(stem.with_name(f"{stem.name}.html"), experiment_page(experiment))


def _text(cell: str | float) -> str:
    return _rounded(cell) if isinstance(cell, float) else str(cell)


def _rounded(value: float) -> str:
    """Three digits; of a share close to 1, as many as tell it from 1."""
    return f"{value:.6f}" if 0.9995 <= value < 1 else f"{value:.3g}"


def _kinds(experiment: Experiment) -> list[tuple[str, list[Claim]]]:
    """Return the paper's claims, and what was found beside them."""
    kinds = {"What the paper says": False, "What was found beside it": True}
    return [
        (title, [claim for claim in experiment.claims if claim.beside is beside])
        for title, beside in kinds.items()
    ]


def experiment_page(experiment: Experiment) -> bytes:
    """Return the page of an experiment: one file without anything from elsewhere."""
    numbers = [[_text(cell) for cell in row] for row in experiment.table.rows]
    parts = [
        section(
            "picture",
            "Picture",
            chart.grid([picture(panel) for panel in experiment.panels], broad=True),
        )
    ]
    for k, (title, claims) in enumerate(_kinds(experiment)):
        parts.append(
            section(
                f"claims-{k}",
                title,
                verdicts(((claim.holds, claim.text, claim.detail) for claim in claims), typeset),
            )
        )
    columns = list(experiment.table.columns)
    parts.append(section("numbers", "Numbers", table(columns, numbers, typeset=typeset)))
    about = f"{experiment.source}. Numbers in brackets are the paper's equations."
    return page(experiment.title, f"<p class=about>{typeset(about)}</p>", "".join(parts))


def picture(panel: Panel) -> str:
    """Return a panel with its legend. Names of axes and curves hold mathematics, and so stand
    around the SVG, not within it.
    """
    looks = [
        Style(
            COLOURS[c.colour], int(c.dashed), marked=not c.dashed and len(c.values) <= chart.MARKED
        )
        for c in panel.curves
    ]
    lines = [
        Line(list(enumerate(c.values)), plain(c.label), look)
        for c, look in zip(panel.curves, looks, strict=True)
    ]
    samples = "".join(
        f"<li>{look.sample} <span>{typeset(c.label)}</span></li>"
        for c, look in zip(panel.curves, looks, strict=True)
    )
    drawn = chart.panel(
        plain(f"{panel.title}: {panel.y} against {panel.x}"),
        lines,
        chart.Axes("", "", log=panel.log),
    )
    return (
        f"<figure><figcaption>{typeset(panel.title)}</figcaption><p "
        f"class=upright>{typeset(panel.y)}</p>{drawn}"
        f'<p class=across>{typeset(panel.x)}</p><ul class="legend">{samples}</ul></figure>'
    )
