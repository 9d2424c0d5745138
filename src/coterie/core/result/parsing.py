"""How results are read from JSON and written to it, and the small parts that several of them
have.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from coterie.core.errors import CheckpointError

Json = dict[str, Any]
REMEDY = (
    "Give a file that `coterie run` or `coterie compare` wrote. If an older version wrote it, run "
    "the recipe again with this version and another --out."
)


def given(kind: type, found: Any) -> Json:
    """Return what of a JSON object a class has fields for. Raises CheckpointError if it lacks one
    that must be there.
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
    """Return a JSON object as it is. Raises CheckpointError if it is none."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{what}: expected a JSON object", REMEDY)
    return found


def sequence(found: Any, what: str) -> list[Any]:
    """Return a JSON array as it is. Raises CheckpointError if it is none."""
    if not isinstance(found, list | tuple):
        raise CheckpointError(f"{what}: expected a JSON array", REMEDY)
    return list(found)


class Record:
    """A dataclass whose fields are the values of a JSON object, by their names and in their order.

    What `rare` names is left out of the object where it is None: only some results have it.
    """

    rare: ClassVar[Collection[str]] = ()

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Return what a JSON object says. Raises CheckpointError."""
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
    """The metric that scores are of.

    Args:
        name: As in tables.
        unit: `per token` of a perplexity, `%` of an accuracy.
        lower_is_better: Whether the least is the best.
    """

    name: str
    unit: str
    lower_is_better: bool

    @classmethod
    def from_json(cls, found: Any) -> Self:
        """Return the metric of a result; one without is from before there were several."""
        perplexity = {"name": "test perplexity", "unit": "per token", "lower_is_better": True}
        return cls(**given(cls, found or perplexity))

    def __str__(self) -> str:
        return self.name if self.unit.startswith("per ") else f"{self.name}, {self.unit}"


@dataclass(frozen=True)
class PrivacySpent(Record):
    """The differential privacy that a run has spent.

    Args:
        epsilon: Of all exchanges together; None where it is infinite.
        delta: Likewise.
        where: Who adds the noise: `central` the server, `local` each device; `examples`: each
            device to its steps on single examples.
        noise: The multiplier z.
        clip: The norm C.
        sampling: Who was drawn how, and who neighbours are.
        experiment: Whether the seed of the noise is known, so that nobody is protected.
        assumes: What must be so for epsilon to hold; None of an older version.
        covers: What it is of.
        clients: The epsilon of each client's examples; None where it is of whole clients.
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
        device: As PyTorch names it; `elsewhere` where others compute.
        dtype: Of the base.
        threads: Of PyTorch.
    """

    device: str
    dtype: str
    threads: int
