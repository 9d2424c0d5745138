"""Reading results from JSON and writing them, and the small records that several results share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError

from coterie.core.errors import CheckpointError
from coterie.core.files import read_json

Json = dict[str, Any]


class Record:
    """A dataclass whose fields are the values of a JSON object, by their names and in their order.

    Fields named in `rare` are left out of the object when they are None or empty: only some results
    have them. `file` is the name of the file that has the object. A `folder` is where the object
    was read from, and never in it.
    """

    file: ClassVar[str] = ""
    rare: ClassVar[Collection[str]] = ()
    remedy: ClassVar[str] = (
        "Give a file that `coterie run` or `coterie compare` wrote. If an older version wrote it, "
        "run the recipe again with this version and another --out."
    )

    @classmethod
    def from_json(cls, value: Any, folder: Path | None = None) -> Self:
        """Return the record of a JSON object; entries without a field are left out. Raises
        CheckpointError.
        """
        if folder is not None and isinstance(value, Mapping):
            value = {**value, "folder": folder}
        try:
            record: Self = _adapter(cls).validate_python(value)
        except ValidationError as error:
            raise CheckpointError(
                f"not a valid {cls.__name__}: {_mistakes(error)}", cls.remedy
            ) from None
        return record

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what is in the `file` of a folder. Raises CheckpointError where there is none, or
        where it lacks something.
        """
        return cls.from_json(read_json(folder / cls.file, finite=False), folder)

    @classmethod
    def read_any(cls, folder: Path) -> Self | None:
        """As `read`; None where the folder has no such file."""
        return cls.read(folder) if (folder / cls.file).exists() else None

    def to_json(self) -> Json:
        """Return the JSON object."""
        return {
            name: _plain(value)
            for name, value in vars(self).items()
            if name != "folder" and (value not in (None, {}) or name not in self.rare)
        }


# makes what validates a class, which takes milliseconds
_adapter: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)


def _mistakes(error: ValidationError) -> str:
    """Return what is missing from a JSON object, or else the first value that is wrong."""
    errors = error.errors()
    missing = [".".join(map(str, e["loc"])) for e in errors if e["type"] == "missing"]
    if missing:
        return f"it has no {', '.join(missing)}"
    where = ".".join(map(str, errors[0]["loc"]))
    return f"{where}: {errors[0]['msg']}" if where else "expected a JSON object"


def _plain(value: Any) -> Any:
    """Return a value with the JSON objects of the records in it."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], Record):
        return [item.to_json() for item in value]
    return value


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
