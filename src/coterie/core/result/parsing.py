"""Reading and writing results as JSON, and small records that several results share."""

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
    `rare` names fields that are left out when they are None or empty, and `file` the object's file.
    A `folder`, from which it was read, is never in it.
    """

    file: ClassVar[str] = ""
    rare: ClassVar[Collection[str]] = ()
    remedy: ClassVar[str] = (
        "Give a file that `coterie run` or `coterie compare` wrote. If an older version wrote it, "
        "run the recipe again with this version and another --out."
    )

    @classmethod
    def from_json(cls, value: Any, folder: Path | None = None) -> Self:
        """Return the record of a JSON object, without unknown entries. Raises CheckpointError."""
        if folder is not None and isinstance(value, Mapping):
            value = {**value, "folder": folder}
        try:
            record: Self = _adapter(cls).validate_python(value)
        except ValidationError as error:
            problem = f"not a valid {cls.__name__}: {_mistakes(error)}"
            raise CheckpointError(problem, cls.remedy) from None
        return record

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the record of a folder. Raises CheckpointError if it is missing or incomplete."""
        return cls.from_json(read_json(folder / cls.file, finite=False), folder)

    @classmethod
    def read_any(cls, folder: Path) -> Self | None:
        """Return `read`; None if the folder has no such file."""
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
    """Return what a JSON object lacks, or else its first wrong value."""
    errors = error.errors()
    missing = [".".join(map(str, e["loc"])) for e in errors if e["type"] == "missing"]
    if missing:
        return f"it has no {', '.join(missing)}"
    where = ".".join(map(str, errors[0]["loc"]))
    return f"{where}: {errors[0]['msg']}" if where else "expected a JSON object"


def _plain(value: Any) -> Any:
    """Return a value with its records as JSON objects."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], Record):
        return [item.to_json() for item in value]
    return value


@dataclass(frozen=True)
class MetricInfo(Record):
    """The metric of the scores."""

    name: str
    unit: str  # `per token` for a perplexity, `%` for an accuracy
    lower_is_better: bool

    def __str__(self) -> str:
        return self.name if self.unit.startswith("per ") else f"{self.name}, {self.unit}"


@dataclass(frozen=True)
class PrivacySpent(Record):
    """The differential privacy that a run has spent in all exchanges together."""

    rare: ClassVar[Collection[str]] = ("experiment", "assumes", "clients")

    epsilon: float | None  # None: infinite
    delta: float
    # Where noise is added: `central` by the server, `local` by each device, `examples` by each
    # device to its steps on single examples.
    where: str
    noise: float  # the multiplier z
    clip: float  # the norm C
    sampling: str  # of clients or examples, and which data sets are neighbours
    experiment: bool | None = None  # whether the seed of the noise is known: nobody is protected
    assumes: str | None = None  # under which epsilon holds; older versions: None
    covers: str = ""  # what the guarantee covers
    # Epsilon of each client's examples; None if the guarantee is for whole clients.
    clients: Mapping[str, float | None] | None = None


@dataclass(frozen=True)
class Versions(Record):
    """The versions of this library, PyTorch and Python with which a result was made."""

    rare: ClassVar[Collection[str]] = ("python",)

    coterie: str
    torch: str
    python: str | None = None


@dataclass(frozen=True)
class Machine(Record):
    """What a result was computed on."""

    device: str  # PyTorch's name; `elsewhere` if other machines compute
    dtype: str  # of the base
    threads: int  # of PyTorch
