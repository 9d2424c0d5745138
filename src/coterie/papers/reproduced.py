"""What a reproduction found: its cells, what the paper says of them, and all that is in its JSON
file.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, fields
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from coterie.core import metrics
from coterie.core.result import Evaluation, Json, Machine, MetricInfo, Result, Row, Versions
from coterie.core.result import rows as comparison
from coterie.papers.tables import Favours, Reproduction, Routers, stand_ins
from coterie.reports.curves import router_series
from coterie.runs.folder.metrics import METRICS

Spoken = AbstractSet[Literal["routers", "weights"]]


@dataclass(frozen=True)
class SeedFigures:
    """What the run of one seed came to, as far as statements speak of it.

    Args:
        mean: As the table shows it.
        clients: The test metric of each client that the mean is over.
        groups: The mean of each group of clients that never trained.
        improved: Imp.%.
        weights_error: W error.
        gate_accuracy: Percent.
        generalist: Mean routing weight of the generalist in the first and in the last round.
        weights: Of a client for each other one, the mean over evaluations; None where no statement
            speaks of them.
    """

    mean: float
    clients: Mapping[str, float]
    groups: Mapping[str, float] | None = None
    improved: float | None = None
    weights_error: float | None = None
    gate_accuracy: float | None = None
    generalist: tuple[float, float] | None = None
    weights: Mapping[str, Mapping[str, float]] | None = None


def seed_figures(
    shown: Sequence[float],
    results: Sequence[Result],
    alone: Sequence[Result],
    folders: Sequence[Path],
    spoken: Spoken,
) -> list[SeedFigures]:
    """Return the figures of each seed.

    Args:
        shown: What the table shows.
        results: Of the runs.
        alone: Of Local, with the same seeds in the same order; () where it was not run.
        folders: Of the runs.
        spoken: What statements speak of.
    """
    return [
        SeedFigures(
            mean=mean,
            clients={i: client.test for i, client in result.headline.items()},
            groups=result.groups,
            improved=comparison.improved([result], alone) if alone else None,
            weights_error=result.weights_error,
            gate_accuracy=result.gate_accuracy,
            generalist=_generalist(result, folder) if "routers" in spoken else None,
            weights=_weights(result) if "weights" in spoken else None,
        )
        for mean, result, folder in zip(shown, results, folders, strict=True)
    ]


def spoken_of_row(reproduction: Reproduction, row: str) -> Spoken:
    """Return what the statements of a table speak of a row that needs more than its result."""
    of_row = [
        s
        for s in reproduction.statements
        if isinstance(s, Routers | Favours) and row in (s.row, *stand_ins(s))
    ]
    return {"routers" if isinstance(s, Routers) else "weights" for s in of_row}


def _weights(result: Result) -> dict[str, dict[str, float]] | None:
    """Return each client's weights for the others, the mean over evaluations; None of a method
    without.
    """
    known = [e.weights for e in result.evaluations if e.weights is not None]
    if not known:
        return None
    means: dict[str, dict[str, float]] = {client: {} for client in result.clients}
    for (i, one), (j, other) in permutations(enumerate(result.clients), 2):
        means[one][other] = metrics.mean(weights[i][j] for weights in known)
    return means


def _generalist(result: Result, folder: Path) -> tuple[float, float]:
    """Return the mean routing weight of generalists in the first and in the last round, over
    clients and blocks.
    """
    series = router_series(folder / METRICS)

    def weight(at: int) -> float:
        return metrics.mean(
            sum(weights[: result.clients[i].generalists])
            for i, rounds in series.items()
            for weights in rounds[at][1]
        )

    return weight(0), weight(-1)


@dataclass(frozen=True, repr=False, kw_only=True)
class Cell(Row):
    """One row of a table in one of its columns, measured beside published.

    Args:
        row: Its id.
        title: Of the row.
        column: Its id.
        published: The paper's mean; None where it gives none.
        published_std: Its deviation.
        published_improved: Its Imp.%.
        valid: The mean on validation, at the end.
        choice: What was chosen on validation, by keys of a recipe.
        settings: Of the method.
        folders: Of the runs, in that of the reproduction; one for each seed.
        evaluations: Of the first seed, without matrices.
        seeds: What the run of each seed came to.
    """

    row: str
    title: str
    column: str
    published: float | None
    published_std: float | None
    published_improved: float | None
    valid: float
    choice: Mapping[str, Any]
    settings: Mapping[str, Any]
    folders: Sequence[str]
    evaluations: Sequence[Evaluation]
    seeds: Sequence[SeedFigures]

    @classmethod
    def of(cls, line: Row, **values: Any) -> "Cell":
        """Return a line of a comparison as a cell, with what else is known of it."""
        return cls(**{field.name: getattr(line, field.name) for field in fields(Row)} | values)

    def to_json(self) -> Json:
        """Return the JSON object."""
        return super().to_json() | {
            "evaluations": [e.to_json() for e in self.evaluations],
            "seeds": [asdict(seed) for seed in self.seeds],
        }


@dataclass(frozen=True)
class Verdict:
    """Whether a statement of the paper holds in a column.

    Args:
        says: The statement.
        source: Where it stands.
        column: The id of the column.
        holds: Whether it does in the mean over seeds.
        surely: Whether the interval over seeds says so too; None if it leaves that open, or there
            is a single seed.
        detail: The measured numbers, in words.
        by: The difference that decides, in words, with its interval; "" for a single seed.
        only_with: What it holds with if it does not hold without; None for nothing that was run.
    """

    says: str
    source: str
    column: str
    holds: bool
    surely: bool | None
    detail: str
    by: str = ""
    only_with: str | None = None

    @property
    def state(self) -> bool | None:
        """Whether it holds; None if that is open. Of a single seed, whether it does there."""
        return self.surely if self.by else self.holds

    @property
    def word(self) -> str:
        """The verdict."""
        if self.only_with is not None:
            return f"holds only with {self.only_with}"
        return {True: "holds", False: "does not hold", None: "undecided"}[self.state]

    @property
    def measured(self) -> str:
        """The measured numbers, with the difference that decides."""
        only = "" if self.only_with is None else f"; holds only with {self.only_with}"
        return f"{self.detail}{'; ' if self.by else ''}{self.by}{only}"

    def to_json(self) -> Json:
        """Return the JSON object."""
        return {**vars(self), "verdict": self.word}


@dataclass(frozen=True)
class Reproduced:
    """A table or figure of a paper, run.

    Args:
        name: `<paper>/<table or figure>`.
        title: As the paper names it.
        scale: "small" or "paper".
        seeds: Of the runs of each cell.
        overrides: `key=value` texts for every recipe.
        part: The options by which a part was asked for.
        shows: Which figure of a run is in the table.
        scored: Which models that is of.
        columns: Titles, by id.
        metrics: What the cells of each column show.
        rows: Titles, by id.
        cells: Column by column.
        statements: Of the paper.
        order: By column Kendall's tau between the measured and the published order of rows.
        notes: What a reader must know to compare.
        unjudged: Statements of which not all rows were run.
        hours: Of all runs that the table takes, those that it shares with others too.
        versions: Of coterie, torch and Python.
        machine: What it was computed on.
    """

    name: str
    title: str
    scale: str
    seeds: Sequence[int]
    overrides: Sequence[str]
    part: Sequence[str]
    shows: str
    scored: str
    columns: Mapping[str, str]
    metrics: Mapping[str, MetricInfo]
    rows: Mapping[str, str]
    cells: Sequence[Cell]
    statements: Sequence[Verdict]
    order: Mapping[str, float]
    notes: Sequence[str]
    unjudged: int
    hours: float
    versions: Versions
    machine: Machine | None

    def of(self, column: str) -> list[Cell]:
        """Return the cells of a column, in the order of the rows."""
        by_row = {cell.row: cell for cell in self.cells if cell.column == column}
        return [by_row[row] for row in self.rows if row in by_row]

    def to_json(self) -> Json:
        """Return what is in the JSON file."""
        return vars(self) | {
            "metrics": {column: metric.to_json() for column, metric in self.metrics.items()},
            "cells": [cell.to_json() for cell in self.cells],
            "statements": [verdict.to_json() for verdict in self.statements],
            "versions": self.versions.to_json(),
            "machine": None if self.machine is None else self.machine.to_json(),
        }
