"""Strips, intervals and dots as inline SVG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.cells import cell_len

from coterie.reports.chart import LETTER, Point, Style, _marker, _Scale, around
from coterie.reports.parts import BLUE, escape, figure, plus_minus


def _beside_names(
    rows: Mapping[str, str], columns: str, height: int, step: float, unit: str
) -> str:
    """Return a chart of rows `step` pixels apart, with room for their names on the left."""
    left = 24 + LETTER * max(map(cell_len, rows), default=0)
    drawn = "".join(
        f'<text class="tick" x="-12" y="{_middle(k, step) + 4:.1f}" text-anchor="end">'
        f"{escape(title)}</text>{row}"
        for k, (title, row) in enumerate(rows.items())
    )
    return (
        f'<svg class="rows" height="{height}" style="--left:{left:.0f}px" role="img" '
        f'aria-label="{escape(unit)}">{columns}{drawn}'
        f'<text class="label" x="50%" y="{height - 4}" '
        f'text-anchor="middle">{escape(unit)}</text></svg>'
    )


def _middle(row: int, step: float) -> float:
    """Return how far below the top of a chart the middle of a row is, in pixels."""
    return 6 + step * (row + 0.5)


def _columns(scale: _Scale, bottom: float, most: int = 5) -> str:
    """Return vertical rules with their numbers."""
    return "".join(
        f'<line class="rule" x1="{scale.at(v)}" x2="{scale.at(v)}" y1="6" y2="{bottom}"/>'
        f'<text class="tick" x="{scale.at(v)}" y="{bottom + 15}" '
        f'text-anchor="middle">{v:.6g}</text>'
        for v in scale.ticks(most)
    )


# by title: the clients' values, their mean, and its deviation over seeds
Strip = Mapping[str, tuple[Mapping[str, float], float, float]]


def reach(strips: Iterable[Strip]) -> Point:
    """Return one range for the values of several strips, so that they can be compared."""
    rows = chain.from_iterable(strip.values() for strip in strips)
    values = chain.from_iterable(
        (*clients.values(), mean - std, mean + std) for clients, mean, std in rows
    )
    return around([v for v in values if math.isfinite(v)])


def strip(rows: Strip, unit: str, limits: Point) -> str:
    """Return a line for each row: a dot for every client, and the mean with its deviation."""
    step, scale = 30, _Scale(*limits, 0, 100)
    height = step * len(rows) + 44
    lines = {
        title: _strip_row(title, *row, scale, _middle(k, step))
        for k, (title, row) in enumerate(rows.items())
    }
    return _beside_names(lines, _columns(scale, height - 38), height, step, unit)


def _strip_row(
    title: str, clients: Mapping[str, float], mean: float, std: float, scale: _Scale, y: float
) -> str:
    dots = "".join(
        f'<circle class="dot" cx="{scale.at(value)}" cy="{y}" r="5" fill="{BLUE}">'
        f"<title>{escape(f'{title}, {i}: {figure(value)}')}</title></circle>"
        for i, value in clients.items()
        if math.isfinite(value)
    )
    if not math.isfinite(mean):
        return dots
    at, tooltip = scale.at(mean), f"{title}, mean: {plus_minus(mean, std)}"
    return (
        f'{dots}<g><line class="whisker" x1="{at}" x2="{at}" y1="{y - 10}" y2="{y + 10}"/>'
        f"{_whisker(scale, mean - std, mean + std, y)}<title>{escape(tooltip)}</title></g>"
    )


def _whisker(scale: _Scale, low: float, high: float, y: float) -> str:
    """Return a stroke from one value to another, and a wider invisible one for the pointer."""
    across = f'x1="{scale.at(low)}" x2="{scale.at(high)}" y1="{y}" y2="{y}"'
    return f'<line class="whisker" {across}/><line class="grip" {across}/>'


@dataclass(frozen=True)
class Interval:
    """A number with the ends of its interval, a name for its tooltip, and a colour."""

    value: float
    low: float
    high: float
    name: str
    colour: str


def intervals(
    rows: Mapping[str, Interval], unit: str, limits: Point, chance: float | None = None
) -> str:
    """Return a line for each row, a dot with a whisker for its interval; `chance` is marked."""
    step, scale = 26, _Scale(*limits, 0, 100)
    height = step * len(rows) + 44
    columns = _columns(scale, height - 38, 4)
    if chance is not None:
        columns += (
            f'<line class="axis" stroke-dasharray="4 3" x1="{scale.at(chance)}" '
            f'x2="{scale.at(chance)}" y1="2" y2="{height - 38}"/>'
        )
    drawn = {}
    for k, (title, row) in enumerate(rows.items()):
        low, high = (min(max(v, scale.low), scale.high) for v in (row.low, row.high))
        y = _middle(k, step)
        dot = f'<circle cx="{scale.at(row.value)}" cy="{y}" r="4.5" fill="{row.colour}"/>'
        whisker = _whisker(scale, low, high, y)
        drawn[title] = f"<g>{whisker}{dot}<title>{escape(row.name)}</title></g>"
    return _beside_names(drawn, columns, height, step, unit)


@dataclass(frozen=True)
class Dot:
    """One dot of a plane: its place, the text beside it, a name for its tooltip, and its style."""

    x: float
    y: float
    text: str
    name: str
    style: Style


def plane(dots: Sequence[Dot], x: str, y: str) -> str:
    """Return dots, at least one, in a plane with the same unit on both axes, which have no numbers.
    Texts that would overlap others are left out.
    """
    width, height, left, bottom, edge = 560, 400, 26, 26, 16
    places = [(d.x, d.y) for d in dots]
    (left_most, right_most), (lowest, highest) = (
        (min(values), max(values)) for values in zip(*places, strict=True)
    )
    along = (right_most - left_most) / (width - left - 2 * edge)
    upwards = (highest - lowest) / (height - bottom - 2 * edge)
    unit = max(along, upwards) or 1.0
    middle = (width + left) / 2, (height - bottom) / 2
    drawn: list[str] = []
    labelled: list[Point] = []  # the places of texts
    for dot in dots:
        across = middle[0] + (dot.x - (left_most + right_most) / 2) / unit
        up = middle[1] - (dot.y - (lowest + highest) / 2) / unit
        drawn.append(
            f'<g>{_marker(dot.style, f"{across:.1f}", up)}<circle class="target" '
            f'cx="{across:.1f}" cy="{up:.1f}" r="7"/>'
            f"<title>{escape(dot.name)}</title></g>"
        )
        if all(
            abs(across - tx) > 7 * cell_len(dot.text) or abs(up - ty) > 11 for tx, ty in labelled
        ):
            labelled.append((across, up))
            drawn.append(
                f'<text class="tick" x="{across:.1f}" y="{up - 6:.1f}" '
                f'text-anchor="middle">{escape(dot.text)}</text>'
            )
    axes = (
        f'<path class="axis" d="M{left} 0V{height - bottom}H{width}"/>'
        f'<text class="label" x="{middle[0]}" y="{height - 8}" '
        f'text-anchor="middle">{escape(x)}</text>'
        f'<text class="label" transform="translate(14 {middle[1]}) rotate(-90)" '
        f'text-anchor="middle">{escape(y)}</text>'
    )
    size = f'width="{width}" height="{height}" role="img"'  # which does not follow the page's
    label = escape(f"{y} against {x}")
    picture = f'<svg {size} aria-label="{label}">{axes}{"".join(drawn)}</svg>'
    return f'<figure class="fixed">{picture}</figure>'
