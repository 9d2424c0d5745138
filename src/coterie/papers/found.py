"""What a reproduction found: its cells, what the paper says of them, and all that is in its JSON
file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from coterie.core.result import Evaluation, Json, Machine, MetricInfo, Row, Versions


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

    @classmethod
    def of(cls, line: Row, **values: Any) -> "Cell":
        """Return a line of a comparison as a cell, with what else is known of it."""
        return cls(**{field.name: getattr(line, field.name) for field in fields(Row)} | values)

    def to_json(self) -> Json:
        """Return the JSON object."""
        return super().to_json() | {"evaluations": [e.to_json() for e in self.evaluations]}


@dataclass(frozen=True)
class Verdict:
    """Whether a statement of the paper holds in a column.

    Args:
        says: The statement.
        source: Where it stands.
        column: The id of the column.
        holds: Whether it does.
        detail: The measured numbers, in words.
    """

    says: str
    source: str
    column: str
    holds: bool
    detail: str


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
    versions: Versions
    machine: Machine | None

    def of(self, column: str) -> list[Cell]:
        """Return the cells of a column, in the order of the rows."""
        own = {cell.row: cell for cell in self.cells if cell.column == column}
        return [own[row] for row in self.rows if row in own]

    def to_json(self) -> Json:
        """Return what is in the JSON file."""
        return vars(self) | {
            "metrics": {column: metric.to_json() for column, metric in self.metrics.items()},
            "cells": [cell.to_json() for cell in self.cells],
            "statements": [dict(vars(verdict)) for verdict in self.statements],
            "versions": self.versions.to_json(),
            "machine": None if self.machine is None else self.machine.to_json(),
        }
