"""What an experiment on a theorem reports: claims with their verdicts, a table of numbers, and panels to draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")  # Okabe and Ito, told apart on light and dark ground
GREY = "#808080"


@dataclass(frozen=True)
class Claim:
    """One checked sentence. `holds` is the verdict on the sentence as it stands, also where it says that something fails."""

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

    label: str  # labels and titles may hold matplotlib's $mathematics$
    values: Sequence[float]
    colour: int  # position in COLOURS
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
    """A theorem, run."""

    title: str
    source: str  # paper, theorem
    claims: tuple[Claim, ...]
    table: Table
    panels: tuple[Panel, ...]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


def draw(figure: Any, panel: Panel) -> None:
    """Fill a `matplotlib.figure.Figure` with a panel, legible on light and on dark ground.

    About 5 x 4.8 inches and `layout="constrained"` suit it.
    """
    figure.patch.set_alpha(0)
    axis = figure.subplots()
    for curve in panel.curves:
        points = [(k, value) for k, value in enumerate(curve.values) if value > 0 or not panel.log]
        style = {"linestyle": "--", "linewidth": 1.2} if curve.dashed else {"marker": "o", "markersize": 3.5, "linewidth": 1.5}
        axis.plot(*zip(*points, strict=True), color=COLOURS[curve.colour], label=curve.label, **style)
    if panel.log:
        axis.set_yscale("log")
    axis.set_xlim(left=0)
    axis.set_title(panel.title, color=GREY, fontsize=11)
    axis.set_xlabel(panel.x, color=GREY)
    axis.set_ylabel(panel.y, color=GREY)
    axis.patch.set_alpha(0)
    axis.grid(visible=True, color=GREY, alpha=0.25, linewidth=0.6)
    axis.tick_params(colors=GREY, which="both")
    for spine in axis.spines.values():
        spine.set_color(GREY)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=1, fontsize=9, frameon=False, labelcolor=GREY)


def excess(errors: Sequence[float], rate: float, floor: float = 0.0) -> float:
    """The largest errors[k] / (rate^k errors[0]) over k >= 1: at most 1 where errors decrease at least as fast as `rate` per step.

    Args:
        errors: Non-negative, errors[0] > 0.
        rate: Factor per step, >= 0.
        floor: Errors up to this one are rounding and count as zero.
    """
    ratios = (
        error / bound if (bound := rate**k * errors[0]) > 0 else float("inf") for k, error in enumerate(errors) if k and error > floor
    )
    return max(ratios, default=0.0)
