"""Tables and figures of the papers: YAML files in this folder, found as `<paper>/<name>`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.errors import RecipeError, Refused
from coterie.recipes import read

FOLDER = Path(__file__).parent
Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")
Settings = Mapping[str, Any]  # dotted keys of a recipe


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Strict):
    """One row: a method, and what it sets beside the recipe's."""

    title: str
    method: str
    set: Settings = {}
    sweep: Mapping[Scale, Mapping[str, tuple[Any, ...]]] = {}  # keys and values; the best on validation at the first seed is the row's


class Column(_Strict):
    """One data set and base at a scale or two, with the rows that it has settings of its own for."""

    title: str
    recipes: Mapping[Scale, str]
    set: Settings = {}
    at: Mapping[Scale, Settings] = {}
    tune: Mapping[Scale, Mapping[str, tuple[Any, ...]]] = {}  # keys that every row chooses for itself, as by its sweep
    rows: Mapping[str, Settings] = {}


class Lower(_Strict):
    """Every row of `lower` has a smaller mean than every row of `than`."""

    kind: Literal["lower"] = "lower"
    says: str
    source: str
    columns: tuple[str, ...]
    lower: tuple[str, ...]
    than: tuple[str, ...]
    clients: tuple[str, ...] = ()  # of these clients; () for the mean over all


class Near(_Strict):
    """A row's mean is at most `within` above the best of some."""

    kind: Literal["near"]
    says: str
    source: str
    columns: tuple[str, ...]
    row: str
    best_of: tuple[str, ...]
    within: Annotated[float, Field(gt=0)]
    clients: tuple[str, ...] = ()


class Routers(_Strict):
    """How the mean routing weight of the generalist moves over training, averaged over clients and blocks."""

    kind: Literal["routers"]
    says: str
    source: str
    columns: tuple[str, ...]
    row: str
    generalist: Literal["falls", "below half at the end"]


Statement = Lower | Near | Routers


class Picture(_Strict):
    """What a figure draws: test perplexity over iterations by client, the same averaged over clients, router scores, or a sweep."""

    kind: Literal["clients", "mean", "routers", "sweep"]
    rows: tuple[str, ...] = ()  # () for all
    clients: tuple[str, ...] = ()  # () for all


class Reproduction(_Strict):
    """A table or a figure of a paper.

    Args:
        title: What it is, as the paper names it.
        seeds: Runs per cell that the paper averages over.
        set: What is set in every recipe.
        scales: What a scale sets in every recipe.
        columns: By id.
        rows: By id.
        published: The paper's mean by row and column, and its deviation where it gives one.
        statements: What the paper says of it, to be checked on the measured numbers.
        pictures: What it shows, if it is a figure.
        notes: What a reader must know to compare.
    """

    title: str
    seeds: Annotated[int, Field(ge=1)] = 3
    set: Settings = {}
    scales: Mapping[Scale, Settings] = {}
    columns: Mapping[str, Column]
    rows: Mapping[str, Row]
    published: Mapping[str, Mapping[str, float | tuple[float, float]]] = {}
    statements: tuple[Statement, ...] = ()
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> "Reproduction":
        rows = [r for c in self.columns.values() for r in c.rows] + list(self.published)
        for statement in self.statements:
            rows += (*statement.lower, *statement.than) if isinstance(statement, Lower) else (statement.row,)
            rows += statement.best_of if isinstance(statement, Near) else ()
        columns = [c for s in self.statements for c in s.columns] + [c for p in self.published.values() for c in p]
        if unknown := sorted({r for r in rows if r not in self.rows} | {c for c in columns if c not in self.columns}):
            raise ValueError(f"no such row or column: {', '.join(unknown)}")
        return self


def names() -> list[str]:
    """The tables and figures that there are, as `<paper>/<name>`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml"))


def load(name: str) -> Reproduction:
    """A table or figure by its name.

    Raises:
        Refused: There is none of that name.
        RecipeError: Its file has mistakes.
    """
    if name not in names():
        raise Refused(f"reproduction {name!r}: there is none of that name", "Choose one of: " + ", ".join(names()))
    paper, _, stem = name.partition("/")
    try:
        return Reproduction.model_validate(read(FOLDER / paper / f"{stem}.yaml"))
    except ValidationError as error:
        raise RecipeError(f"reproduction {name}", [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]) from None
