"""Reading results from JSON and writing them, and the small records that several results share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar

from coterie.core.errors import CheckpointError

Json = dict[str, Any]
REMEDY = (
    "Give a file that `coterie run` or `coterie compare` wrote. If an older version wrote it, run "
    "the recipe again with this version and another --out."
)


def given(kind: type, found: Any) -> Json:
    """Return the entries of a JSON object for which a class has fields. Raises CheckpointError if a
    required one is missing.
    """
    if not isinstance(found, Mapping):
        raise CheckpointError(f"not a valid {kind.__name__}: expected a JSON object", REMEDY)
    known = {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(kind)
    }
    if missing := [name for name, required in known.items() if required and name not in found]:
        raise CheckpointError(
            f"not a valid {kind.__name__}: it has no {', '.join(missing)}", REMEDY
        )
    return {name: found[name] for name in known if name in found}


def mapping(found: Any, what: str) -> Mapping[str, Any]:
    """Return a JSON object unchanged. Raises CheckpointError if the value is not one."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{what}: expected a JSON object", REMEDY)
    return found


def sequence(found: Any, what: str) -> list[Any]:
    """Return a JSON array unchanged. Raises CheckpointError if the value is not one."""
    if not isinstance(found, list | tuple):
        raise CheckpointError(f"{what}: expected a JSON array", REMEDY)
    return list(found)


class Record:
    """A dataclass whose fields are the values of a JSON object, by their names and in their order.

    Fields named in `rare` are left out of the object when they are None: only some results have
    them.
    """

    rare: ClassVar[Collection[str]] = ()

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Return the record of a JSON object. Raises CheckpointError."""
        return cls(**given(cls, found))

    def to_json(self) -> Json:
        """Return the JSON object."""
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None or name not in self.rare
        }


@dataclass(frozen=True)
class MetricInfo(Record):
    """The metric of the scores.

    Args:
        name: As in tables.
        unit: `per token` of a perplexity, `%` of an accuracy.
        lower_is_better: Whether lower values are better.
    """

    name: str
    unit: str
    lower_is_better: bool

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Return the metric of a result; a result without one is from a version with a single
        metric.
        """
        perplexity = {"name": "test perplexity", "unit": "per token", "lower_is_better": True}
        return cls(**given(cls, found or perplexity))

    def __str__(self) -> str:
        return self.name if self.unit.startswith("per ") else f"{self.name}, {self.unit}"


@dataclass(frozen=True)
class PrivacySpent(Record):
    """The differential privacy that a run has spent.

    Args:
        epsilon: Of all exchanges together; None if it is infinite.
        delta: Of all exchanges together.
        where: Who adds the noise: `central` the server, `local` each device; `examples`: each
            device to its steps on single examples.
        noise: The multiplier z.
        clip: The norm C.
        sampling: How clients or examples were sampled, and which data sets count as neighbours.
        experiment: Whether the seed of the noise is known, so that the run protects nobody.
        assumes: The assumptions under which epsilon holds; None in results of older versions.
        covers: What the guarantee covers.
        clients: The epsilon of each client's examples; None if the guarantee is for whole clients.
    """

    rare: ClassVar[Collection[str]] = ("experiment", "assumes", "clients")

    epsilon: float | None
    delta: float
    where: str
    noise: float
    clip: float
    sampling: str
    experiment: bool | None = None
    assumes: str | None = None
    covers: str = ""
    clients: Mapping[str, float | None] | None = None


@dataclass(frozen=True)
class Versions(Record):
    """The versions that a result was made with.

    Args:
        coterie: Of this library.
        torch: Of PyTorch.
        python: Of Python.
    """

    rare: ClassVar[Collection[str]] = ("python",)

    coterie: str
    torch: str
    python: str | None = None


@dataclass(frozen=True)
class Machine(Record):
    """What a result was computed on.

    Args:
        device: PyTorch's name of the device; `elsewhere` if other machines compute.
        dtype: Of the base.
        threads: Of PyTorch.
    """

    device: str
    dtype: str
    threads: int


# ---- tables with a row for each method ----------------------------------------------------------


class _Row(Protocol):
    @property
    def method(self) -> str: ...


R = TypeVar("R", bound=_Row)


def table_values(values: Json, row: Callable[[Any], object]) -> Json:
    """Return the parsed values of a table's JSON: metric, rows, versions, machine.

    Args:
        values: The JSON object.
        row: Parses a row.

    Raises:
        CheckpointError: One of them is not what it should be.
    """
    kinds: Mapping[str, type[Versions | Machine]] = {"versions": Versions, "machine": Machine}
    parsed = {
        name: kind.from_json(values[name])
        for name, kind in kinds.items()
        if values.get(name) is not None
    }
    return parsed | {
        "metric": MetricInfo.from_json(values["metric"]),
        "rows": tuple(map(row, sequence(values["rows"], "rows"))),
    }


def table_json(table: Any) -> Json:
    """Return the JSON object of a table, its folder left out."""
    found = {name: value for name, value in vars(table).items() if name != "folder"}
    return found | {
        "metric": table.metric.to_json(),
        "rows": [row.to_json() for row in table.rows],
        "versions": None if table.versions is None else table.versions.to_json(),
        "machine": None if table.machine is None else table.machine.to_json(),
    }


def row_of(rows: Sequence[R], method: str) -> R:
    """Return a method's row. Raises KeyError."""
    for row in rows:
        if row.method == method:
            return row
    raise KeyError(method)
