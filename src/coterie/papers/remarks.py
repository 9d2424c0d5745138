"""Notes for comparing the rows of a reproduction: order, settings tried, and different budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mode

from coterie.core.result import rows as comparison
from coterie.core.result.tuning import name_of
from coterie.papers.job import Job
from coterie.papers.reproduced import Cell
from coterie.runs.tuning.search import Effort, SearchResult
from coterie.runs.tuning.tune import stated


def orders(cells: Sequence[Cell]) -> dict[str, float]:
    """Return by column Kendall's tau between the measured and the published order of the rows, 1
    for the same order and -1 for the reverse.
    """
    from scipy.stats import kendalltau

    orders_of = {}
    for c in dict.fromkeys(cell.column for cell in cells):
        pairs = [
            (cell.mean, mean) for cell in cells if cell.column == c and (mean := cell.published)
        ]
        measured, published = {m for m, _ in pairs}, {p for _, p in pairs}
        if (
            len(pairs) > 2 and min(len(measured), len(published)) > 1
        ):  # rows that are all alike have no order
            orders_of[c] = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return orders_of


def effort(job: Job, searched: Mapping[tuple[str, str], SearchResult]) -> list[str]:
    """Describe how many settings of those in the table each row tried, equal columns together, and
    which rows went beyond them.
    """
    alike: dict[str, list[str]] = {}
    for c in dict.fromkeys(c for _, c in job.cells):
        counts = {
            job.reproduction.rows[r].title: count
            for r, column in job.cells
            if column == c and (count := job.tried(r, c))
        }
        usual = mode(counts.values()) if counts else 0
        others = [f"{title} {count}" for title, count in counts.items() if count != usual]
        text = ", ".join([*others, f"every {'other ' if others else ''}row {usual}"])
        alike.setdefault(text, []).append(job.reproduction.columns[c].title)
    listed = "; ".join(
        f"{text} ({', '.join(titles)})" if len(alike) > 1 else text
        for text, titles in alike.items()
    )
    beyond = [
        f"{_cell_title(job, cell)} {count}"
        for cell, search in searched.items()
        if (count := sum(j.rung is None for j in search.judged))
    ]
    return [
        f"Settings that a row tried on validation at the first seed (1: those of the recipe, "
        f"which all rows share): {listed}.",
        *(
            [f"Beyond the edges of these grids, where the best lay there: {', '.join(beyond)}."]
            if beyond
            else []
        ),
        *_edges(job, searched),
    ]


def tuned(job: Job, effort: Effort, searched: Mapping[tuple[str, str], SearchResult]) -> list[str]:
    """Describe what each row's search tried, to show whether the rows had the same effort."""
    trained = [cell for cell, search in searched.items() if search.chosen is not None]
    rounds = dict.fromkeys(job.rounds(*cell) for cell in trained)
    fewer = [
        f"{_cell_title(job, cell)}: only {count} settings, as its fields have no more values."
        for cell in trained
        if (count := sum(j.rung == 0 for j in searched[cell].judged)) < effort.trials
    ]
    return [
        *(stated(effort, n, "Every row that trains") for n in rounds),
        *_edges(job, searched),
        *fewer,
    ]


def _edges(job: Job, searched: Mapping[tuple[str, str], SearchResult]) -> list[str]:
    """Name the fields in which a row's best lies at the end of all that was tried."""
    return [
        f"{_cell_title(job, cell)}: the best lies at the end of its range in "
        f"{', '.join(map(name_of, search.at_edge))}."
        for cell, search in searched.items()
        if search.at_edge
    ]


def _cell_title(job: Job, cell: tuple[str, str]) -> str:
    row, column = cell
    titles, columns = job.reproduction.rows, job.reproduction.columns
    return f"{titles[row].title} on {columns[column].title}"


def unlike(cells: Sequence[Cell]) -> list[str]:
    """Return how the budgets of the rows of a column differ; of several columns in one sentence."""
    sentences: dict[str, None] = {}
    for c in dict.fromkeys(cell.column for cell in cells):
        rows = [replace(cell, method=cell.row) for cell in cells if cell.column == c]
        titles = {cell.row: cell.title for cell in rows}
        ours = [
            row for row in titles if row.startswith(("comigs", "ddome"))
        ]  # 1G1S where it is among them, otherwise the first
        reference = "comigs-1g1s" if "comigs-1g1s" in ours else next(iter(ours), None)
        sentences |= dict.fromkeys(comparison.comparability(rows, reference, titles))
    return list(sentences)
