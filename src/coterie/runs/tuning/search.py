"""Search for settings, independent of runs: successive halving over a grid, its extension if the
best is at its edge, and a plain sweep.

A search is a generator: it yields trials, is sent their scores, and returns its result, so that the
searches of several methods can interleave (`together`). Successive halving is that of Jamieson and
Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (2016), with whole
runs of fewer rounds in place of unfinished ones: a schedule of the learning rate then ends where
the run does.
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
    """A field of a recipe and the values to try: ascending numbers, or choices. Only grids of
    positive numbers, which have ratios, can be refined and extended.
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
        """Return the same with `between` more values between neighbours, in equal ratios."""
        low = [value for value in self.values if value > 0]
        new = [
            self._rounded(a * (b / a) ** (k / (between + 1)))
            for a, b in pairwise(low)
            for k in range(1, between + 1)
        ]
        return Field(self.key, (*self.values, *new))

    def beyond(self, value: Any, up: bool) -> Any:
        """Return the value beyond an end, by the grid's ratio there; None if there is none."""
        if not self.graded or value <= 0:
            return None
        ends = [v for v in self.values if v > 0]
        beyond = self._rounded(value * (ends[-1] / ends[-2] if up else ends[0] / ends[1]))
        return None if beyond == value or beyond <= 0 else beyond

    def past_edge(self, value: Any, tried: Sequence[Any]) -> Any:
        """Return the value beyond the best one if that is the least or largest tried, or None."""
        if not self.graded:
            return None
        ends = {min(tried): False, max(tried): True}
        return self.beyond(value, ends[value]) if value in ends else None

    def place(self, value: Any) -> Any:
        """Return the sort key of a value: a number itself, a choice by position."""
        return value if _numbers(self.values) else self.values.index(value)

    def _rounded(self, value: float) -> Any:
        if all(isinstance(v, int) for v in self.values):
            return round(value)
        return float(f"{value:.{_DIGITS}g}")


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


@dataclass(frozen=True)
class Effort:
    """The limits of a search, the same for every method."""

    trials: int = 8  # candidates of the first rung
    seeds: int = 1  # runs of a candidate, whose mean is its score
    eta: int = 2  # 1/eta of the candidates advance to the next rung, with eta times the rounds
    rungs: int = 3  # maximum; the last one has all rounds
    extensions: int = 8  # most candidates beyond the edges of the grid

    def shares(self, rounds: int) -> list[float]:
        """Return each rung's share of the rounds; rungs differ by at least a round."""
        shares = [self.eta**-k for k in reversed(range(self.rungs))]
        return list({part_of(rounds, share): share for share in shares}.values())

    def count(self, rung: int) -> int:
        """Return the maximal number of candidates in a rung, counted from 0."""
        return max(1, int(self.trials // self.eta**rung))


def part_of(rounds: int, share: float) -> int:
    """Return a share of the rounds: at least 1, unless there are none."""
    return min(rounds, max(1, round(rounds * share)))


@dataclass(frozen=True)
class Trial:
    """A candidate, and the share of rounds that it is run for."""

    candidate: Candidate
    share: float = 1.0


@dataclass(frozen=True)
class Judged:
    """A trial with its score and its rung; None: beyond the edge of the grid."""

    trial: Trial
    score: Score
    rung: int | None = 0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the best trial (None: there was nothing to choose), all trials in
    order, and the fields whose best value is at the edge.
    """

    chosen: Judged | None
    judged: tuple[Judged, ...] = ()
    at_edge: tuple[str, ...] = ()


Search = Generator[Sequence[Trial], Sequence[Score], SearchResult]


def together(
    searches: Mapping[K, Search], evaluate: Callable[[Sequence[tuple[K, Trial]]], Sequence[Score]]
) -> dict[K, SearchResult]:
    """Run searches side by side, and return their results in order: `evaluate` scores the next
    trials of all of them, given by key, in one call.
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
    """Choose one key after another, with the others as chosen before, or else their first values;
    of equal ones the first wins. A grid whose best value is at its edge is extended there, at most
    `extensions` times per key, if `allowed`.
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
    """Choose by successive halving; then extend the grid if the best is at its edge.

    The best has the lowest score among runs of all `rounds`, which bound the number of rungs; ties
    go to trials within the grid, then to smaller values, field by field. Fields are refined until
    there are as many candidates as asked for; `default` is always among the first. If `shorter`
    says that the best run of fewer rounds is surely better, it replaces the best: when to stop is
    then part of the search. `allowed` says whether a trial beyond the grid may be run.
    """
    judged: list[Judged] = []
    alive = thinned(densified(fields, effort.trials), effort.count(0), fields, default)
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
    """Return the best trial with a field's next value, see `Field.past_edge`."""
    candidate = best.trial.candidate
    new = field.past_edge(candidate[field.key], [j.trial.candidate[field.key] for j in judged])
    return None if new is None else Trial({**candidate, field.key: new}, best.trial.share)


def densified(fields: Sequence[Field], count: int) -> list[Field]:
    """Return fields whose grid has at least `count` points, refining the shortest first."""
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
    """Return at most `count` evenly spread points of a grid: the default first, if it is one of
    them, then those of the given grid.

    Points are kept by the fractional part of a linear form of their indices, whose coefficients are
    powers of the generalised golden ratio (Roberts, The Unreasonable Effectiveness of Quasirandom
    Sequences, 2018): they are evenly spread in every field and every pair of fields.
    """
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (len(fields) + 1))
    given_values, ranked = {field.key: field.values for field in given}, []
    for number, place in enumerate(product(*(range(len(field.values)) for field in fields))):
        point = {field.key: field.values[k] for field, k in zip(fields, place, strict=True)}
        phase = math.fmod(sum(k / golden ** (d + 1) for d, k in enumerate(place)), 1.0)
        new = any(value not in given_values.get(key, ()) for key, value in point.items())
        ranked.append(((point != default, new, phase, number), point))
    first = sorted(ranked, key=lambda pair: pair[0])[:count]
    return [point for _, point in sorted(first, key=lambda pair: pair[0][-1])]


def _rank(fields: Sequence[Field]) -> Callable[[Judged], Any]:
    """Return the sort key of judged trials, the best first."""

    def rank(judged: Judged) -> Any:
        values = judged.trial.candidate
        indices = tuple(f.place(values[f.key]) for f in fields if f.key in values)
        return judged.score, judged.trial.share, judged.rung is None, indices

    return rank


@dataclass(frozen=True)
class _Edges:
    """The edges of a search's grid, see `halving`."""

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
        """Return the next trial beyond the edge for each field whose best value is at it."""
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
