"""The outcome of a search for settings: a table in a terminal."""

from rich.table import Table

from coterie.core.metrics import direction
from coterie.core.result import ROUNDS, TunedRow, Tuning
from coterie.core.result.tuning import name_of, written
from coterie.methods import METHODS
from coterie.reports import parts
from coterie.reports.tables import fitted

READING = (
    "as good: how many other settings the validation data cannot tell from the chosen ones, in "
    "runs of as many rounds: within two standard errors of the differences by client and seed.",
    "iterations: local iterations of all runs together.",
)


def settings(row: TunedRow) -> str:
    """Return the chosen settings of a row in one line."""
    return written({**row.chosen, ROUNDS: row.rounds})


def terminal(tuning: Tuning, width: int = 80) -> Table:
    """Return the table for a terminal, with a line for each method."""
    metric = tuning.metric
    title = f"settings chosen on validation; {metric}, {direction(metric)}"
    header = ("method", "validation", "chosen", "as good", "runs", "iterations")
    lines = [(METHODS[row.method].title, *_cells(row)) for row in tuning.rows]
    return fitted(title, header, lines, width, text=(0, 2))


def _cells(row: TunedRow) -> tuple[str, ...]:
    if row.valid is None:
        return "", "trains nothing", "", "", ""
    counts = (f"{row.alike:,}", f"{row.runs:,}", f"{row.iterations:,}")
    edges = ", ".join(map(name_of, row.at_edge))
    chosen = settings(row) + f" (at the end of its range: {edges})" * bool(edges)
    return parts.figure(row.valid), chosen, *counts
