"""Conditions of a paper's statement: measured figures must lie within bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from coterie.core import metrics

LEVEL = 0.95  # of an interval
LAST = 0.2  # the part of a run whose change says how finished it is
AGAIN = 5  # fifths for which an improvement is thought to go on: the run once more


@dataclass(frozen=True)
class Condition:
    """Figures of which a statement says that their mean lies within bounds.

    A figure is of one seed, and of two rows it is the difference of that seed's runs, which see the
    same texts: what a seed does to both cancels.
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
