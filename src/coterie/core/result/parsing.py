"""Reading and writing results as JSON, records that several results share, one evaluation of a run,
the curve of several, and token-wise decisions of routers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
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


ROUTING = "routing.json"


@dataclass(frozen=True)
class WordScores(Record):
    """How well a keyboard's three suggestions foresee the words of a text, in percent."""

    words: float  # that were scored
    first: float  # of them the first suggestion
    first_three: float  # among the three suggestions
    # Keystrokes that are not needed: of the letters of all words and a space after each, where the
    # one that takes a suggestion writes the rest of the word and the space.
    keystrokes_saved: float


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """The scores of a personal model on given data, see `coterie.evaluate`."""

    rare: ClassVar[Collection[str]] = (
        *("perplexity", "tokens", "words", "questions", "accuracy", "by_length", "exact_match"),
    )

    perplexity: float | None = None  # per token; None of a task
    tokens: int | None = None  # that were predicted
    words: WordScores | None = None
    questions: int | None = None  # of a task
    # Percent of questions with choices whose right one is the most likely, and the most likely by
    # its log-probability per character; None without such questions.
    accuracy: float | None = None
    by_length: float | None = None
    exact_match: float | None = None  # percent of the other questions answered right


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """The scores of one client's model, see `ClientResult`. At a point of a curve `valid` is None,
    and `test` is of a part of the test set, as between rounds with `evaluate_rows`.
    """

    rare: ClassVar[Collection[str]] = (
        *("valid", "valid_loss", "test_loss", "experts", "parts", "weight", "predictions"),
    )

    valid: float | None = None
    test: float
    valid_loss: float | None = None
    test_loss: float | None = None
    gate_accuracy: float | None = None
    experts: Sequence[int] | None = None
    parts: Mapping[str, "Scores"] | None = None
    weight: float | None = None
    predictions: int | None = None

    def to_json(self) -> Json:
        """Return the JSON object; with a gate, `gate_accuracy` is in it even if it is unknown."""
        values = super().to_json()
        if self.experts is None and self.gate_accuracy is None:
            del values["gate_accuracy"]
        return values


@dataclass(frozen=True)
class Choices(Record):
    """The experts of a pool to which a gate sent the samples of a group of clients."""

    given: Sequence[Sequence[int]]  # (classes, M) samples of each class for each expert
    right: Sequence[Sequence[int]]  # (classes, M) of these, classified correctly
    # Percent of samples sent to an expert whose anchor has their class; None without anchors.
    gate_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """The scores of all clients after a round."""

    rare: ClassVar[Collection[str]] = ("valid", "clients", "groups", "weights", "choices")

    round: int  # rounds done
    iteration: int  # local iterations done
    # Mean over clients, or over the first group of unseen ones; None at a point of a curve.
    valid: float | None = None
    test: float  # the same of test scores
    clients: Mapping[str, Scores] = field(default_factory=dict)  # empty in curves of groups
    groups: Mapping[str, float] | None = None  # mean test metric of each group of unseen clients
    weights: Sequence[Sequence[float]] | None = None  # (clients, clients) collaboration weights
    choices: Mapping[str, Choices] | None = None  # by group of clients, "" for all

    def mean_of(self, group: str) -> float:
        """Return the mean test metric of a group of unseen clients, or `test` for ""."""
        return (self.groups or {})[group] if group else self.test

    def of_part(self, name: str) -> "Evaluation":
        """Return the evaluation of one part's models by themselves."""
        parts = {i: scores.parts[name] for i, scores in self.clients.items() if scores.parts}
        valids = [part.valid for part in parts.values() if part.valid is not None]
        valid, test = fmean(valids) if valids else None, fmean(p.test for p in parts.values())
        clients = {
            i: replace(part, weight=None, predictions=self.clients[i].predictions)
            for i, part in parts.items()
        }
        return replace(self, valid=valid, test=test, clients=clients, weights=None)


@dataclass(frozen=True)
class Curve(Record):
    """Scores on a part of each test set, between evaluations, which are no results."""

    windows: int  # scored windows of each client's test set
    points: tuple[Evaluation, ...]


@dataclass(frozen=True)
class BestByValid(Record):
    """The evaluation with the best validation score, after so many rounds, and its mean scores."""

    round: int
    valid: float
    test: float


@dataclass(frozen=True)
class Mixture(Record):
    """A routed model's number of shared experts, and of experts that stay with the client."""

    generalists: int
    specialists: int


@dataclass(frozen=True)
class Routing(Record):
    """The routing weights of every model with a router on each client's text."""

    file: ClassVar[str] = ROUTING
    rare: ClassVar[Collection[str]] = ("depth", "blocks")

    texts: Mapping[str, Sequence[str]]  # the tokens of each client's text, as people read them
    experts: Mapping[str, Mixture]  # of each model with a router
    # By model, then by text: (blocks, tokens, experts).
    weights: Mapping[str, Mapping[str, Sequence[Sequence[Sequence[float]]]]]
    depth: int | None = None  # blocks of a model; None if none has a router
    blocks: Sequence[int] | None = None  # the indices of its first, middle and last one
