"""What an experiment on a theorem reports: claims with their verdicts, a table of numbers, and
panels to draw.

All texts may hold `$mathematics$`, see `theorems.mathematics`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One checked sentence. `holds` is the verdict on the sentence as it stands, also where it
    says that something fails.
    """

    text: str
    holds: bool
    detail: str  # the measured numbers behind the verdict
    beside: bool = False  # not the paper's: what was found beside it


@dataclass(frozen=True)
class Table:
    """A table for a terminal: every row has a cell per column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]


@dataclass(frozen=True)
class Curve:
    """values[k] at x = k. A bound is dashed, in the colour of the curve that it bounds."""

    label: str
    values: Sequence[float]
    colour: int  # a number of one's own
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. On a log scale, values that are not positive are left out."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    log: bool = True


@dataclass(frozen=True)
class Experiment:
    """An experiment on a theorem."""

    title: str
    source: str  # paper, theorem
    claims: tuple[Claim, ...]
    table: Table
    panels: tuple[Panel, ...]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


def excess(errors: Sequence[float], rate: float, floor: float = 0.0) -> float:
    """Return the largest errors[k] / (rate^k errors[0]) over k >= 1: at most 1 where errors
    decrease at least as fast as `rate` per step.

    Args:
        errors: Non-negative, errors[0] > 0.
        rate: Factor per step, >= 0.
        floor: Errors up to this one are rounding and count as zero.
    """
    ratios = (
        error / bound if (bound := rate**k * errors[0]) > 0 else float("inf")
        for k, error in enumerate(errors)
        if k and error > floor
    )
    return max(ratios, default=0.0)
