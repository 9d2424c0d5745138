"""What a statement of a paper comes down to: figures of each seed that must lie on one side of a
bound, with an interval for their mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from coterie.core.metrics import deviation, mean

LEVEL = 0.95  # of an interval
Form = Literal["", "%"]  # what stands behind a figure


@dataclass(frozen=True)
class Condition:
    """Figures of which a statement says that their mean lies on one side of a bound.

    A figure is of one seed, and of two rows it is the difference of that seed's runs, which see
    the same texts: what a seed does to both cancels.

    Args:
        name: What the figures are of, in words.
        per_seed: The figures.
        bound: What they are held against.
        above: Whether they must lie above it, otherwise below.
        strict: Whether the bound itself is on the wrong side.
        form: What stands behind a figure.
        wins: Of how many pairs of client and seed it holds, and of how many; None where clients
            are not compared.
    """

    name: str
    per_seed: Sequence[float]
    bound: float = 0.0
    above: bool = True
    strict: bool = True
    form: Form = ""
    wins: tuple[int, int] | None = None

    @cached_property
    def mean(self) -> float:
        """Of the figures."""
        return mean(self.per_seed)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The ends of Student's interval for the mean over seeds; None for a single seed."""
        count = len(self.per_seed)
        if count < 2 or not all(map(math.isfinite, self.per_seed)):
            return None
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, count - 1))
        half *= deviation(list(self.per_seed)) / math.sqrt(count)
        return self.mean - half, self.mean + half

    @property
    def holds(self) -> bool:
        """Whether the mean lies on the right side."""
        return self._right(self.mean)

    @property
    def surely(self) -> bool | None:
        """Whether the whole interval lies on the right side; None if it reaches across the bound,
        or there is none.
        """
        if self.interval is None:
            return None
        ends = {self._right(end) for end in self.interval}
        return ends.pop() if len(ends) == 1 else None

    @property
    def margin(self) -> float:
        """By how much the mean lies on the right side."""
        return self.mean - self.bound if self.above else self.bound - self.mean

    def told(self) -> str:
        """Return the figure with its interval, in words."""
        text = f"{self.name} {self._figure(self.mean)}"
        if self.interval is not None:
            low, high = map(self._figure, self.interval)
            text += f" (interval {low} to {high})"
        if self.wins is not None:
            text += f", for {self.wins[0]} of {self.wins[1]} clients and seeds"
        return text

    def _right(self, value: float) -> bool:
        margin = value - self.bound if self.above else self.bound - value
        return margin > 0 or (margin == 0 and not self.strict)

    def _figure(self, value: float) -> str:
        small = max(map(abs, self.per_seed)) < 1
        return f"{value:+.{3 if small else 2}f}{' %' if self.form else ''}"


@dataclass(frozen=True)
class Judgement:
    """Conditions of a statement that must all hold.

    The statement holds if it surely does in every condition, each at its own level: that all are
    true by chance is less likely than that one is. It does not hold if it surely fails in one.
    """

    conditions: Sequence[Condition]

    @property
    def holds(self) -> bool:
        """Whether all means lie on the right side."""
        return all(one.holds for one in self.conditions)

    @property
    def surely(self) -> bool | None:
        """Whether the statement holds beyond what seeds alone would do; None if that is open."""
        answers = [one.surely for one in self.conditions]
        if False in answers:
            return False
        return True if all(answers) else None

    @property
    def decisive(self) -> Condition:
        """The condition that decides: the one that fails or is closest to it."""
        order = {False: 0, None: 1, True: 2}
        return min(self.conditions, key=lambda one: (order[one.surely], one.margin))
