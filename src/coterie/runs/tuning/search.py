"""The search for settings, without any runs: successive halving over a grid, the extension of a
grid whose best lies at its edge, and a plain sweep.

A search is a generator: it yields trials, is sent their scores, and returns what it found, so that
the searches of several methods go on side by side (`together`). Successive halving is that of
Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization
(2016), with whole runs of fewer rounds in the place of unfinished ones: a schedule of the learning
rate then ends where the run does.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import Any, TypeVar

from coterie.core.result import ROUNDS

K = TypeVar("K")
Candidate = Mapping[str, Any]  # values of a recipe's fields, by dotted keys
Score = tuple[float, ...]  # the least is the best
LOST: Score = (math.inf,)  # of a run that diverged
EXTENSIONS = 4  # of a swept grid, at each key
_DIGITS = 4  # of a value that is put between two others


@dataclass(frozen=True)
class Field:
    """A field of a recipe and the values that are tried: numbers in ascending order, or choices.

    Only positive numbers have ratios: their grid can be made denser, and extended.
    """

    key: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        distinct = [v for k, v in enumerate(self.values) if v not in self.values[:k]]
        values = sorted(distinct) if _numbers(distinct) else distinct
        object.__setattr__(self, "values", tuple(values))

    @property
    def graded(self) -> bool:
        """Whether it has ratios: at least two positive numbers, and none below 0."""
        return _numbers(self.values) and self.values[0] >= 0 and sum(v > 0 for v in self.values) > 1

    def denser(self, between: int) -> "Field":
        """Return the same with so many values more between any two neighbours, in equal ratios."""
        low = [value for value in self.values if value > 0]
        new = [
            self._rounded(a * (b / a) ** (k / (between + 1)))
            for a, b in pairwise(low)
            for k in range(1, between + 1)
        ]
        return Field(self.key, (*self.values, *new))

    def beyond(self, value: Any, up: bool) -> Any:
        """Return the value next to an end, by the ratio of the grid there; None: there is none."""
        if not self.graded or value <= 0:
            return None
        ends = [v for v in self.values if v > 0]
        ratio = ends[-1] / ends[-2] if up else ends[0] / ends[1]
        beyond = self._rounded(value * ratio)
        return None if beyond == value or beyond <= 0 else beyond

    def past_edge(self, value: Any, tried: Sequence[Any]) -> Any:
        """Return the value next to the best one, if that is the least or the largest of those
        tried; None if it is not, or there is no next one.
        """
        if not self.graded:
            return None
        ends = {min(tried): False, max(tried): True}
        return self.beyond(value, ends[value]) if value in ends else None

    def place(self, value: Any) -> Any:
        """Return what values are ordered by: numbers by themselves, choices as they were named."""
        return value if _numbers(self.values) else self.values.index(value)

    def _rounded(self, value: float) -> Any:
        if all(isinstance(v, int) for v in self.values):
            return round(value)
        return float(f"{value:.{_DIGITS}g}")


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


@dataclass(frozen=True)
class Effort:
    """What a search may cost, the same for every method.

    Args:
        trials: Candidates of the first rung.
        seeds: Runs of a candidate, whose mean is its score.
        eta: 1/eta of the candidates go on to the next rung, which has eta times the rounds.
        rungs: At most so many, the last one with all rounds.
        extensions: Candidates beyond the edges of the grid, at most.
    """

    trials: int = 8
    seeds: int = 1
    eta: int = 2
    rungs: int = 3
    extensions: int = 8

    def shares(self, rounds: int) -> list[float]:
        """Return the share of the rounds of each rung: those that differ by a round at least."""
        shares = [self.eta**-k for k in reversed(range(self.rungs))]
        return list({part_of(rounds, share): share for share in shares}.values())

    def count(self, rung: int) -> int:
        """Return how many candidates are in a rung, counted from 0, at most."""
        return max(1, int(self.trials // self.eta**rung))


def part_of(rounds: int, share: float) -> int:
    """Return how many rounds a share is: 1 at least, unless there are none."""
    return min(rounds, max(1, round(rounds * share)))


@dataclass(frozen=True)
class Trial:
    """A candidate, and the share of its rounds that it is run for."""

    candidate: Candidate
    share: float = 1.0


@dataclass(frozen=True)
class Judged:
    """A trial and its score, and the rung that it was in; None: beyond the edge of the grid."""

    trial: Trial
    score: Score
    rung: int | None = 0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the best trial (None: there was nothing to choose), all trials in
    order, and the fields in which the best lies at the edge of what was tried.
    """

    chosen: Judged | None
    judged: tuple[Judged, ...] = ()
    at_edge: tuple[str, ...] = ()


Search = Generator[Sequence[Trial], Sequence[Score], SearchResult]


def together(
    searches: Mapping[K, Search],
    evaluate: Callable[[Sequence[tuple[K, Trial]]], Sequence[Score]],
) -> dict[K, SearchResult]:
    """Run searches side by side: what all of them ask for next is evaluated in one call.

    `evaluate` scores trials of these keys in their order. The results are in the order of the
    searches.
    """
    results: dict[K, SearchResult] = {}
    pending: dict[K, Sequence[Trial]] = {}

    def advance(key: K, scores: Sequence[Score] | None) -> None:
        try:
            pending[key] = searches[key].send(scores) if scores is not None else next(searches[key])
        except StopIteration as end:
            pending.pop(key, None)
            results[key] = end.value

    for key in searches:
        advance(key, None)
    while pending:
        batch = [(key, trial) for key, trials in pending.items() for trial in trials]
        scores = iter(evaluate(batch))
        by_key = {key: list(islice(scores, len(trials))) for key, trials in pending.items()}
        for key, scores_of_key in by_key.items():
            advance(key, scores_of_key)
    return {key: results[key] for key in searches}


def sweep(
    grid: Mapping[str, Sequence[Any]],
    allowed: Callable[[Trial], bool] = lambda trial: True,
    extensions: int = EXTENSIONS,
) -> Search:
    """Choose key after key, each among its values with the others as they were chosen before, or
    else the first ones. Of equal ones the first is taken. A grid whose best lies at its edge is
    extended there.

    At most so many extensions of each key are run, if they are allowed.
    """
    choice = {key: values[0] for key, values in grid.items()}
    judged: list[Judged] = []
    chosen: Judged | None = None
    at_edge: list[str] = []
    for key, values in grid.items():
        field, judged_here = Field(key, tuple(values)), list[Judged]()
        trials = [Trial(choice | {key: value}) for value in values]
        for rung in (0, *[None] * extensions):
            scores = yield trials
            judged_here += [Judged(t, score, rung) for t, score in zip(trials, scores, strict=True)]
            chosen = min(judged_here, key=lambda candidate: candidate.score[0])
            step = _past_edge(field, chosen, judged_here)
            if step is None or not allowed(step):
                break
            trials = [step]
        else:
            at_edge.append(key)
        judged += judged_here
        choice = dict(chosen.trial.candidate) if chosen else choice
    return SearchResult(chosen, tuple(judged), tuple(at_edge))


def halving(
    fields: Sequence[Field],
    effort: Effort,
    rounds: int,
    default: Candidate | None = None,
    shorter: Callable[["Judged", "Judged"], bool] | None = None,
    allowed: Callable[[Trial], bool] = lambda trial: True,
) -> Search:
    """Choose by successive halving; then extend the grid where the best lies at its edge.

    The best is the one with the least score among runs of all rounds; of equal ones that within
    the grid, and then that with smaller values, field by field. A run of fewer rounds takes its
    place if `shorter` says so.

    Args:
        fields: What is searched; made denser until there are as many candidates as asked for.
        effort: Its limits.
        rounds: Of the whole run, on which depends how many rungs there are.
        default: The candidate that is always among the first; default: none.
        shorter: Whether the best run of fewer rounds is surely better than the best of all rounds:
            when to stop is then part of the search. Default: it never is.
        allowed: Whether a trial beyond the grid may be run.
    """
    judged: list[Judged] = []
    grids = densified(fields, effort.trials)
    alive = thinned(grids, effort.count(0), fields, default)
    rank = _rank(fields)
    for rung, share in enumerate(effort.shares(rounds)):
        trials = [Trial(candidate, share) for candidate in alive[: effort.count(rung)]]
        scores = yield trials
        in_rung = [Judged(t, score, rung) for t, score in zip(trials, scores, strict=True)]
        judged += in_rung
        alive = [j.trial.candidate for j in sorted(in_rung, key=rank)]
    edges = _Edges(fields, effort, rounds, shorter, allowed)
    for _ in range(effort.extensions):
        if not (steps := edges.steps(judged)):
            break
        trial = next(iter(steps.values()))
        [score] = yield [trial]
        judged.append(Judged(trial, score, None))
    return SearchResult(edges.best(judged), tuple(judged), tuple(edges.steps(judged)))


def _past_edge(field: Field, best: Judged, judged: Sequence[Judged]) -> Trial | None:
    """Return the best one's trial with the next value of a field, see `Field.past_edge`."""
    candidate = best.trial.candidate
    new = field.past_edge(candidate[field.key], [j.trial.candidate[field.key] for j in judged])
    return None if new is None else Trial({**candidate, field.key: new}, best.trial.share)


def densified(fields: Sequence[Field], count: int) -> list[Field]:
    """Return fields with at least so many points in their grid, the shortest made denser first."""
    grids, between = list(fields), [0] * len(fields)
    able = {k for k, field in enumerate(fields) if field.graded}
    while able and math.prod(len(grid.values) for grid in grids) < count:
        k = min(able, key=lambda k: len(grids[k].values))
        between[k] += 1
        denser = fields[k].denser(between[k])
        if len(denser.values) <= len(grids[k].values):  # whole numbers, of which there are no more
            able.discard(k)
        else:
            grids[k] = denser
    return grids


def thinned(
    fields: Sequence[Field],
    count: int,
    given: Sequence[Field] = (),
    default: Candidate | None = None,
) -> list[Candidate]:
    """Return at most so many points of a grid, evenly spread over it: the default first, if it is
    one of them, and then those of the given grid.

    Points are kept by the fractional part of a linear form of their indices, whose coefficients
    are powers of the generalised golden ratio (Roberts, The Unreasonable Effectiveness of
    Quasirandom Sequences, 2018): in every field and every pair of fields they lie evenly.
    """
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (len(fields) + 1))
    indices = list(product(*(range(len(field.values)) for field in fields)))
    points = [
        {field.key: field.values[k] for field, k in zip(fields, place, strict=True)}
        for place in indices
    ]
    phases = [
        math.fmod(sum(k / golden ** (d + 1) for d, k in enumerate(place)), 1.0) for place in indices
    ]
    given_values = {field.key: field.values for field in given}
    new = [any(v not in given_values.get(key, ()) for key, v in point.items()) for point in points]
    order = sorted(range(len(points)), key=lambda k: (points[k] != default, new[k], phases[k]))
    return [points[k] for k in sorted(order[:count])]


def _rank(fields: Sequence[Field]) -> Callable[[Judged], Any]:
    """Return what judged trials are sorted by, the best first."""

    def rank(judged: Judged) -> Any:
        values = judged.trial.candidate
        indices = tuple(f.place(values[f.key]) for f in fields if f.key in values)
        return judged.score, judged.trial.share, judged.rung is None, indices

    return rank


@dataclass(frozen=True)
class _Edges:
    """Where the grid of a search ends, see `halving`."""

    fields: Sequence[Field]
    effort: Effort
    rounds: int
    shorter: Callable[[Judged, Judged], bool] | None
    allowed: Callable[[Trial], bool]

    def best(self, judged: Sequence[Judged]) -> Judged | None:
        rank = _rank(self.fields)
        whole = min((j for j in judged if j.trial.share == 1), key=rank, default=None)
        part = min((j for j in judged if j.trial.share < 1), key=rank, default=None)
        if whole is None or part is None or self.shorter is None:
            return whole
        return part if part.score < whole.score and self.shorter(part, whole) else whole

    def steps(self, judged: Sequence[Judged]) -> dict[str, Trial]:
        """Return the next trial beyond the edge for each field in which the best lies there."""
        best = self.best(judged)
        if best is None:
            return {}
        steps = dict[str, Trial]()
        for field in self.fields:
            step = _past_edge(field, best, judged)
            if step is not None and self.allowed(step):
                steps[field.key] = step
        least = min(j.trial.share for j in judged)
        if self.shorter and best.trial.share == least < 1:
            share = least / self.effort.eta
            if part_of(self.rounds, share) < part_of(self.rounds, least):
                steps[ROUNDS] = Trial(best.trial.candidate, share)
        return steps
