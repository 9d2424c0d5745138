"""Conditions of a paper's statement: measured figures must lie within bounds; and the figures of a
run that statements compare, at its end and at four fifths of it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from coterie.aggregation.collaboration import weights_error
from coterie.core import metrics
from coterie.core.result import ROUTING, Evaluation, Result, Routing
from coterie.core.result import rows as comparison
from coterie.papers.tables import function_words
from coterie.reports.curves import router_series
from coterie.runs.folder.metrics import METRICS

LEVEL = 0.95  # of an interval
LAST = 0.2  # the part of a run whose change says how finished it is
AGAIN = 5  # fifths for which an improvement is thought to go on: the run once more


@dataclass(frozen=True)
class Condition:
    """Figures of which a statement says that their mean lies within bounds. A figure is of one
    seed, and of two rows it is the difference of that seed's runs, which see the same texts: what a
    seed does to both cancels.
    """

    name: str  # what the figures are, in words
    per_seed: Sequence[float]
    low: float = -math.inf
    high: float = math.inf
    strict: bool = False  # whether a bound itself is beyond it
    form: Literal["", "%"] = ""  # the unit
    # for how many pairs of client and seed it holds, and of how many; None: not compared
    wins: tuple[int, int] | None = None
    move: float = 0.0  # in the last fifth of runs that still improve

    @cached_property
    def mean(self) -> float:
        """The mean of the figures."""
        return metrics.mean(self.per_seed)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The ends of Student's interval for the mean over seeds; None for a single seed."""
        count = len(self.per_seed)
        if count < 2 or not all(map(math.isfinite, self.per_seed)):
            return None
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, count - 1))
        half *= metrics.deviation(list(self.per_seed)) / math.sqrt(count)
        return self.mean - half, self.mean + half

    @property
    def holds(self) -> bool:
        """Whether the mean lies within the bounds."""
        return self._side(self.mean) == 0

    @property
    def surely(self) -> bool | None:
        """Whether the whole interval lies within the bounds, or beyond one; None otherwise."""
        return None if self.interval is None else self._state()

    @property
    def may_turn(self) -> bool:
        """Whether another verdict would come if all went on at that pace for as long again."""
        later = (self._state(fifths * self.move) for fifths in range(1, AGAIN + 1))
        return any(state != self._state() for state in later)

    @property
    def margin(self) -> float:
        """The distance of the mean from the nearest bound, negative beyond it."""
        return min(self.mean - self.low, self.high - self.mean)

    def in_words(self) -> str:
        """Return the figure with its interval, in words."""
        text = f"{self.name} {self._figure(self.mean)}"
        if self.interval is not None:
            low, high = map(self._figure, self.interval)
            text += f" (interval {low} to {high})"
        if self.wins is not None:
            text += f", for {self.wins[0]} of {self.wins[1]} clients and seeds"
        return text

    def _state(self, shift: float = 0.0) -> bool | None:
        """Return `surely`, or for a single seed `holds`, if all figures were shifted."""
        ends = self.interval or (self.mean, self.mean)
        sides = {self._side(end + shift) for end in ends}
        return sides == {0} if len(sides) == 1 else None

    def _side(self, value: float) -> int:
        """Return -1 below the bounds, 0 within them, 1 above."""
        below = value <= self.low if self.strict else value < self.low
        return (value >= self.high if self.strict else value > self.high) - below

    def _figure(self, value: float) -> str:
        small = max(map(abs, self.per_seed)) < 1
        return f"{value:+.{3 if small else 2}f}{' %' if self.form else ''}"


@dataclass(frozen=True)
class Judgement:
    """Conditions of a statement that must all hold. It holds if it surely does in every condition,
    each at its own level: that all are true by chance is less likely than that one is. It does not
    hold if it surely fails in one.
    """

    conditions: Sequence[Condition]

    @property
    def holds(self) -> bool:
        """Whether all means lie within their bounds."""
        return all(one.holds for one in self.conditions)

    @property
    def state(self) -> bool | None:
        """Return `surely`; for a single seed, whether it holds there."""
        return self.holds if self.decisive.interval is None else self.surely

    @property
    def surely(self) -> bool | None:
        """Whether the statement holds beyond the variation over seeds; None if that is open."""
        answers = [one.surely for one in self.conditions]
        if False in answers:
            return False
        return True if all(answers) else None

    @property
    def unfinished(self) -> bool:
        """Whether what still improves could turn it: all of its failures, or else anything."""
        by_state = [(one._state(), one) for one in self.conditions]
        if failures := [one for state, one in by_state if state is False]:
            return all(one.may_turn for one in failures)
        undecided = [one for state, one in by_state if state is None]
        return any(one.may_turn for one in undecided or self.conditions)

    @property
    def decisive(self) -> Condition:
        """The condition that decides: the one that fails or is closest to it."""
        order = {False: 0, None: 1, True: 2}
        return min(self.conditions, key=lambda one: (order[one.surely], one.margin))


@dataclass(frozen=True)
class SeedFigures:
    """The figures of one seed's run that statements compare."""

    mean: float  # as the table shows it
    clients: Mapping[str, float]  # the test metric of each client that the mean is over
    # the mean of each group of clients that never trained
    groups: Mapping[str, float] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)  # others, by name
    # the share of the run, the mean and the W error at each evaluation
    course: Sequence[tuple[float, float, float | None]] = ()
    share: float = 1.0  # of the run, after which all this was measured
    earlier: "SeedFigures | None" = None  # before the last fifth of the run; None if unknown


def seed_figures(
    shown: Callable[[Result], float | None],
    results: Sequence[Result],
    alone: Sequence[Result],
    folders: Sequence[Path],
    spoken: Collection[str],
    fused: bool = False,
) -> list[SeedFigures]:
    """Return the figures of each seed of a row: `shown` returns the value of a run that the table
    shows, `alone` are Local's results with the same seeds (() if it was not run), `spoken` names
    the figures that statements need beside the metric, and `fused` is as of a row of a table.
    """

    def of(result: Result, others: Sequence[Result], folder: Path, end: float) -> SeedFigures:
        return SeedFigures(
            mean=shown(result) or 0.0,
            clients={i: client.test for i, client in result.headline.items()},
            groups=result.groups,
            figures=_figures(result, others, folder, spoken),
            course=_course(result),
            share=_iterations(result) / end if end else 0.0,
        )

    seeds, alone_before = [], [at_share(result, 1 - LAST) or result for result in alone]
    for result, folder in zip(results, folders, strict=True):
        end, before = _iterations(result), at_share(result, 1 - LAST)
        earlier = of(before, alone_before, folder, end) if before and not fused else None
        seeds.append(replace(of(result, alone, folder, end), earlier=earlier))
    return seeds


def _iterations(result: Result) -> int:
    """Return the iterations after which a result was last evaluated; 0 without training."""
    return result.evaluations[-1].iteration if result.evaluations else 0


def at_share(result: Result, share: float) -> Result | None:
    """Return a result as it was at the last evaluation within the first `share` of the run; None if
    there was none. What trains nothing is always as it is.
    """
    if not (end := _iterations(result)):
        return result
    known = tuple(e for e in result.evaluations if e.iteration <= share * end + 1e-9)
    if not known:
        return None
    last, tests = known[-1], [e.test for e in known]
    then = {i: scores.test for i, scores in last.clients.items()}
    return replace(
        result,
        evaluations=known,
        mean=last.test,
        clients={i: replace(c, test=then.get(i, c.test)) for i, c in result.clients.items()},
        groups=last.groups,
        best=metrics.best(tests, result.metric),
        best_of_last_ten=metrics.best(tests[-10:], result.metric),
        weights_error=_weights_error(result, last),
    )


def _course(result: Result) -> list[tuple[float, float, float | None]]:
    end = _iterations(result)
    known = [e for e in result.evaluations if end]
    return [(e.iteration / end, e.test, _weights_error(result, e)) for e in known]


def _weights_error(result: Result, evaluated: Evaluation) -> float | None:
    weights = evaluated.weights
    if result.clusters is None or weights is None or len(weights) != len(result.clusters):
        return None
    stochastic = all(abs(sum(row) - 1) < 1e-5 * len(row) for row in weights)  # of five digits
    return weights_error(weights, [*result.clusters.values()], stochastic)


def _figures(
    result: Result, alone: Sequence[Result], folder: Path, spoken: Collection[str]
) -> dict[str, float]:
    """Return the known figures of a run by name; those that need files only if they are needed."""
    costs = [*(result.training or result.clients).values()]
    known: dict[str, float | None] = {
        "weights_error": result.weights_error,
        "improved": comparison.improved([result], alone) if alone else None,
        "gate_accuracy": result.gate_accuracy,
        "bytes": metrics.mean(c.bytes_up + c.bytes_down for c in costs) / max(result.rounds, 1),
        "flops": metrics.mean(c.flops_per_token for c in costs),
        "parameters": metrics.mean(c.trainable_parameters for c in costs),
    }
    for name in spoken:
        kind, *clients = name.split()
        if kind == "favour":
            known[name] = _favour(result, *clients)
    if {"generalist", "generalist_change"} & {*spoken}:
        first, last = _generalist(result, folder)
        known |= {"generalist": last, "generalist_change": last - first}
    if any(name in spoken for name in _TOKENS) and (folder / ROUTING).exists():
        known |= _tokens(Routing.read(folder))
    return {name: value for name, value in known.items() if value is not None}


def _favour(result: Result, client: str, other: str) -> float | None:
    """Return how much more weight a client gives another than any third; None without weights."""
    clients = [*(result.training or result.clients)]
    at = clients.index(client)
    rows = [e.weights[at] for e in result.evaluations if e.weights is not None]
    if not rows:
        return None
    means = dict(zip(clients, map(metrics.mean, zip(*rows, strict=True)), strict=True))
    del means[client]
    return means.pop(other) - max(means.values())


def _generalist(result: Result, folder: Path) -> tuple[float, float]:
    """Return the generalists' mean routing weight in the first and in the last known round."""
    end, ends = _iterations(result) or math.inf, []
    for i, rounds in router_series(folder / METRICS).items():
        generalists = result.clients[i].generalists
        known = [blocks for iteration, blocks in rounds if iteration <= end] or [rounds[0][1]]
        weights = [[sum(block[:generalists]) for block in known[at]] for at in (0, -1)]
        ends.append([metrics.mean(blocks) for blocks in weights])
    first, last = (metrics.mean(of) for of in zip(*ends, strict=True))
    return first, last


_TOKENS = ("function_first", "function_last", "foreign_first", "foreign_last")


def _tokens(routing: Routing) -> dict[str, float | None]:
    """Return by how many percent of tokens a generalist is the first choice more often of function
    words than of the other words of a client's own text, and of other clients' texts than of its
    own, in the first and in the last block.
    """
    gaps: dict[str, list[float]] = {name: [] for name in _TOKENS}
    for client, texts in routing.weights.items():
        generalists = routing.experts[client].generalists
        for block, at in ((0, "first"), (-1, "last")):
            chosen = {
                text: np.asarray(weights[block]).argmax(axis=1) < generalists
                for text, weights in texts.items()
            }
            if client not in chosen:
                continue
            words = [token.strip().lower() for token in routing.texts[client]]
            function = np.array([word in function_words() for word in words])
            content = np.array([word.isalpha() for word in words]) & ~function
            if function.any() and content.any():
                shares = (chosen[client][kind].mean() for kind in (function, content))
                gaps[f"function_{at}"].append(100 * float(np.subtract(*shares)))
            others = [share.mean() for text, share in chosen.items() if text != client]
            if others:
                gaps[f"foreign_{at}"].append(100 * float(np.mean(others) - chosen[client].mean()))
    return {name: metrics.mean(values) if values else None for name, values in gaps.items()}
