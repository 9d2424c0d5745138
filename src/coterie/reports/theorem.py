"""What an experiment on a theorem shows: its claims with their verdicts, its numbers, and its picture."""

import io
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from coterie.records import write_json
from coterie.reports.parts import escape, page, section, table, verdicts
from coterie.reports.terminal import verdicts as print_verdicts
from coterie.tensors import write_atomically
from coterie.theory import Claim, Experiment, Panel, draw


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
    for heading, claims in _kinds(experiment):
        console.print(heading, style="bold", highlight=False)
        print_verdicts(console, ((claim.holds, claim.text, claim.detail) for claim in claims))
    write_json(stem.with_name(f"{stem.name}.json"), asdict(experiment))
    write_atomically(stem.with_name(f"{stem.name}.html"), _page(experiment))


def _text(cell: str | float) -> str:
    return _rounded(cell) if isinstance(cell, float) else str(cell)


def _rounded(value: float) -> str:
    """Three digits; of a share close to 1, as many as tell it from 1."""
    return f"{value:.6f}" if 0.9995 <= value < 1 else f"{value:.3g}"


def _kinds(experiment: Experiment) -> list[tuple[str, list[Claim]]]:
    """The paper's claims, and what was found beside them."""
    kinds = {"What the paper says": False, "What was found beside it": True}
    return [(title, [claim for claim in experiment.claims if claim.beside is beside]) for title, beside in kinds.items()]


def _page(experiment: Experiment) -> bytes:
    numbers = [[_text(cell) for cell in row] for row in experiment.table.rows]
    parts = [section("picture", "Picture", f'<div class="panels broad">{"".join(map(_picture, experiment.panels))}</div>')]
    for k, (title, claims) in enumerate(_kinds(experiment)):
        parts.append(section(f"claims-{k}", title, verdicts((claim.holds, claim.text, claim.detail) for claim in claims)))
    parts.append(section("numbers", "Numbers", table(list(experiment.table.columns), numbers)))
    about = f"{experiment.source}. Numbers in brackets are the paper's equations."
    header = f"<header><h1>{escape(experiment.title)}</h1><p class=about>{escape(about)}</p></header>"
    return page(experiment.title, f"{header}<main>{''.join(parts)}</main>")


def _picture(panel: Panel) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5, 4.8), layout="constrained")
    draw(drawn, panel)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": panel.title}):  # ids that differ between the pictures of a page
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"
