"""A table of several methods, as in `comparison.json`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coterie.core.result.evaluation import WordScores
from coterie.core.result.parsing import Machine, MetricInfo, PrivacySpent, Record, Versions


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
        return min(
            self.rows, key=lambda row: row.mean if self.metric.lower_is_better else -row.mean
        )

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.method} {row.mean:.2f} ± {row.std:.2f}" for row in self.rows)
        return f"Comparison({self.metric} of {self.recipe}, {len(self.seeds)} seeds: {rows})"
