"""The figures of one method's run, as in `result.json`, and a table of several, as in
`comparison.json`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from coterie.core.result.parsing import (
    BestByValid,
    Choices,
    Curve,
    Evaluation,
    Machine,
    MetricInfo,
    PrivacySpent,
    Record,
    Scores,
    Versions,
    WordScores,
)

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Costs(Record):
    """What a run cost one client, see `ClientResult`."""

    trainable_parameters: int = 0
    active_parameters: int | None = None
    flops_per_token: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    state_bytes: int | None = None
    generalists: int = 0
    specialists: int = 0


@dataclass(frozen=True, kw_only=True)
class ClientResult(Costs, Scores):
    """The scores of one client in a run, and its costs.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> client = run.result.clients["c0-0"]
        >>> client.trainable_parameters, client.bytes_up > 0, 0 <= client.test <= 100
        (4810, True, True)

    Args:
        valid: The metric on its validation set.
        test: The metric on its test set, right after its last local iteration; with `keep: best`
            all scores here are of the kept model.
        valid_loss: Mean negative log-likelihood of the validation set, nats.
        test_loss: Mean negative log-likelihood of the test set, nats.
        gate_accuracy: Percent of its samples that the gate gave to an expert of their class; None
            without a gate, and where experts have no anchors.
        experts: The numbers of a pool's experts that the client has; None without a pool.
        parts: Of a method that mixes the predictions of several models: each one's weight and
            scores.
        weight: Of the predictions of a part.
        predictions: The number of test predictions, tokens or examples, that `test` is over.
        test_synced: As `test`, after one more synchronisation; None if the client could not be
            reached. A model kept by `keep: best` is not synchronised again: the value is `test`.
        kept_round: With `keep: best`, the number of rounds after which the kept model was scored;
            None with `keep: last`.
        trainable_parameters: Number of parameters that the client trains.
        active_parameters: Number of parameters that one prediction uses.
        flops_per_token: Of one prediction's forward pass.
        bytes_up: Bytes sent over the whole run.
        bytes_down: Bytes received over the whole run.
        state_bytes: Bytes that the client keeps between rounds.
        generalists: Number of shared experts in its model.
        specialists: Number of experts in its model that stay with it.
        words: How well a keyboard with its model foresees the words of its test text; None unless
            the recipe names a number of `words`, and for text on other machines.
        answers: Percent of its model's answers to the questions of `data` that pass each check,
            and `all` of them; None for data without questions.
        group: The group of a client that never trained; None for a client that trains.
    """

    rare: ClassVar[Collection[str]] = (
        *("experts", "parts", "weight", "group", "kept_round", "words", "answers"),
        "predictions",
    )

    valid: float
    test_synced: float | None = None
    kept_round: int | None = None
    words: WordScores | None = None
    answers: Mapping[str, float] | None = None
    group: str | None = None


def headline(
    clients: Mapping[str, ClientResult], groups: Mapping[str, float] | None
) -> dict[str, ClientResult]:
    """Return the clients to average over: all scored ones, or the first group of unseen clients."""
    first = next(iter(groups or ()), None)
    return {i: client for i, client in clients.items() if client.group == first}


@dataclass(frozen=True, repr=False, kw_only=True)
class Result(Record):
    """The figures of one method's run, as in its `result.json`.

    Examples:
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
        rounds: Number of completed rounds.
        metric: The metric of `mean` and of the clients' scores.
        mean: The test metric, averaged over clients right after their last local iteration.
        mean_loss: Mean test loss over clients, nats.
        mean_synced: As `mean`, after one more synchronisation.
        best: The best mean of all evaluations.
        best_of_last_ten: The best mean of the last ten evaluations.
        best_by_valid: The evaluation with the best validation score.
        clients: Scores and costs by client.
        training: The costs of each client that trains, if not all of them are scored; None
            otherwise.
        drawn_of: Number of clients of whom those that are scored were drawn; None if all are
            scored.
        groups: The mean of each group of clients that never trained; None without such.
        labels: The classes that each client has; None for texts.
        label_counts: Examples of each class, by client, where some clients never train; None
            otherwise.
        anchors: The clients from which experts of a pool start; None without a pool.
        once_bytes: Bytes that every client receives once, before the first round.
        clusters: The true cluster of each client, if known.
        weights_error: The distance of the learned collaboration weights from the true clusters;
            None if either is unknown.
        evaluations: All evaluations, in order.
        curve: Scores on parts of the test sets between evaluations; None without.
        lost: Number of replies of each client that were dropped or never arrived.
        rounds_taken_part: By client.
        never_took_part: The clients that took part in no round.
        privacy: The privacy budget spent, and how it was computed; None without differential
            privacy.
        wall_s: Seconds that the run took.
        part_of: The method that trained this one as a part, `wall_s` an equal share; None: itself.
        peak_memory_bytes: Of this process.
        versions: Of coterie, torch and Python.
        machine: What it was computed on.
    """

    file: ClassVar[str] = RESULT
    rare: ClassVar[Collection[str]] = ("part_of",)

    method: str
    recipe: str
    seed: int
    rounds: int
    metric: MetricInfo
    mean: float
    mean_loss: float | None = None
    mean_synced: float
    best: float | None = None
    best_of_last_ten: float | None = None
    best_by_valid: BestByValid | None = None
    clients: Mapping[str, ClientResult]
    training: Mapping[str, Costs] | None = None
    drawn_of: int | None = None
    groups: Mapping[str, float] | None = None
    labels: Mapping[str, Sequence[int]] | None = None
    label_counts: Mapping[str, Sequence[int]] | None = None
    anchors: Sequence[str] | None = None
    once_bytes: int | None = None
    clusters: Mapping[str, int] | None = None
    weights_error: float | None = None
    evaluations: tuple[Evaluation, ...] = ()
    curve: Curve | None = None
    lost: Mapping[str, int] | None = None
    rounds_taken_part: Mapping[str, int] | None = None
    never_took_part: Sequence[str] | None = None
    privacy: PrivacySpent | None = None
    wall_s: float
    part_of: str | None = None
    peak_memory_bytes: int | None = None
    versions: Versions | None = None
    machine: Machine | None = None

    @property
    def headline(self) -> dict[str, ClientResult]:
        """The clients over which the mean is taken, see `headline`."""
        return headline(self.clients, self.groups)

    @property
    def valid(self) -> float:
        """The metric on validation data, the mean over the clients of `headline`."""
        return fmean(client.valid for client in self.headline.values())

    @property
    def valid_loss(self) -> float | None:
        """Their validation loss, nats; None if an older version did not write it."""
        losses = [client.valid_loss for client in self.headline.values()]
        known = [loss for loss in losses if loss is not None]
        return fmean(known) if len(known) == len(losses) else None

    @property
    def gates(self) -> dict[str, Choices]:
        """The gate's choices at the end, by group of clients; empty without a gate."""
        return dict((self.evaluations[-1].choices if self.evaluations else None) or {})

    @property
    def gate_accuracy(self) -> float | None:
        """Percent of the headline group's test samples sent to an expert with their class."""
        return next((choices.gate_accuracy for choices in self.gates.values()), None)

    def __repr__(self) -> str:
        score = f"{self.metric} {self.mean:.2f}"
        about = f"{self.method} on {self.recipe}, seed {self.seed}, {self.rounds} rounds"
        return f"Result({about}: {score})"


@dataclass(frozen=True, repr=False, kw_only=True)
class Row(Record):
    """One method's line of a comparison: mean and deviation over seeds, and the mean cost for a
    client.

    Examples:
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
        metric: The metric of the scores.
        mean: Of `Result.mean` over seeds.
        std: Sample standard deviation of it over seeds.
        per_seed: `Result.mean` of each seed.
        mean_synced: As `mean`, after one more synchronisation.
        kept_rounds: With `keep: best`, the round of the model that each client has kept, its mean
            over seeds; None with `keep: last`.
        groups: Mean of each group of clients that never trained.
        groups_std: Sample standard deviation of those over seeds.
        best: Mean of `Result.best`.
        best_of_last_ten: Mean of `Result.best_of_last_ten`.
        gate_accuracy: Percent; None without a gate.
        loss: Mean test loss, nats.
        words: Means over clients and seeds, see `ClientResult`.
        answers: The same of `ClientResult.answers`.
        predictions: Number of test predictions that `mean` is over, of all clients.
        between_clients: Standard deviation of the test metric over clients.
        improved: Percent of clients that score better than with `local`; None if `local` is not
            among the methods.
        weights_error: Mean of `Result.weights_error`.
        iterations: Local iterations of a run.
        clients: Mean test metric of each client.
        clients_std: Sample standard deviation of those over seeds; None of one seed.
        trainable_parameters: Of a client.
        active_parameters: Number of parameters that one prediction uses.
        flops_per_token: Of one prediction's forward pass.
        bytes_up_per_round: Of a client.
        bytes_down_per_round: Of a client.
        state_bytes: Bytes that a client keeps between rounds.
        once_bytes: Bytes that every client receives once.
        peak_memory_bytes: Of the process.
        wall_s: Seconds of a run.
        part_of: See `Result`.
        lost: Number of replies of each client that were dropped or never arrived.
        never_took_part: Number of clients that took part in no round.
        drawn_of: Number of clients of whom those that are scored were drawn; None if all are
            scored.
        privacy: The privacy budget spent; None without differential privacy.
    """

    rare: ClassVar[Collection[str]] = ("kept_rounds", "part_of", "words", "answers", "predictions")

    method: str
    metric: MetricInfo
    mean: float
    std: float
    per_seed: Sequence[float]
    mean_synced: float
    kept_rounds: Mapping[str, float] | None = None
    groups: Mapping[str, float] | None = None
    groups_std: Mapping[str, float] | None = None
    clients_std: Mapping[str, float] | None = None
    best: float | None = None
    best_of_last_ten: float | None = None
    gate_accuracy: float | None = None
    loss: float | None = None
    words: WordScores | None = None
    answers: Mapping[str, float] | None = None
    predictions: int | None = None
    between_clients: float | None = None
    improved: float | None = None
    weights_error: float | None = None
    iterations: int | None = None
    clients: Mapping[str, float]
    trainable_parameters: int
    active_parameters: int | None = None
    flops_per_token: int
    bytes_up_per_round: int
    bytes_down_per_round: int
    state_bytes: int | None = None
    once_bytes: int | None = None
    peak_memory_bytes: int | None = None
    wall_s: float
    part_of: str | None = None
    lost: Mapping[str, int] | None = None
    never_took_part: int | None = None
    drawn_of: int | None = None
    privacy: PrivacySpent | None = None

    def mean_of(self, group: str) -> float:
        """Return the mean of a group of unseen clients, or with "" that of the row."""
        return (self.groups or {})[group] if group else self.mean

    def std_of(self, group: str) -> float:
        """Return the deviation of `mean_of` over seeds; 0 if an older version did not store it."""
        return (self.groups_std or {}).get(group, 0.0) if group else self.std

    def __repr__(self) -> str:
        return f"Row({self.method}: {self.metric} {self.mean:.2f} ± {self.std:.2f})"


@dataclass(frozen=True, repr=False, kw_only=True)
class Comparison(Record):
    """Methods on the same data, base and budget, as in `comparison.json`.

    Examples:
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
        metric: The metric that ranks the rows.
        scored: Which models `mean` and `mean_synced` score.
        rows: One for each method.
        notes: What a reader of the table must know: different budgets, bounds, lost replies,
            privacy.
        versions: Of coterie, torch and Python.
        machine: What it was computed on.
        folder: Where the runs, their models and `report.html` are; None if it was read from JSON
            only.
    """

    file: ClassVar[str] = "comparison.json"

    recipe: str
    own: str
    seeds: Sequence[int]
    metric: MetricInfo
    scored: str
    rows: tuple[Row, ...]
    notes: Sequence[str] = ()
    versions: Versions | None = None
    machine: Machine | None = None
    folder: Path | None = None

    def __getitem__(self, method: str) -> Row:
        return {row.method: row for row in self.rows}[method]

    @property
    def best(self) -> Row:
        """The row with the best mean."""
        sign = 1 if self.metric.lower_is_better else -1
        return min(self.rows, key=lambda row: sign * row.mean)

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.method} {row.mean:.2f} ± {row.std:.2f}" for row in self.rows)
        return f"Comparison({self.metric} of {self.recipe}, {len(self.seeds)} seeds: {rows})"
