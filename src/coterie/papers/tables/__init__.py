"""Tables and figures of the papers: YAML files in this folder, found as `<paper>/<name>`."""

import math
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from coterie.core.errors import RecipeError, Refused
from coterie.runs.recipes import read

FOLDER = Path(__file__).parent
Scale = Literal["small", "smollm2", "paper"]
SCALES: tuple[Scale, ...] = ("small", "smollm2", "paper")
Settings = Mapping[str, Any]  # dotted keys of a recipe
Grids = Mapping[Scale, Mapping[str, tuple[Any, ...]]]  # keys of a recipe, and values to choose from
Shown = Literal["mean", "best", "best_of_last_ten", "gate_error"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Regime(_Strict):
    """Settings that several tables share at a scale."""

    every: Settings = {}  # set in every run
    tuned: Settings = {}  # set also if rows are tuned


class Row(_Strict):
    """One row: a method, and what it sets beside the recipe's."""

    title: str
    method: str
    columns: tuple[str, ...] = ()  # the only ones; () for all
    # whether its models are made only at the end: earlier scores are of others
    fused: bool = False
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    sweep: Grids = {}  # keys and values; the best on validation at the first seed is the row's
    search: Grids = {}  # likewise, but only if rows are tuned, all with the same effort


class Column(_Strict):
    """One data set and base at each of its scales."""

    title: str
    recipes: Mapping[Scale, str]
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    tune: Grids = {}  # keys that every row chooses for itself, as by its sweep
    only: tuple[str, ...] = ()  # rows; () for all that may stand in it
    rows: Mapping[str, Settings] = {}  # settings for single rows


class _Stated(_Strict):
    """A statement of a paper on some columns, with its place in the paper."""

    says: str
    source: str
    columns: tuple[str, ...]
    # rows that stand for others where it does not hold with its own, by what they add
    only_with: Mapping[str, Mapping[str, str]] = {}
    clients: tuple[str, ...] = ()  # () for the mean over all
    group: str | None = None  # of unseen clients, after the last round
    minus: str | None = None  # a row whose value in the same column is taken from all others
    beside: str | None = None  # the column of the rows compared with; None for the same


class Better(_Stated):
    """Every row of `better` has a better mean than every row of `than`, in the direction of the
    column's metric, by at least `by` in its unit.
    """

    kind: Literal["better"] = "better"
    better: tuple[str, ...]
    than: tuple[str, ...]
    by: float = Field(0.0, ge=0)


class Near(_Stated):
    """The mean of every row differs from the best of some by at most `within`, a share of it or,
    with `points`, in the metric's unit: to either side, unless the paper says no more than that it
    is not worse.
    """

    kind: Literal["near"]
    rows: tuple[str, ...]
    best_of: tuple[str, ...]
    within: float = Field(gt=0)
    points: bool = False
    about: float = 0.0  # a difference that the paper names, from which `within` counts
    only_worse: str | None = None  # the paper's words for which being better is no contradiction


# in words, by name
FIGURES = {name: str(words) for name, words in read(FOLDER / "figures.yaml").items()}


class Figure(_Stated):
    """A figure of a row lies within bounds."""

    kind: Literal["figure"]
    figure: str = Field(pattern=f"^({'|'.join(FIGURES)})( .+ .+)?$")
    row: str
    at_least: float = -math.inf
    at_most: float = math.inf
    strict: bool = False  # whether a figure that equals a bound is beyond it
    against: str | None = None  # a row of which the figure is the difference, in percent of it
    # of `weights_error`: the largest of all evaluations from this share of the run on
    since: float | None = None
    level: float | str = 0.0  # of `reached`: a mean, or a row whose mean at the end it is


Statement = Better | Near | Figure
_SUBJECTS = ("better", "rows", "row")  # fields that name the rows spoken of


PICTURES = (
    *("clients", "mean", "curves", "routers", "sweep", "weights"),
    *("domains", "bars", "labels", "k-means", "experts", "gate"),
)


class Picture(_Strict):
    """The content of a figure, of the first seed but for `sweep` and `bars`. Without rows, columns
    or clients, it is of all; without a title, that says what is drawn.

    `clients`: test metric over iterations by client; `mean`: the same averaged over clients;
    `curves`: like `mean`, one broad panel for each column; `routers`: router scores; `sweep`: the
    mean by how often and how long routers learn; `weights`: collaboration weights at some
    iterations beside the true clusters; `domains`: a client's weights for each other client over
    iterations; `bars`: the mean of rows across columns, which are the values of a sweep; `labels`:
    which classes each client has; `k-means`: clusters of these; `experts`: the accuracy of each
    expert of a pool over rounds; `gate`: which expert gets which class, and the gate's error by
    client.
    """

    kind: str = Field(pattern=f"^({'|'.join(PICTURES)})$")
    title: str | None = None
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    iterations: tuple[int, ...] = ()  # of `weights`: the nearest evaluations; () for five of them


class Reproduction(_Strict):
    """A table or a figure of a paper."""

    title: str  # as the paper names it
    seeds: int = Field(3, ge=1)
    # so many first seeds share one split of the data, as all runs once did; of a later one it is
    # its own: `data.seed` is the seed
    one_split: int = Field(3, ge=0)
    # the figure of a run in the table; the best evaluation is by the test metric, as in the paper
    shows: Shown = "mean"
    set: Settings = {}  # in every recipe
    regime: str | None = None  # name of settings in regimes.yaml that tables share
    scales: Mapping[Scale, Settings] = {}  # settings beside those of the regime
    columns: Mapping[str, Column]  # by id
    rows: Mapping[str, Row]  # by id
    # the paper's mean by row and column, and its deviation where it gives one
    published: Mapping[str, Mapping[str, float | tuple[float, float]]] = {}
    # the paper's Imp.% by row and column
    published_improved: Mapping[str, Mapping[str, float]] = {}
    statements: tuple[Statement, ...] = ()  # of the paper, to be checked on the measured numbers
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()  # for a fair comparison

    @property
    def split(self) -> str:
        """Which seeds have the same split of the data, in words."""
        shared = (
            f"Seeds below {self.one_split} share one split of the data, later ones have their own."
        )
        return shared if self.one_split else "Every seed has its own split of the data."

    def common(self, scale: Scale, tuned: bool) -> Settings:
        """Return what is set in every recipe of a scale, where rows are tuned or not."""
        regimes = _regimes()[self.regime] if self.regime else {}
        shared = regimes.get(scale, Regime())
        settings = {**shared.every, **self.set, **self.scales.get(scale, {})}
        return {**settings, **shared.tuned} if tuned else settings

    @model_validator(mode="after")
    def _names(self) -> "Reproduction":
        published = [*self.published.items(), *self.published_improved.items()]
        rows = {r for c in self.columns.values() for r in c.rows} | {r for r, _ in published}
        rows |= {
            r for s in self.statements for r in (*spoken_of(s), *compared_with(s), *stand_ins(s))
        }
        rows |= {r for p in self.pictures for r in p.rows}
        columns = {c for part in (*self.statements, *self.pictures) for c in part.columns}
        columns |= {s.beside for s in self.statements if s.beside}
        columns |= {c for _, cells in published for c in cells}
        columns |= {c for r in self.rows.values() for c in r.columns}
        rows |= {r for c in self.columns.values() for r in c.only}
        if unknown := sorted((rows - self.rows.keys()) | (columns - self.columns.keys())):
            raise ValueError(f"no such row or column: {', '.join(unknown)}")
        if self.regime and self.regime not in _regimes():
            raise ValueError(f"no such regime: {self.regime}")
        return self


@cache
def _regimes() -> Mapping[str, Mapping[Scale, Regime]]:
    """Return the settings that tables share, by name and scale."""
    adapter = TypeAdapter(dict[str, dict[Scale, Regime]])
    return adapter.validate_python(read(FOLDER / "regimes.yaml"))


@cache
def function_words() -> frozenset[str]:
    """Return English function words, in lower case."""
    adapter = TypeAdapter(dict[str, frozenset[str]])
    return adapter.validate_python(read(FOLDER / "function-words.yaml"))["english"]


def named(statement: Statement, *fields: str) -> list[str]:
    """Return the rows in some fields of a statement."""
    values = [getattr(statement, field, None) for field in fields]
    listed = (value if isinstance(value, tuple) else (value,) for value in values)
    return [name for name in chain(*listed) if isinstance(name, str)]


def spoken_of(statement: Statement) -> list[str]:
    """Return the rows of which a statement speaks."""
    return named(statement, *_SUBJECTS, "against", "minus", "level")


def compared_with(statement: Statement) -> list[str]:
    """Return the rows that it compares them with, maybe in another column."""
    return named(statement, "than", "best_of", "minus")


def with_other_rows(statement: Statement, rows: Mapping[str, str]) -> Statement:
    """Return a statement with `rows` in place of those that it compares."""
    changed: dict[str, Any] = {}
    for field in (*_SUBJECTS, "than", "best_of"):
        if isinstance(names := getattr(statement, field, None), str):
            changed[field] = rows.get(names, names)
        elif names is not None:
            changed[field] = tuple(rows.get(row, row) for row in names)
    return statement.model_copy(update=changed)


def stand_ins(statement: Statement) -> list[str]:
    """Return the rows that a statement names beside those that it compares."""
    return [row for rows in statement.only_with.values() for row in (*rows, *rows.values())]


def names() -> list[str]:
    """Return the names of all tables and figures, `<paper>/<name>`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml"))


def load(name: str) -> Reproduction:
    """Return a table or figure. Raises Refused if it is unknown, RecipeError for mistakes."""
    if name not in names():
        problem = f"reproduction {name!r}: there is none of that name"
        raise Refused(problem, "Choose one of: " + ", ".join(names()))
    paper, _, stem = name.partition("/")
    try:
        return Reproduction.model_validate(read(FOLDER / paper / f"{stem}.yaml"))
    except ValidationError as error:
        raise RecipeError(
            f"reproduction {name}",
            [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()],
        ) from None
