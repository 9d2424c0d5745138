"""Line charts as inline SVG, which follow the page's colours and need no library."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from coterie.reports.parts import COLOURS, captioned, escape, figure, folded, legend, level

HEIGHT, BROAD = 224, 300  # heights of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 40
LETTER = 7.2  # width of a letter on an axis, in pixels
COLUMNS = 4  # panels side by side, at most
ALL, FIRST = 6, 4  # up to 6 panels are all open; of more, the first 4
MOST = 6  # ticks of a logarithmic axis; of more, only the powers of ten
UNITS = 1000  # width of a panel in the paths of its lines
RATIO = 20.0  # ends of a range that differ by a larger factor get a logarithmic scale
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # a second cue beside the colour
MARKED = 40  # a line of more points has no markers
MARKERS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "M-2.8-2.8h5.6v5.6h-5.6z",
    "M0-3.6l3.4 6h-6.8z",
    "M0-4l4 4l-4 4l-4-4z",
)
Point = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """The style of a line."""

    colour: str
    number: int = 0  # chooses the dashes and the markers
    strength: float = 1.0  # the opacity, in (0, 1]
    marked: bool = True  # points without markers have tooltips, too

    @property
    def sample(self) -> str:
        """The line's sample in a legend."""
        marker = _marker(self, "14", 6) if self.marked else ""
        size = 'viewBox="0 0 28 12" width="28" height="12" aria-hidden="true"'
        return f'<svg class="sample" {size}>{self.path("M0 6H28")}{marker}</svg>'

    def path(self, d: str) -> str:
        dash = DASHES[self.number % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        look = f'stroke="{self.colour}" stroke-opacity="{self.strength:.2f}"{dashed}'
        return f'<path class="line" d="{d}" {look}/>'


@dataclass(frozen=True)
class Line:
    """One line of a panel: points (x, y) in the axes' units, and a name for its tooltips."""

    points: Sequence[Point]
    name: str
    style: Style


def look_of(number: int, marked: bool = True) -> Style:
    """Return the style of line `number`: eight colours, repeated with other dashes and markers."""
    return Style(COLOURS[number % len(COLOURS)], number + number // len(COLOURS), marked=marked)


def samples(lines: Iterable[Line]) -> str:
    """Return the legend of some lines."""
    return legend((line.style.sample, line.name) for line in lines)


@dataclass(frozen=True)
class Axes:
    """The axes of a panel; `y` has the unit in its name."""

    x: str
    y: str
    limits: Point | None = None  # default: what the panel's points need
    log: bool = False  # a logarithmic y axis, without the points that are not positive


def panels(
    charts: Mapping[str, Sequence[Line]],
    x: str,
    y: str,
    limits: Point | None = None,
    broad: bool = False,
    ratios: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> str:
    """Return a panel for each title of `charts`. If there are many, all but the first are folded
    away, and in a narrow window all of them.

    `x` is the unit that the horizontal axis counts from 0, `y` the vertical axis with its unit; its
    `limits` are by default one range for all panels of a kind (`kinds` of titles, by default one),
    as needed. If only `ratios` of the values, all positive, count, a large range has a logarithmic
    scale.
    """
    kind = kinds or dict.fromkeys(charts, "")
    axes = {
        k: _shared(x, y, [charts[t] for t in charts if kind[t] == k], limits, ratios)
        for k in dict.fromkeys(kind.values())
    }
    drawn = [captioned(t, "", panel(t, lines, axes[kind[t]], broad)) for t, lines in charts.items()]
    if len(drawn) <= ALL:
        return grid(drawn, broad)
    first, others = (grid(part, broad) for part in (drawn[:FIRST], drawn[FIRST:]))
    return folded(f"The first {FIRST}", first, narrow=True) + folded(
        f"{len(drawn) - FIRST} more", others
    )


def _shared(
    x: str, y: str, charts: Iterable[Sequence[Line]], limits: Point | None, ratios: bool
) -> Axes:
    """Return the axes of panels that are compared."""
    values = list(finite_heights(charts))
    positive = ratios and limits is None and min(values, default=0) > 0
    if positive and max(values) / min(values) > RATIO:
        return Axes(x, f"{y}, logarithmic", _around_log(values), log=True)
    return Axes(x, y, limits or around(values))


def grid(drawn: Sequence[str], broad: bool = False) -> str:
    """Return figures side by side, in as many rows as needed, each with about as many figures."""
    if not drawn:
        return ""
    columns = level(len(drawn), COLUMNS)
    kind = "panels broad" if broad else "panels"
    return f'<div class="{kind}" style="--columns:{columns}">{"".join(drawn)}</div>'


def panel(title: str, lines: Sequence[Line], axes: Axes, broad: bool = False) -> str:
    """Return an SVG with axes, lines, and a tooltip for every point that is finite."""
    kept = [
        replace(
            line,
            points=[(x, y) for x, y in line.points if math.isfinite(y) and (y > 0 or not axes.log)],
        )
        for line in lines
    ]
    points = list(chain.from_iterable(line.points for line in kept))
    height = BROAD if broad else HEIGHT
    horizontal = _Scale(0, max((px for px, _ in points), default=0) or 1, 0, 100)
    values = [py for _, py in points]
    limits = axes.limits or (_around_log(values) if axes.log else around(values))
    vertical = _Scale(*limits, height - BOTTOM, TOP, axes.log)
    paths = marks = ""
    for line in kept:
        places = [(horizontal(px), vertical(py)) for px, py in line.points]
        turns = (f"{px * UNITS / 100:.4g} {py:.1f}" for px, py in places)
        paths += line.style.path("M" + "L".join(turns)) if places else ""
        marks += _marks(line, places, axes.x)
    return (
        f'<svg class="plot" height="{height}" role="img" '
        f'aria-label="{escape(f"{title}: {axes.y} against {axes.x}")}">'
        f"{_axes(horizontal, vertical, axes, height)}"
        f'<svg viewBox="0 0 {UNITS} {height}" preserveAspectRatio="none">{paths}</svg>{marks}</svg>'
    )


def finite_heights(charts: Iterable[Sequence[Line]]) -> Iterator[float]:
    """Yield the finite y values of all points."""
    for line in chain.from_iterable(charts):
        yield from (y for _, y in line.points if math.isfinite(y))


@dataclass(frozen=True)
class _Scale:
    """A linear map of values, or of their logarithms, to percent of a chart's width, or pixels of
    its height.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = map(math.log10, (low, high, at))
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def at(self, value: float) -> str:
        """Return a value's horizontal place, in percent."""
        return f"{self(value):.2f}%"

    def ticks(self, most: int = 5, least: float = 0.0) -> list[float]:
        """Return values of the scale, 1, 2 or 5 times powers of ten, at least `least` apart; of
        logarithms few such values, or else whole decades.
        """
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            decades = range(math.floor(low) - 1, math.ceil(high) + 1)
            fine = [m * 10.0**e for e in decades for m in (1, 2, 5)]
            fine = [v for v in fine if self.low <= v <= self.high]
            whole = [10.0**e for e in _Scale(low, high, 0, 1).ticks(least=1)]
            return fine if len(fine) <= MOST else whole
        rough = max((self.high - self.low) / most, least)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def around(values: Sequence[float]) -> Point:
    """Return the range of some values with room around it."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _around_log(values: Sequence[float]) -> Point:
    """Return the range of some values with room around it, where only ratios count."""
    low, high = min(values, default=0.1), max(values, default=1.0)
    room = (high / low) ** 0.06 if high > low else 2.0
    return low / room, high * room


def _axes(horizontal: _Scale, vertical: _Scale, axes: Axes, height: int) -> str:
    bottom = height - BOTTOM
    rows = "".join(
        f'<line class="rule" x2="100%" y1="{vertical(v):.1f}" y2="{vertical(v):.1f}"/>'
        f'<text class="tick" x="-6" y="{vertical(v) + 4:.1f}" '
        f'text-anchor="end">{_tick(v)}</text>'
        for v in vertical.ticks()
    )
    columns = "".join(
        f'<line class="axis" x1="{at}" x2="{at}" y1="{bottom}" '
        f'y2="{bottom + 4}"/>'
        f'<text class="tick" x="{at}" y="{bottom + 17}" '
        f'text-anchor="middle">{v:.6g}</text>'
        for v, at in ((v, horizontal.at(v)) for v in horizontal.ticks(least=1))
    )
    return (
        f'{rows}{columns}<line class="axis" x2="100%" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="label" x="50%" y="{height - 5}" text-anchor="middle">{escape(axes.x)}</text>'
        f'<text class="label" transform="translate({11 - LEFT} {(TOP + bottom) / 2}) '
        f'rotate(-90)" text-anchor="middle">'
        f"{escape(axes.y)}</text>"
    )


def _tick(value: float) -> str:
    """Return a tick's number in at most six characters, which fit beside an axis."""
    units = ((1e9, 1.0, ""), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    unit, sign = next(
        ((unit, sign) for least, unit, sign in units if abs(value) >= least), (1.0, "")
    )
    text = f"{value / unit:.6g}{sign}"
    factor, e, power = text.partition("e")
    return "10" + str(int(power)).translate(RAISED) if e and factor == "1" else text


def _marks(line: Line, places: Sequence[Point], x: str) -> str:
    """Return a marker and a tooltip at every point."""
    marked = line.style.marked or len(places) == 1  # nothing else would show a single point
    return "".join(
        f"<g>{_marker(line.style, f'{across:.2f}%', up) if marked else ''}"
        f'<circle class="target" cx="{across:.2f}%" cy="{up:.1f}" r="7"/>'
        f"<title>{escape(f'{line.name}: {_value_text(py)} at {px:g} {x}'.rstrip())}</title></g>"
        for (px, py), (across, up) in zip(line.points, places, strict=True)
    )


def _value_text(value: float) -> str:
    """Return a number with two digits behind the point; a small one with two significant digits."""
    return figure(value) if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"


def _marker(style: Style, x: str, y: float) -> str:
    """Return a marker at `x`, in pixels or percent, and `y` pixels from above."""
    shape = MARKERS[style.number % len(MARKERS)]
    fill = f'fill="{style.colour}"' + (
        "" if style.strength == 1 else f' fill-opacity="{style.strength:.2f}"'
    )
    return f'<svg x="{x}" y="{y:.1f}"><path d="{shape}" {fill}/></svg>'
