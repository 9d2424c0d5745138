"""Tables and figures of the papers: YAML files in this folder, found as `<paper>/<name>`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from coterie.core.errors import RecipeError, Refused
from coterie.runs.recipes import read

FOLDER = Path(__file__).parent
Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")
Settings = Mapping[str, Any]  # dotted keys of a recipe
Grids = Mapping[Scale, Mapping[str, tuple[Any, ...]]]  # keys of a recipe, and values to choose from
Figure = Literal["mean", "best", "best_of_last_ten", "gate_error"]


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
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    sweep: Grids = {}  # keys and values; the best on validation at the first seed is the row's
    search: Grids = {}  # likewise, but only if rows are tuned, all with the same effort


class Column(_Strict):
    """One data set and base at a scale or two."""

    title: str
    recipes: Mapping[Scale, str]
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    tune: Grids = {}  # keys that every row chooses for itself, as by its sweep
    rows: Mapping[str, Settings] = {}  # settings for single rows


class _Stated(_Strict):
    """A statement of a paper on some columns, with its place in the paper."""

    says: str
    source: str
    columns: tuple[str, ...]


class Replaceable(_Stated):
    """A statement that may hold only with other rows in place of its own."""

    only_with: Mapping[str, Mapping[str, str]] = {}  # rows that stand for others, by what they add


class Compared(Replaceable):
    """A comparison of rows."""

    clients: tuple[str, ...] = ()  # () for the mean over all
    group: str | None = None  # of unseen clients, after the last round


class Lower(Compared):
    """Every row of `lower` has a smaller mean than every row of `than`."""

    kind: Literal["lower"] = "lower"
    lower: tuple[str, ...]
    than: tuple[str, ...]


class Better(Compared):
    """Every row of `better` has a better mean than every row of `than`, in the direction of the
    column's metric, by at least `by` in its unit.
    """

    kind: Literal["better"]
    better: tuple[str, ...]
    than: tuple[str, ...]
    by: Annotated[float, Field(ge=0)] = 0.0


class Near(Compared):
    """A row's mean is worse than the best of some by at most `within`: a share of it or, with
    `points`, in the metric's unit.
    """

    kind: Literal["near"]
    row: str
    best_of: tuple[str, ...]
    within: Annotated[float, Field(gt=0)]
    points: bool = False


class Weights(_Stated):
    """At the end at most this share of a row's collaboration weights, its W error in the mean over
    seeds, is on the wrong side.
    """

    kind: Literal["weights"]
    row: str
    at_most: Annotated[float, Field(ge=0, le=1)] = 0.0


class Improved(_Stated):
    """At least this many percent of a row's clients do better than alone (Imp.%)."""

    kind: Literal["improved"]
    row: str
    at_least: Annotated[float, Field(ge=0, le=100)]


class Gate(_Stated):
    """At least this percentage of unseen samples goes to an expert whose anchor has the class."""

    kind: Literal["gate"]
    row: str
    at_least: Annotated[float, Field(ge=0, le=100)]


class Routers(Replaceable):
    """The change of the generalist's mean routing weight, over clients and blocks, in training."""

    kind: Literal["routers"]
    row: str
    generalist: Literal["falls", "below half at the end"]


class Favours(_Stated):
    """A client gives one other client more weight than any other, in the mean over training."""

    kind: Literal["favours"]
    row: str
    client: str
    most: str


Statement = Lower | Better | Near | Weights | Improved | Gate | Routers | Favours


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

    kind: Literal[
        "clients",
        "mean",
        "curves",
        "routers",
        "sweep",
        "weights",
        "domains",
        "bars",
        "labels",
        "k-means",
        "experts",
        "gate",
    ]
    title: str | None = None
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    iterations: tuple[int, ...] = ()  # of `weights`: the nearest evaluations; () for five of them


class Reproduction(_Strict):
    """A table or a figure of a paper."""

    title: str  # as the paper names it
    seeds: Annotated[int, Field(ge=1)] = 3  # runs per cell that the paper averages over
    # So many first seeds share one split of the data, as all runs once did; every later one has a
    # split of its own: `data.seed` is the run's seed.
    one_split: Annotated[int, Field(ge=0)] = 3
    # the figure of a run in the table; the best evaluation is by the test metric, as in the paper
    shows: Figure = "mean"
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

    def common(self, scale: Scale, tuned: bool) -> Settings:
        """Return what is set in every recipe of a scale, where rows are tuned or not."""
        regimes = _regimes()[self.regime] if self.regime else {}
        shared = regimes.get(scale, Regime())
        settings = {**self.set, **shared.every, **self.scales.get(scale, {})}
        return {**settings, **shared.tuned} if tuned else settings

    @model_validator(mode="after")
    def _names(self) -> "Reproduction":
        published = [*self.published.items(), *self.published_improved.items()]
        rows = {r for c in self.columns.values() for r in c.rows} | {r for r, _ in published}
        rows |= {r for s in self.statements for r in (*spoken_of(s), *stand_ins(s))}
        rows |= {r for p in self.pictures for r in p.rows}
        columns = {c for part in (*self.statements, *self.pictures) for c in part.columns}
        columns |= {c for _, cells in published for c in cells}
        columns |= {c for r in self.rows.values() for c in r.columns}
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


def spoken_of(statement: Statement) -> tuple[str, ...]:
    """Return the rows that a statement compares: it is judged only if all of them were run."""
    if isinstance(statement, Lower):
        return (*statement.lower, *statement.than)
    if isinstance(statement, Better):
        return (*statement.better, *statement.than)
    if isinstance(statement, Near):
        return (statement.row, *statement.best_of)
    return (statement.row,)


def with_other_rows(
    statement: Lower | Better | Near | Routers, rows: Mapping[str, str]
) -> Lower | Better | Near | Routers:
    """Return a statement with `rows` in place of its own."""

    def others(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(rows.get(row, row) for row in names)

    if isinstance(statement, Lower):
        changed: Mapping[str, Any] = {"lower": others(statement.lower)}
    elif isinstance(statement, Better):
        changed = {"better": others(statement.better)}
    else:
        changed = {"row": rows.get(statement.row, statement.row)}
    return statement.model_copy(update=changed)


def stand_ins(statement: Statement) -> list[str]:
    """Return the rows that a statement names beside those that it compares."""
    if not isinstance(statement, Replaceable):
        return []
    return [row for rows in statement.only_with.values() for row in (*rows, *rows.values())]


def names() -> list[str]:
    """Return the names of all tables and figures, `<paper>/<name>`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml"))


def load(name: str) -> Reproduction:
    """Return a table or figure. Raises Refused if it is unknown, RecipeError for mistakes."""
    if name not in names():
        raise Refused(
            f"reproduction {name!r}: there is none of that name",
            "Choose one of: " + ", ".join(names()),
        )
    paper, _, stem = name.partition("/")
    try:
        return Reproduction.model_validate(read(FOLDER / paper / f"{stem}.yaml"))
    except ValidationError as error:
        raise RecipeError(
            f"reproduction {name}",
            [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()],
        ) from None
