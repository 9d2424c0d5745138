"""The outcome of a reproduction, as in its JSON file: cells, and the paper's statements."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from coterie.core.result import Evaluation, Json, Machine, MetricInfo, Row, Versions
from coterie.core.result.parsing import Record
from coterie.papers.figures import SeedFigures
from coterie.papers.tables import Figure, Reproduction, stand_ins


def spoken_of_row(reproduction: Reproduction, row: str) -> Collection[str]:
    """Return the figures that the statements of a table need of a row beside its result."""
    figures = (s for s in reproduction.statements if isinstance(s, Figure))
    return {s.figure for s in figures if row in (s.row, s.against, *stand_ins(s))}


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
            # the same at an earlier point and at every evaluation is for verdicts alone
            "seeds": [asdict(replace(s, earlier=None, course=())) for s in self.seeds]
        }


@dataclass(frozen=True)
class Verdict(Record):
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
    unfinished: bool = False  # whether rows still improve so much that it could turn
    progress: str = ""  # how finished the runs were, in words

    @property
    def state(self) -> bool | None:
        """Whether it holds; None if that is open. For a single seed: whether it does there."""
        if self.unfinished:
            return None
        return self.surely if self.by else self.holds

    @property
    def word(self) -> str:
        """The verdict in a word."""
        if self.unfinished:
            return "unfinished"
        if self.only_with is not None:
            return f"holds only with {self.only_with}"
        return {True: "holds", False: "does not hold", None: "undecided"}[self.state]

    @property
    def measured(self) -> str:
        """The measured numbers, with the difference that decides."""
        only = "" if self.only_with is None else f"; holds only with {self.only_with}"
        return "; ".join(filter(None, (self.detail, self.by, self.progress))) + only

    def to_json(self) -> Json:
        return super().to_json() | {"verdict": self.word}


@dataclass(frozen=True)
class Reproduced(Record):
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
    versions: Versions | None  # of the first run; older results do not say
    machine: Machine | None

    def of(self, column: str) -> list[Cell]:
        """Return the cells of a column, in the order of the rows."""
        by_row = {cell.row: cell for cell in self.cells if cell.column == column}
        return [by_row[row] for row in self.rows if row in by_row]
