"""The outcome of a reproduction, as in its JSON file: cells, and the paper's statements."""

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
    """The figures of one seed's run that statements compare."""

    mean: float  # as the table shows it
    clients: Mapping[str, float]  # the test metric of each client that the mean is over
    # the mean of each group of clients that never trained
    groups: Mapping[str, float] | None = None
    improved: float | None = None  # Imp.%
    weights_error: float | None = None
    gate_accuracy: float | None = None  # percent
    # its mean routing weight in the first and in the last round
    generalist: tuple[float, float] | None = None
    # of a client for each other one, the mean over evaluations; None if not needed
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
        shown: The values that the table shows.
        results: The results of the runs.
        alone: The results of Local, with the same seeds in the same order; () if it was not run.
        folders: The folders of the runs.
        spoken: What statements need.
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
    """Return the figures that the statements of a table need of a row beside its result."""
    of_row = [
        s
        for s in reproduction.statements
        if isinstance(s, Routers | Favours) and row in (s.row, *stand_ins(s))
    ]
    return {"routers" if isinstance(s, Routers) else "weights" for s in of_row}


def _weights(result: Result) -> dict[str, dict[str, float]] | None:
    """Return clients' weights for each other, the mean over evaluations; None without weights."""
    known = [e.weights for e in result.evaluations if e.weights is not None]
    if not known:
        return None
    means: dict[str, dict[str, float]] = {client: {} for client in result.clients}
    for (i, one), (j, other) in permutations(enumerate(result.clients), 2):
        means[one][other] = metrics.mean(weights[i][j] for weights in known)
    return means


def _generalist(result: Result, folder: Path) -> tuple[float, float]:
    """Return the generalists' mean routing weight in the first round, and in the last."""
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
    """One row of a table in one of its columns, measured beside published."""

    row: str  # its id
    title: str
    column: str  # its id
    published: float | None  # the paper's mean
    published_std: float | None
    published_improved: float | None
    valid: float  # the mean on validation, at the end
    choice: Mapping[str, Any]  # chosen on validation, by keys of a recipe
    settings: Mapping[str, Any]  # of the method
    folders: Sequence[str]  # one for each seed, in that of the reproduction
    evaluations: Sequence[Evaluation]  # of the first seed, without matrices
    seeds: Sequence[SeedFigures]

    @classmethod
    def of(cls, line: Row, **values: Any) -> "Cell":
        """Return a line of a comparison as a cell, with the other figures."""
        return cls(**{field.name: getattr(line, field.name) for field in fields(Row)} | values)

    def to_json(self) -> Json:
        """Return the JSON object."""
        return super().to_json() | {
            "evaluations": [e.to_json() for e in self.evaluations],
            "seeds": [asdict(seed) for seed in self.seeds],
        }


@dataclass(frozen=True)
class Verdict:
    """Whether a statement of the paper holds in a column."""

    says: str
    source: str  # its place in the paper
    column: str  # its id
    holds: bool  # in the mean over seeds
    # whether the interval over seeds agrees; None if that is open, or for a single seed
    surely: bool | None
    detail: str  # the measured numbers, in words
    by: str = ""  # the difference that decides, with its interval; "" for a single seed
    only_with: str | None = None  # the rows that it holds with if it does not hold without

    @property
    def state(self) -> bool | None:
        """Whether it holds; None if that is open. For a single seed: whether it does there."""
        return self.surely if self.by else self.holds

    @property
    def word(self) -> str:
        """The verdict in a word."""
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
    """A table or figure of a paper, run."""

    name: str  # <paper>/<table or figure>
    title: str  # as the paper names it
    scale: str
    seeds: Sequence[int]
    overrides: Sequence[str]  # `key=value` texts for every recipe
    part: Sequence[str]  # the options by which a part was asked for
    shows: str  # the figure of a run that is in the table
    scored: str  # the models that were scored
    columns: Mapping[str, str]  # titles, by id
    metrics: Mapping[str, MetricInfo]  # by column
    rows: Mapping[str, str]  # titles, by id
    cells: Sequence[Cell]  # column by column
    statements: Sequence[Verdict]
    # Kendall's tau between the measured and the published order of rows, by column
    order: Mapping[str, float]
    notes: Sequence[str]  # for a fair comparison
    unjudged: int  # the number of statements of which not all rows were run
    hours: float  # of all runs in the table, those that other tables share too
    versions: Versions
    machine: Machine | None

    def of(self, column: str) -> list[Cell]:
        """Return the cells of a column, in the order of the rows."""
        by_row = {cell.row: cell for cell in self.cells if cell.column == column}
        return [by_row[row] for row in self.rows if row in by_row]

    def to_json(self) -> Json:
        """Return the content of the JSON file."""
        return vars(self) | {
            "metrics": {column: metric.to_json() for column, metric in self.metrics.items()},
            "cells": [cell.to_json() for cell in self.cells],
            "statements": [verdict.to_json() for verdict in self.statements],
            "versions": self.versions.to_json(),
            "machine": None if self.machine is None else self.machine.to_json(),
        }
