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
    """Settings that several tables share at a scale.

    Attributes:
        every: Set in every run.
        tuned: Set beside it where rows are tuned.
    """

    every: Settings = {}
    tuned: Settings = {}


class Row(_Strict):
    """One row: a method, and what it sets beside the recipe's.

    Attributes:
        columns: Only in these; () for all.
        sweep: Keys and values; the best on validation at the first seed is the row's.
        search: Likewise, but only where rows are tuned, all with the same effort.
    """

    title: str
    method: str
    columns: tuple[str, ...] = ()
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    sweep: Grids = {}
    search: Grids = {}


class Column(_Strict):
    """One data set and base at a scale or two.

    Attributes:
        tune: Keys that every row chooses for itself, as by its sweep.
        rows: Settings for single rows.
    """

    title: str
    recipes: Mapping[Scale, str]
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    tune: Grids = {}
    rows: Mapping[str, Settings] = {}


class _Stated(_Strict):
    """A statement of a paper on some columns, with its place in the paper."""

    says: str
    source: str
    columns: tuple[str, ...]


class Replaceable(_Stated):
    """A statement that may hold only with other rows in place of its own.

    Attributes:
        only_with: Rows that stand for others, by what they add.
    """

    only_with: Mapping[str, Mapping[str, str]] = {}


class Compared(Replaceable):
    """A comparison of rows.

    Attributes:
        clients: Of these clients; () for the mean over all.
        group: Of these unseen clients, after the last round.
    """

    clients: tuple[str, ...] = ()
    group: str | None = None


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
    """A row's mean is at most `within` of the best of some worse than that: a share of it or,
    with `points`, in the metric's unit.
    """

    kind: Literal["near"]
    row: str
    best_of: tuple[str, ...]
    within: Annotated[float, Field(gt=0)]
    points: bool = False


class Weights(_Stated):
    """At the end at most this share of a row's collaboration weights, its W error, is on the
    wrong side; of the mean over seeds.
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
    """At least this share of the samples of unseen clients, in percent, goes to an expert whose
    anchor has their class.
    """

    kind: Literal["gate"]
    row: str
    at_least: Annotated[float, Field(ge=0, le=100)]


class Routers(Replaceable):
    """The change of the mean routing weight of the generalist over training, averaged over clients
    and blocks.
    """

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
    """A table or a figure of a paper.

    Attributes:
        title: What it is, as the paper names it.
        seeds: Runs per cell that the paper averages over.
        shows: Which figure of a run is in the table. The best evaluation is chosen by the test
            metric itself, as in the paper.
        set: What is set in every recipe.
        regime: Name of settings in `regimes.yaml` that tables share.
        scales: What a scale sets in every recipe beside those of the regime.
        columns: By id.
        rows: By id.
        published: The paper's mean by row and column, and its deviation where it gives one.
        published_improved: The paper's Imp.% by row and column.
        statements: What the paper says of it, to be checked on the measured numbers.
        pictures: What it shows, if it is a figure.
        notes: What a reader must know to compare.
    """

    title: str
    seeds: Annotated[int, Field(ge=1)] = 3
    shows: Figure = "mean"
    set: Settings = {}
    regime: str | None = None
    scales: Mapping[Scale, Settings] = {}
    columns: Mapping[str, Column]
    rows: Mapping[str, Row]
    published: Mapping[str, Mapping[str, float | tuple[float, float]]] = {}
    published_improved: Mapping[str, Mapping[str, float]] = {}
    statements: tuple[Statement, ...] = ()
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()

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
    """Return the rows that a statement compares: it is judged only where all of them were run."""
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
    """Return a statement of other rows: those that `rows` gives for its own."""

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
    """Return the tables and figures that there are, as `<paper>/<name>`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml"))


def load(name: str) -> Reproduction:
    """Return a table or figure by its name.

    Raises:
        Refused: There is none of that name.
        RecipeError: Its file has mistakes.
    """
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
