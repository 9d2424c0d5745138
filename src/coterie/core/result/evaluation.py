"""One evaluation of a run, the curve of several, and token-wise decisions of routers on texts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import ClassVar

from coterie.core.result.parsing import Json, Record

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
    # its log-probability per byte of text; None without such questions.
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
