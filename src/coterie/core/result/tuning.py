"""The result of a search for settings, as in `tune.json`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from coterie.core.result.parsing import Machine, MetricInfo, Record, Versions

TUNING = "tune.json"
ROUNDS = "method.rounds"  # the field of a recipe that says how long a run is


@dataclass(frozen=True, kw_only=True)
class Tried(Record):
    """One candidate at a number of rounds."""

    rare: ClassVar[Collection[str]] = ("problem",)

    settings: Mapping[str, Any]  # by fields of the recipe
    rounds: int
    rung: int | None = None  # counted from 0; None beyond the edge of the grid
    # Mean over clients and seeds; None if a run diverged or the settings were refused.
    valid: float | None = None
    valid_loss: float | None = None  # likewise, nats
    per_seed: Sequence[float] = ()  # `valid` of each seed
    iterations: int = 0  # local ones, of all its runs
    problem: str | None = None  # why it has no score


@dataclass(frozen=True, kw_only=True)
class TunedRow(Record):
    """The settings that were chosen for one method, and the effort of the search.

    Examples:
        >>> import coterie
        >>> short = {"method": {"rounds": 4}}
        >>> found = coterie.tune("fedavg", "cobo-digits", trials=2, out="tuned", **short)
        >>> row = found["fedavg"]
        >>> row.candidates, list(row.chosen)[0], row.recipe
        (2, 'training.experts.lr', 'chosen/fedavg.yaml')

    Args:
        method: Its name.
        recipe: The file with the whole recipe that was chosen, in the folder of the search.
        chosen: Values by fields of the recipe; empty for a method that trains nothing.
        rounds: Of the chosen run.
        valid: The metric of the chosen on validation; None where nothing was tuned.
        candidates: Number of settings that were tried, most of them in short runs only.
        runs: Number of runs, over rungs and seeds.
        iterations: Local iterations of all runs together.
        alike: Other candidates, run for the same number of rounds, that are not clearly worse: they
            differ by at most two standard errors of the differences, paired by client and seed.
        at_edge: Fields in which the best lies at the edge of what was tried.
        tried: Every candidate, in order.
    """

    method: str
    recipe: str
    chosen: Mapping[str, Any]
    rounds: int
    valid: float | None = None
    candidates: int = 0
    runs: int = 0
    iterations: int = 0
    alike: int = 0
    at_edge: Sequence[str] = ()
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, repr=False, kw_only=True)
class Tuning(Record):
    """The settings that were chosen on validation data for several methods with the same effort, as
    in `tune.json`.

    Examples:
        >>> import coterie
        >>> short = {"method": {"rounds": 4}}
        >>> found = coterie.tune(["fedavg", "local"], "cobo-digits", trials=2, out="tuned", **short)
        >>> [row.method for row in found.rows]
        ['fedavg', 'local']
        >>> run = coterie.run(found.path("local"), out="tuned-run")

    Args:
        recipe: The recipe's name.
        metric: The metric that scores candidates, on validation data.
        seeds: Of each candidate's runs.
        effort: The effort for every method that trains, as a sentence.
        rows: One for each method.
        notes: Sentences that a reader of the table must know.
        versions: Of coterie, torch and Python.
        machine: What it was computed on.
        folder: Of the search; None if it was read from JSON only.
    """

    file: ClassVar[str] = TUNING

    recipe: str
    metric: MetricInfo
    seeds: Sequence[int]
    effort: str
    rows: tuple[TunedRow, ...]
    notes: Sequence[str] = ()
    versions: Versions | None = None
    machine: Machine | None = None
    folder: Path | None = None

    def __getitem__(self, method: str) -> TunedRow:
        return {row.method: row for row in self.rows}[method]

    def path(self, method: str) -> Path:
        """Return the file of the recipe that was chosen for a method."""
        return (self.folder or Path()) / self[method].recipe

    def __repr__(self) -> str:
        rows = [r.method if r.valid is None else f"{r.method} {r.valid:.2f}" for r in self.rows]
        return f"Tuning({self.metric} of {self.recipe}: {', '.join(rows)})"


def name_of(key: str) -> str:
    """Return a recipe's field as tables name it, without its section."""
    for part in ("training.", "method.", "model."):
        key = key.removeprefix(part)
    return key


def value(setting: Any) -> str:
    """Return a setting's value as people read it."""
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def written(settings: Mapping[str, Any]) -> str:
    """Return settings in one line."""
    return ", ".join(f"{name_of(key)} {value(setting)}" for key, setting in settings.items())
