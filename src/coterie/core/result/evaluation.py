"""What one evaluation of a run found, the curves that several of them make, and the decisions of
trained routers on real text, token by token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from coterie.core.result.parsing import Json, Record

ROUTING = "routing.json"


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """The scores of one client's model; the fields are described at `ClientResult`. At a point of a
    curve `valid` is None, and `test` is of a part of the test set.
    """

    rare: ClassVar[Collection[str]] = ("valid", "valid_loss", "test_loss", "experts")

    valid: float | None = None
    test: float
    valid_loss: float | None = None
    test_loss: float | None = None
    gate_accuracy: float | None = None
    experts: Sequence[int] | None = None

    def to_json(self) -> Json:
        """Return the JSON object: of a client with a gate also that its accuracy is unknown."""
        values = super().to_json()
        if self.experts is None and self.gate_accuracy is None:
            del values["gate_accuracy"]
        return values


@dataclass(frozen=True)
class Choices(Record):
    """The experts of a pool to which a gate sent the samples of a group of clients.

    Args:
        given: (classes, M) samples of each class that each expert got.
        right: (classes, M) samples of these that the expert classified correctly.
        gate_accuracy: Percent of the samples whose expert's anchor has their class; None where
            experts have no anchors.
    """

    given: Sequence[Sequence[int]]
    right: Sequence[Sequence[int]]
    gate_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """The scores of all clients after a round.

    Args:
        round: Rounds done.
        iteration: Local iterations done.
        valid: The mean of the clients' validation scores, of unseen clients that of the first
            group; None at a point of a curve.
        test: The same for the test scores.
        clients: By client; empty where curves are of groups alone.
        groups: The mean test metric of each group of unseen clients; None without such.
        weights: (clients, clients) collaboration weights; None of a method without.
        choices: By group of clients, "" for all; None without a gate.
    """

    rare: ClassVar[Collection[str]] = ("valid", "clients", "groups", "weights", "choices")

    round: int
    iteration: int
    valid: float | None = None
    test: float
    clients: Mapping[str, Scores] = field(default_factory=dict)
    groups: Mapping[str, float] | None = None
    weights: Sequence[Sequence[float]] | None = None
    choices: Mapping[str, Choices] | None = None

    def mean_of(self, group: str) -> float:
        """Return the mean test metric of a group of unseen clients, or with "" `test`."""
        return (self.groups or {})[group] if group else self.test


@dataclass(frozen=True)
class Curve(Record):
    """Scores on a part of each test set, between evaluations: they show the progress of training
    and are not part of the results.

    Args:
        windows: Number of windows of each client's test set that are scored.
        points: In order.
    """

    windows: int
    points: tuple[Evaluation, ...]


@dataclass(frozen=True)
class BestByValid(Record):
    """The evaluation with the best validation score.

    Args:
        round: After how many rounds it was made.
        valid: Its mean validation score.
        test: Its mean test score.
    """

    round: int
    valid: float
    test: float


@dataclass(frozen=True)
class Mixture(Record):
    """The number of experts of a model with a router.

    Args:
        generalists: Number of shared experts.
        specialists: Number of experts that stay with the client.
    """

    generalists: int
    specialists: int


@dataclass(frozen=True)
class Routing(Record):
    """The routing weights of every model with a router on each client's text.

    Args:
        texts: The tokens of each client's text as people read them.
        experts: Of each model with a router.
        weights: By model, then by text, (blocks, tokens, experts).
        depth: Number of blocks of a model; None if no model has a router.
        blocks: The indices of its first, middle and last one.
    """

    file: ClassVar[str] = ROUTING
    rare: ClassVar[Collection[str]] = ("depth", "blocks")

    texts: Mapping[str, Sequence[str]]
    experts: Mapping[str, Mixture]
    weights: Mapping[str, Mapping[str, Sequence[Sequence[Sequence[float]]]]]
    depth: int | None = None
    blocks: Sequence[int] | None = None
