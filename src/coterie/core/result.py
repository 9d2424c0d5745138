"""Results with types: what is in a run's `result.json` and in a comparison's `comparison.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

from coterie.core.errors import CheckpointError

Json = dict[str, Any]


def _given(kind: type, found: Mapping[str, Any]) -> Json:
    """Return what of a JSON object a class has fields for. Raises CheckpointError if one lacks."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"no {kind.__name__}: a JSON object was expected", _REMEDY)
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if missing := [name for name, required in known.items() if required and name not in found]:
        raise CheckpointError(f"no {kind.__name__}: it has no {', '.join(missing)}", _REMEDY)
    return {name: found[name] for name in known if name in found}


_REMEDY = "Give what `coterie run` or `coterie compare` of this version wrote."


@dataclass(frozen=True)
class MetricInfo:
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
    def from_json(cls, found: Mapping[str, Any] | None) -> Self:
        """Return the metric of a result; one without is from before there were several."""
        perplexity = {"name": "test perplexity", "unit": "per token", "lower_is_better": True}
        return cls(**_given(cls, found or perplexity))

    def to_json(self) -> Json:
        """Return the JSON object."""
        return dict(vars(self))

    def __str__(self) -> str:
        return self.name if self.unit.startswith("per ") else f"{self.name}, {self.unit}"


@dataclass(frozen=True)
class ClientResult:
    """What one client got from a run, and what that cost it.

    Example:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> client = run.result.clients["c0-0"]
        >>> client.trainable_parameters, client.bytes_up > 0, 0 <= client.test <= 100
        (4810, True, True)

    Args:
        test: The metric on the client's test set, right after its last local iteration.
        valid: The metric on its validation set.
        test_loss: Mean negative log-likelihood of the test set, nats.
        valid_loss: Mean negative log-likelihood of the validation set, nats.
        test_synced: As `test`, after one more synchronisation; None if the client could not be
            reached for it.
        trainable_parameters: That the client trains.
        active_parameters: That one prediction uses.
        flops_per_token: Of one prediction's forward pass.
        bytes_up: Sent over the whole run.
        bytes_down: Received over the whole run.
        state_bytes: That the client remembers between rounds.
        generalists: Experts of its model that are shared.
        specialists: Experts of its model that stay with it.
        group: Of a client that never trained, which group; None for one that trains.
        gate_accuracy: Percent of its samples that the gate gave to an expert of their class; None
            without a gate.
        experts: The numbers of a pool's experts that the client has; None without a pool.
    """

    test: float
    valid: float
    test_loss: float | None = None
    valid_loss: float | None = None
    test_synced: float | None = None
    trainable_parameters: int = 0
    active_parameters: int | None = None
    flops_per_token: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    state_bytes: int | None = None
    generalists: int = 0
    specialists: int = 0
    group: str | None = None
    gate_accuracy: float | None = None
    experts: Sequence[int] | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what an entry of `clients` in result.json says. Raises CheckpointError."""
        return cls(**_given(cls, found))

    def to_json(self) -> Json:
        """Return the JSON object; what only some clients have is left out where it is None."""
        rare = ("group", "gate_accuracy", "experts")
        return {
            name: value
            for name, value in vars(self).items()
            if value is not None or name not in rare
        }


@dataclass(frozen=True, repr=False)
class Result:
    """The figures of one method's run, as in its `result.json`.

    Example:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> result = run.result
        >>> result.method, result.rounds, result.metric.unit
        ('cobo', 1, '%')
        >>> 0 <= result.mean <= 100
        True

    Args:
        method: Its name.
        recipe: The recipe's name.
        seed: Of the run.
        rounds: That were done.
        metric: What `mean` and the clients' scores are of.
        mean: The test metric, averaged over clients right after their last local iteration.
        mean_synced: As `mean`, after one more synchronisation.
        clients: By client, what each got and what it cost.
        wall_s: Seconds that the run took.
        mean_loss: Mean test loss over clients, nats.
        best: The best mean of all evaluations.
        best_of_last_ten: The best mean of the last ten evaluations.
        best_by_valid: Round, `valid` and `test` of the evaluation with the best validation score.
        training: What training cost each client that trains, where others are scored; None
            otherwise.
        groups: The mean of each group of clients that never trained; None without such.
        labels: The classes that each client has; None of texts.
        label_counts: Examples of each class, by client, where some clients never train; None
            otherwise.
        anchors: The clients that experts of a pool start from; None without.
        once_bytes: Of what everybody gets once, before the first round.
        clusters: The true cluster of each client where it is known.
        weights_error: How far the found collaboration weights are from the true clusters; None
            where either is unknown.
        evaluations: `round`, `iteration`, `valid`, `test`, `clients` and what else was found, of
            each evaluation.
        curve: `points` of the curves, and the `windows` of each; None without.
        lost: Replies by client that were dropped or did not come.
        rounds_taken_part: By client.
        never_took_part: The clients that took part in no round.
        privacy: What was spent, and by what reckoning; None without differential privacy.
        peak_memory_bytes: Of this process.
        versions: Of coterie, torch and Python.
        machine: `device`, `dtype` and `threads`.
    """

    method: str
    recipe: str
    seed: int
    rounds: int
    metric: MetricInfo
    mean: float
    mean_synced: float
    clients: Mapping[str, ClientResult]
    wall_s: float
    mean_loss: float | None = None
    best: float | None = None
    best_of_last_ten: float | None = None
    best_by_valid: Mapping[str, float] | None = None
    training: Mapping[str, Mapping[str, int]] | None = None
    groups: Mapping[str, float] | None = None
    labels: Mapping[str, Sequence[int]] | None = None
    label_counts: Mapping[str, Sequence[int]] | None = None
    anchors: Sequence[str] | None = None
    once_bytes: int | None = None
    clusters: Mapping[str, int] | None = None
    weights_error: float | None = None
    evaluations: Sequence[Mapping[str, Any]] = ()
    curve: Mapping[str, Any] | None = None
    lost: Mapping[str, int] | None = None
    rounds_taken_part: Mapping[str, int] | None = None
    never_took_part: Sequence[str] | None = None
    privacy: Mapping[str, Any] | None = None
    peak_memory_bytes: int | None = None
    versions: Mapping[str, str] | None = None
    machine: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what is in result.json; figures that an older version did not write are None.
        Raises CheckpointError.
        """
        given = _given(cls, {"metric": None} | dict(found))
        given["metric"] = MetricInfo.from_json(given["metric"])
        given["clients"] = {i: ClientResult.from_json(of) for i, of in given["clients"].items()}
        return cls(**given)

    def to_json(self) -> Json:
        """Return what is in result.json."""
        clients = {i: client.to_json() for i, client in self.clients.items()}
        return {**vars(self), "metric": self.metric.to_json(), "clients": clients}

    def __repr__(self) -> str:
        score = f"{self.metric} {self.mean:.2f}"
        about = f"{self.method} on {self.recipe}, seed {self.seed}, {self.rounds} rounds"
        return f"Result({about}: {score})"


@dataclass(frozen=True, repr=False)
class Row:
    """One method's line of a comparison: mean and deviation over seeds, and what it cost a client
    in the mean.

    Example:
        >>> import coterie
        >>> short = {"name": "fedavg", "rounds": 1}
        >>> table = coterie.compare(
        ...     ["local", "fedavg"], "cobo-digits", method=short, seeds=2, out="table"
        ... )
        >>> row = table["fedavg"]
        >>> len(row.per_seed), min(row.per_seed) <= row.mean <= max(row.per_seed)
        (2, True)

    Args:
        method: Its name.
        metric: What the scores are of.
        mean: Of `Result.mean` over seeds.
        std: Sample standard deviation of it over seeds.
        per_seed: `Result.mean` of each seed.
        mean_synced: As `mean`, after one more synchronisation.
        clients: Mean test metric of each client.
        trainable_parameters: Of a client.
        flops_per_token: Of one prediction's forward pass.
        bytes_up_per_round: Of a client.
        bytes_down_per_round: Of a client.
        wall_s: Seconds of a run.
        groups: Mean of each group of clients that never trained.
        groups_std: Sample standard deviation of those over seeds.
        best: Mean of `Result.best`.
        best_of_last_ten: Mean of `Result.best_of_last_ten`.
        gate_accuracy: Percent; None without a gate.
        loss: Mean test loss, nats.
        between_clients: Standard deviation of the test metric over clients.
        improved: Percent of clients that do better than alone; None without `local` among the
            methods.
        weights_error: Mean of `Result.weights_error`.
        iterations: Local iterations of a run.
        active_parameters: That one prediction uses.
        state_bytes: That a client remembers between rounds.
        once_bytes: Of what everybody gets once.
        peak_memory_bytes: Of the process.
        lost: Replies by client that were dropped or did not come.
        never_took_part: How many clients took part in no round.
        privacy: What was spent; None without differential privacy.
    """

    method: str
    metric: MetricInfo
    mean: float
    std: float
    per_seed: Sequence[float]
    mean_synced: float
    clients: Mapping[str, float]
    trainable_parameters: int
    flops_per_token: int
    bytes_up_per_round: int
    bytes_down_per_round: int
    wall_s: float
    groups: Mapping[str, float] | None = None
    groups_std: Mapping[str, float] | None = None
    best: float | None = None
    best_of_last_ten: float | None = None
    gate_accuracy: float | None = None
    loss: float | None = None
    between_clients: float | None = None
    improved: float | None = None
    weights_error: float | None = None
    iterations: int | None = None
    active_parameters: int | None = None
    state_bytes: int | None = None
    once_bytes: int | None = None
    peak_memory_bytes: int | None = None
    lost: Mapping[str, int] | None = None
    never_took_part: int | None = None
    privacy: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what an entry of `rows` in comparison.json says. Raises CheckpointError."""
        given = _given(cls, {"metric": None} | dict(found))
        return cls(**given | {"metric": MetricInfo.from_json(given["metric"])})

    def to_json(self) -> Json:
        """Return the JSON object."""
        return {**vars(self), "metric": self.metric.to_json()}

    def __repr__(self) -> str:
        return f"Row({self.method}: {self.metric} {self.mean:.2f} ± {self.std:.2f})"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods on the same data, base and budget, as in `comparison.json`.

    Example:
        >>> import coterie
        >>> short = {"name": "fedavg", "rounds": 1}
        >>> table = coterie.compare(
        ...     ["local", "fedavg"], "cobo-digits", method=short, seeds=2, out="table"
        ... )
        >>> [row.method for row in table.rows]
        ['local', 'fedavg']
        >>> table.best in table.rows
        True

    Args:
        recipe: The recipe's name.
        own: The recipe's own method.
        seeds: Of the runs of each method.
        metric: What the rows are scored by.
        scored: Which models `mean` and `mean_synced` are of.
        rows: One for each method.
        notes: What a reader of the table must know: budgets that are unlike, bounds, replies that
            were lost, privacy.
        versions: Of coterie, torch and Python.
        machine: `device`, `dtype` and `threads`.
        folder: Where the runs, their models and `report.html` are; None for one that was read from
            JSON alone.
    """

    recipe: str
    own: str
    seeds: Sequence[int]
    metric: MetricInfo
    scored: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    versions: Mapping[str, str] | None = None
    machine: Mapping[str, Any] | None = None
    folder: Path | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any], folder: Path | None = None) -> Self:
        """Return what is in comparison.json. Raises CheckpointError."""
        given = _given(cls, {"metric": None} | dict(found))
        rows = tuple(Row.from_json(row) for row in given["rows"])
        return cls(
            **given
            | {"metric": MetricInfo.from_json(given["metric"]), "rows": rows, "folder": folder}
        )

    def to_json(self) -> Json:
        """Return what is in comparison.json."""
        found = {name: value for name, value in vars(self).items() if name != "folder"}
        return found | {
            "metric": self.metric.to_json(),
            "rows": [row.to_json() for row in self.rows],
        }

    def __getitem__(self, method: str) -> Row:
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(method)

    @property
    def best(self) -> Row:
        """The row with the best mean."""
        return min(
            self.rows, key=lambda row: row.mean if self.metric.lower_is_better else -row.mean
        )

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.method} {row.mean:.2f} ± {row.std:.2f}" for row in self.rows)
        return f"Comparison({self.metric} of {self.recipe}, {len(self.seeds)} seeds: {rows})"
