"""Line charts, strips, bars, dots and heat maps as inline SVG, which follows the page's colours and needs no library.

Letters are as large in every chart and in every window: charts that stretch do so in percent of their width, the others have a width of
their own and scroll.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from coterie.reports.parts import BLUE, escape, figure, folded, level

HEIGHT, BROAD = 224, 300  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 40
LETTER = 7.2  # pixels that a letter of an axis is wide
COLUMNS = 4  # panels side by side, at most
ALL, FIRST = 6, 4  # up to so many panels are all open; of more, so many
UNITS = 1000  # of a panel's width, in the paths of its lines
RATIO = 20.0  # between the ends of a range of ratios: beyond, its scale is logarithmic
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # the second cue beside the colour
MARKED = 40  # points up to which a line has markers
MARKERS = ("circle", "square", "triangle", "diamond")
LEVELS = 10  # steps of a heat map's colours above 0
STAGES = 100  # of a slider, at most
FIELDS = 200_000  # of all stages of a heat map, at most: two characters each
FIELD, LEGIBLE = 22.0, 12.0  # sides of a heat map's field: at most, and at least for its row to have a name

Point = tuple[float, float]
Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Style:
    """How a line looks.

    Args:
        colour: Of line and markers.
        number: Picks the dashes and the markers.
        strength: In (0, 1], its opacity.
        marked: Whether its points have markers; they have tooltips anyway.
    """

    colour: str
    number: int = 0
    strength: float = 1.0
    marked: bool = True

    @property
    def sample(self) -> str:
        """A piece of it, for a legend."""
        marker = _marker(self, "14", 6) if self.marked else ""
        return f'<svg class="sample" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">{self.path("M0 6H28")}{marker}</svg>'

    def path(self, d: str) -> str:
        dash = DASHES[self.number % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<path class="line" d="{d}" stroke="{self.colour}" stroke-opacity="{self.strength:.2f}"{dashed}/>'


@dataclass(frozen=True)
class Line:
    """One line of a panel: points (x, y) in the axes' units, and a name for its tooltips."""

    points: Sequence[Point]
    name: str
    style: Style


@dataclass(frozen=True)
class Axes:
    """What the axes of a panel are.

    Args:
        x: What the horizontal axis counts; it starts at 0.
        y: What the vertical axis is, with its unit.
        limits: Of the vertical axis; default: what the panel's points need.
        log: Whether the vertical axis is logarithmic; points that are not positive are left out.
    """

    x: str
    y: str
    limits: Point | None = None
    log: bool = False

    def height(self, value: float) -> float:
        """Where a value is, on a scale that is not logarithmic."""
        return math.log10(value) if self.log else value


def panels(
    charts: Mapping[str, Sequence[Line]],
    x: str,
    y: str,
    limits: Point | None = None,
    broad: bool = False,
    ratios: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> str:
    """A panel for each title. Of more than a few, those beyond the first ones are folded away, and in a narrow window all.

    Args:
        charts: Lines by title.
        x: What the horizontal axis counts; it starts at 0.
        y: What the vertical axis is, with its unit.
        limits: Of the vertical axes; default: one range for all panels of a kind, which their points need.
        broad: Whether panels are to be large.
        ratios: Whether values are positive and only their ratios count: a large range has a logarithmic scale then.
        kinds: The kind of each title, as only panels of one kind are compared; default: all are of one.
    """
    kind = kinds or dict.fromkeys(charts, "")
    axes = {k: _shared(x, y, [charts[t] for t in charts if kind[t] == k], limits, ratios) for k in dict.fromkeys(kind.values())}
    drawn = [f"<figure><figcaption>{escape(t)}</figcaption>{panel(t, lines, axes[kind[t]], broad)}</figure>" for t, lines in charts.items()]
    if len(drawn) <= ALL:
        return grid(drawn, broad)
    first, others = (grid(part, broad) for part in (drawn[:FIRST], drawn[FIRST:]))
    return folded(f"The first {FIRST}", first, narrow=True) + folded(f"{len(drawn) - FIRST} more", others)


def _shared(x: str, y: str, charts: Iterable[Sequence[Line]], limits: Point | None, ratios: bool) -> Axes:
    """The axes of panels that are compared."""
    values = [py for lines in charts for line in lines for _, py in line.points if math.isfinite(py)]
    log = ratios and limits is None and min(values, default=0) > 0 and max(values) / min(values) > RATIO
    return Axes(x, f"{y}, logarithmic" if log else y, limits or (_around_log if log else _around)(values), log)


def grid(drawn: Sequence[str], broad: bool = False) -> str:
    """Figures side by side, in rows that are full: as many rows as needed, each with about as many figures."""
    if not drawn:
        return ""
    columns = level(len(drawn), COLUMNS)
    return f'<div class="panels{" broad" if broad else ""}" style="--columns:{columns}">{"".join(drawn)}</div>'


def panel(title: str, lines: Sequence[Line], axes: Axes, broad: bool = False) -> str:
    """One SVG with axes, lines, and a tooltip for every point. Points that are not finite are left out."""
    kept = [Line([p for p in line.points if math.isfinite(p[1]) and (p[1] > 0 or not axes.log)], line.name, line.style) for line in lines]
    points = [p for line in kept for p in line.points]
    values, height = [py for _, py in points], BROAD if broad else HEIGHT
    horizontal = _Scale(0, max((px for px, _ in points), default=0) or 1, 0, 100)
    low, high = axes.limits or (_around_log(values) if axes.log else _around(values))
    vertical = _Scale(axes.height(low), axes.height(high), height - BOTTOM, TOP)
    places = [[(horizontal(px), vertical(axes.height(py))) for px, py in line.points] for line in kept]
    paths = "".join(_path(line, found, height) for line, found in zip(kept, places, strict=True) if found)
    marks = "".join(_marks(line, found, axes.x) for line, found in zip(kept, places, strict=True))
    return (
        f'<svg class="plot" height="{height}" role="img" aria-label="{escape(f"{title}: {axes.y} against {axes.x}")}">'
        f"{_axes(horizontal, vertical, axes, height)}"
        f'<svg viewBox="0 0 {UNITS} {height}" preserveAspectRatio="none">{paths}</svg>{marks}</svg>'
    )


def around(charts: Iterable[Sequence[Line]]) -> Point:
    """The range that the points of several panels need, so that these can be compared."""
    return _around([py for lines in charts for line in lines for _, py in line.points if math.isfinite(py)])


@dataclass(frozen=True)
class _Scale:
    """From values low..high to places start..stop: percent of a chart's width, or pixels of its height."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def at(self, value: float) -> str:
        """A value's place across, in percent."""
        return f"{self(value):.2f}%"

    def ticks(self, most: int = 5, least: float = 0.0) -> list[float]:
        """Round values within the scale: multiples of 1, 2 or 5 times a power of ten, at least `least` apart."""
        rough = max((self.high - self.low) / most, least)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _around(values: Sequence[float]) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _around_log(values: Sequence[float]) -> Point:
    """The same where only ratios count."""
    low, high = min(values, default=0.1), max(values, default=1.0)
    room = (high / low) ** 0.06 if high > low else 2.0
    return low / room, high * room


def _axes(horizontal: _Scale, vertical: _Scale, axes: Axes, height: int) -> str:
    bottom = height - BOTTOM
    rows = "".join(
        f'<line class="rule" x2="100%" y1="{vertical(v):.1f}" y2="{vertical(v):.1f}"/>'
        f'<text class="tick" x="-6" y="{vertical(v) + 4:.1f}" text-anchor="end">{_power(v) if axes.log else _tick(v)}</text>'
        for v in vertical.ticks(least=axes.log)  # of a logarithmic scale, whole decades
    )
    columns = "".join(
        f'<line class="axis" x1="{horizontal.at(v)}" x2="{horizontal.at(v)}" y1="{bottom}" y2="{bottom + 4}"/>'
        f'<text class="tick" x="{horizontal.at(v)}" y="{bottom + 17}" text-anchor="middle">{v:.6g}</text>'
        for v in horizontal.ticks(least=1)  # iterations and steps are counted
    )
    return (
        f'{rows}{columns}<line class="axis" x2="100%" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="label" x="50%" y="{height - 5}" text-anchor="middle">{escape(axes.x)}</text>'
        f'<text class="label" transform="translate({11 - LEFT} {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(axes.y)}</text>"
    )


def _tick(value: float) -> str:
    """A tick's number in at most five or six characters, which is the room beside an axis."""
    units = ((1e9, 1.0, ""), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    unit, sign = next(((unit, sign) for least, unit, sign in units if abs(value) >= least), (1.0, ""))
    return f"{value / unit:.6g}{sign}"


def _power(exponent: float) -> str:
    """The number that a whole power of ten is, or where that is long the power itself."""
    if -3 <= exponent <= 4:
        return f"{10**exponent:g}"
    return "10" + f"{exponent:.0f}".translate(RAISED)


def _path(line: Line, places: Sequence[Point], height: int) -> str:
    return line.style.path("M" + "L".join(f"{px * UNITS / 100:.4g} {py:.1f}" for px, py in places))


def _marks(line: Line, places: Sequence[Point], x: str) -> str:
    """A marker, and what tells the value, at every point."""
    return "".join(
        f"<g>{_marker(line.style, f'{across:.2f}%', up) if line.style.marked else ''}"
        f'<circle class="target" cx="{across:.2f}%" cy="{up:.1f}" r="7"/>'
        f"<title>{escape(f'{line.name}: {_told(py)} at {px:g} {x}'.rstrip())}</title></g>"
        for (px, py), (across, up) in zip(line.points, places, strict=True)
    )


def _told(value: float) -> str:
    """A number with two digits behind the point, or with two digits that are not 0 where it is small."""
    return figure(value) if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"


SHAPES = {
    "square": "M-2.8-2.8h5.6v5.6h-5.6z",
    "triangle": "M0-3.6l3.4 6h-6.8z",
    "diamond": "M0-4l4 4l-4 4l-4-4z",
}


def _marker(style: Style, x: str, y: float) -> str:
    """A marker at a place across, in pixels or percent, and one from above."""
    shape = MARKERS[style.number % len(MARKERS)]
    fill = f'fill="{style.colour}"' + ("" if style.strength == 1 else f' fill-opacity="{style.strength:.2f}"')
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y:.1f}" r="3" {fill}/>'
    return f'<svg x="{x}" y="{y:.1f}"><path d="{SHAPES[shape]}" {fill}/></svg>'


def _beside_names(rows: Iterable[str], svg: str, height: int, unit: str) -> str:
    """A chart with the names of its rows on its left, where it leaves room for them."""
    left = 24 + LETTER * max(map(cell_len, rows))
    return (
        f'<svg class="rows" height="{height}" style="--left:{left:.0f}px" role="img" aria-label="{escape(unit)}">{svg}'
        f'<text class="label" x="50%" y="{height - 4}" text-anchor="middle">{escape(unit)}</text></svg>'
    )


def _columns(scale: _Scale, bottom: float, most: int = 5) -> str:
    """Vertical rules with their numbers."""
    return "".join(
        f'<line class="rule" x1="{scale.at(v)}" x2="{scale.at(v)}" y1="6" y2="{bottom}"/>'
        f'<text class="tick" x="{scale.at(v)}" y="{bottom + 15}" text-anchor="middle">{v:.6g}</text>'
        for v in scale.ticks(most)
    )


Strip = Mapping[str, tuple[Mapping[str, float], float, float]]  # by title: the clients' values, their mean, and its deviation over seeds


def reach(strips: Iterable[Strip]) -> Point:
    """The range that all values of some strips need, so that these can be compared."""
    rows = [row for strip in strips for row in strip.values()]
    return _around([v for clients, mean, std in rows for v in (*clients.values(), mean - std, mean + std) if math.isfinite(v)])


def strip(rows: Strip, unit: str, limits: Point) -> str:
    """One line for each row: a dot for every client, and the mean with its deviation.

    Args:
        rows: What to draw.
        unit: What the axis is.
        limits: Of the axis.
    """
    step = 30
    height = step * len(rows) + 44
    scale = _Scale(*limits, 0, 100)
    lines = "".join(_strip_row(title, *row, scale, 6 + step * (k + 0.5)) for k, (title, row) in enumerate(rows.items()))
    return _beside_names(rows, _columns(scale, height - 38) + lines, height, unit)


def _strip_row(title: str, clients: Mapping[str, float], mean: float, std: float, scale: _Scale, y: float) -> str:
    dots = "".join(
        f'<circle class="dot" cx="{scale.at(value)}" cy="{y}" r="5" fill="{BLUE}">'
        f"<title>{escape(f'{title}, {i}: {figure(value)}')}</title></circle>"
        for i, value in clients.items()
        if math.isfinite(value)
    )
    name = f'<text class="tick" x="-12" y="{y + 4}" text-anchor="end">{escape(title)}</text>'
    if not math.isfinite(mean):
        return name + dots
    told = f"{title}, mean: {figure(mean)} ± {figure(std)}"
    stroke = f'<line class="whisker" x1="{scale.at(mean)}" x2="{scale.at(mean)}" y1="{y - 10}" y2="{y + 10}"/>'
    return f"{name}{dots}<g>{stroke}{_whisker(scale, mean - std, mean + std, y)}<title>{escape(told)}</title></g>"


def _whisker(scale: _Scale, low: float, high: float, y: float) -> str:
    """A stroke from one value to another, and what a pointer finds of it."""
    across = f'x1="{scale.at(low)}" x2="{scale.at(high)}" y1="{y}" y2="{y}"'
    return f'<line class="whisker" {across}/><line class="grip" {across}/>'


@dataclass(frozen=True)
class Interval:
    """A number with an interval: where it is, where that begins and ends, a name for its tooltip, and a colour."""

    value: float
    low: float
    high: float
    name: str
    colour: str


def intervals(rows: Mapping[str, Interval], unit: str, limits: Point, chance: float | None = None) -> str:
    """One line for each row: a dot, and a whisker as long as its interval.

    Args:
        rows: By title.
        unit: What the axis is.
        limits: Of the axis.
        chance: A value that is marked: what would come of guessing.
    """
    step = 26
    height = step * len(rows) + 44
    scale = _Scale(*limits, 0, 100)
    guess = ""
    if chance is not None:
        guess = f'<line class="axis" stroke-dasharray="4 3" x1="{scale.at(chance)}" x2="{scale.at(chance)}" y1="2" y2="{height - 38}"/>'
    drawn = "".join(_interval(title, row, scale, 6 + step * (k + 0.5)) for k, (title, row) in enumerate(rows.items()))
    return _beside_names(rows, _columns(scale, height - 38, 4) + guess + drawn, height, unit)


def _interval(title: str, row: Interval, scale: _Scale, y: float) -> str:
    low, high = (min(max(v, scale.low), scale.high) for v in (row.low, row.high))
    return (
        f'<text class="tick" x="-12" y="{y + 4:.1f}" text-anchor="end">{escape(title)}</text>'
        f'<g>{_whisker(scale, low, high, y)}<circle cx="{scale.at(row.value)}" cy="{y}" r="4.5" fill="{row.colour}"/>'
        f"<title>{escape(row.name)}</title></g>"
    )


@dataclass(frozen=True)
class Bar:
    """One bar: its height, its deviation, a name for its tooltip, and a colour."""

    value: float
    std: float
    name: str
    colour: str


def bars(groups: Mapping[str, Sequence[Bar]], y: str) -> str:
    """Groups of bars on one axis, which starts at 0 so that their lengths can be compared.

    Args:
        groups: Bars by the name below them. A value that is not finite is left out.
        y: What the axis is, with its unit.
    """
    shown = {name: [bar for bar in group if math.isfinite(bar.value)] for name, group in groups.items()}
    gap, thick = 22.0, 20.0
    widths = {name: max(thick * len(group), LETTER * cell_len(name)) for name, group in shown.items()}
    width, height = LEFT + sum(widths.values()) + gap * len(widths) + RIGHT, 260
    top = max((bar.value + bar.std for group in shown.values() for bar in group), default=1.0) or 1.0
    vertical = _Scale(0, 1.04 * top, height - BOTTOM, TOP)
    rules = "".join(
        f'<path class="rule" d="M{LEFT} {vertical(v):.1f}H{width - RIGHT:.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{vertical(v) + 4:.1f}" text-anchor="end">{_tick(v)}</text>'
        for v in vertical.ticks()
    )
    drawn, left = [], LEFT + gap / 2
    for name, group in shown.items():
        start = left + (widths[name] - thick * len(group)) / 2
        drawn += [_bar(bar, f"{name}, {bar.name}", start + thick * k, thick, vertical) for k, bar in enumerate(group)]
        middle = left + widths[name] / 2
        drawn.append(f'<text class="tick" x="{middle:.1f}" y="{height - BOTTOM + 17}" text-anchor="middle">{escape(name)}</text>')
        left += widths[name] + gap
    label = (
        f'<text class="label" transform="translate(11 {(TOP + height - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )
    opening = f'<svg width="{width:.0f}" height="{height}" role="img" aria-label="{escape(y)}">'
    return f'<figure class="fixed">{opening}{rules}{"".join(drawn)}{label}</svg></figure>'


def _bar(bar: Bar, title: str, left: float, thick: float, vertical: _Scale) -> str:
    top, middle = vertical(bar.value), left + thick / 2
    whisker = f'<path class="whisker" d="M{middle:.1f} {vertical(bar.value - bar.std):.1f}V{vertical(bar.value + bar.std):.1f}"/>'
    return (
        f'<g><rect x="{left + 1:.1f}" y="{top:.1f}" width="{thick - 2:.1f}" height="{vertical(0) - top:.1f}" fill="{bar.colour}"/>'
        f"{whisker if bar.std else ''}<title>{escape(f'{title}: {figure(bar.value)}')}</title></g>"
    )


@dataclass(frozen=True)
class Dot:
    """One dot of a plane: where it is, what stands beside it, a name for its tooltip, and how it looks."""

    x: float
    y: float
    text: str
    name: str
    style: Style


def plane(dots: Sequence[Dot], x: str, y: str) -> str:
    """Dots in a plane of equal units, whose numbers mean nothing by themselves.

    Args:
        dots: At least one. Texts that would lie upon others are left out.
        x: What the horizontal axis is.
        y: What the vertical axis is.
    """
    width, height, left, bottom, edge = 560, 400, 26, 26, 16
    places = [(d.x, d.y) for d in dots]
    (left_most, right_most), (lowest, highest) = ((min(values), max(values)) for values in zip(*places, strict=True))
    unit = max((right_most - left_most) / (width - left - 2 * edge), (highest - lowest) / (height - bottom - 2 * edge)) or 1.0
    middle = (width + left) / 2, (height - bottom) / 2
    drawn: list[str] = []
    told: list[Point] = []  # where there are texts
    for dot in dots:
        across = middle[0] + (dot.x - (left_most + right_most) / 2) / unit
        up = middle[1] - (dot.y - (lowest + highest) / 2) / unit
        drawn.append(
            f'<g>{_marker(dot.style, f"{across:.1f}", up)}<circle class="target" cx="{across:.1f}" cy="{up:.1f}" r="7"/>'
            f"<title>{escape(dot.name)}</title></g>"
        )
        if all(abs(across - tx) > 7 * cell_len(dot.text) or abs(up - ty) > 11 for tx, ty in told):
            told.append((across, up))
            drawn.append(f'<text class="tick" x="{across:.1f}" y="{up - 6:.1f}" text-anchor="middle">{escape(dot.text)}</text>')
    return (
        f'<figure class="fixed"><svg width="{width}" height="{height}" role="img" aria-label="{escape(f"{y} against {x}")}">'
        f'<path class="axis" d="M{left} 0V{height - bottom}H{width}"/>'
        f'<text class="label" x="{middle[0]}" y="{height - 8}" text-anchor="middle">{escape(x)}</text>'
        f'<text class="label" transform="translate(14 {middle[1]}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
        f"{''.join(drawn)}</svg></figure>"
    )


@dataclass(frozen=True)
class Heat:
    """A matrix as fields of colour, at one moment or more.

    Args:
        rows: Names, from above.
        columns: Names, from the left.
        stages: Moments, and (rows, columns) values from 0 to `top`; the last one is drawn, a slider goes through all.
        top: The end of the scale.
        label: What it is, for those who do not see it.
        told: What a tooltip says of a field, with {row}, {column} and {value}.
        digits: Of the value.
        masked: Whether the diagonal is left out.
        frames: A path around fields that are set off, in fields.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    stages: Sequence[tuple[int, Matrix]]
    top: float
    label: str
    told: str
    digits: int = 2
    masked: bool = False
    frames: str = ""


def room(fields: int) -> int:
    """How many stages of so many fields a page has room for."""
    return max(5, min(STAGES, FIELDS // fields))


def heat_map(heat: Heat, width: float = 12 * FIELD, height: float = 12 * FIELD, field: float = FIELD) -> str:
    """An SVG with a path for each level of the scale, so that colours follow the page's scheme.

    Args:
        heat: What to draw. Rows and columns have names where there is room for them.
        width: Of all fields, at most.
        height: Of all fields, at most.
        field: A field's sides, at most.
    """
    columns, rows = len(heat.columns), len(heat.rows)
    wide, high = min(field, width / columns), min(field, height / rows)
    left, above = (_margin(names) if side >= LEGIBLE else 4.0 for names, side in ((heat.rows, high), (heat.columns, wide)))
    names = _beside(heat.rows, high, left, above) + _above(heat.columns, wide, left, above)
    levels = [[round(LEVELS * min(value / heat.top, 1)) for value in row] for row in heat.stages[-1][1]]
    paths = "".join(f'<path class="w{k}" d="{_fields(levels, k, heat.masked)}"/>' for k in range(LEVELS + 1))
    told = {
        "rows": json.dumps(list(heat.rows)),
        "columns": json.dumps(list(heat.columns)),
        "top": f"{heat.top:g}",
        "told": heat.told,
        "digits": heat.digits,
        "stages": json.dumps([(at, _packed(matrix, heat.top)) for at, matrix in heat.stages], separators=(",", ":")),
    }
    data = "".join(f' data-{name}="{escape(str(value))}"' for name, value in told.items()) + " data-masked" * heat.masked
    right, below = left + columns * wide + 4, above + rows * high + 4
    moving, diagonal = " moving" * (len(heat.stages) > 1), f'<path class="own" d="M0 0L{columns} {rows}"/>' * heat.masked
    return (
        f'<svg class="heat{moving}" width="{right:.0f}" height="{below:.0f}" role="img" '
        f'aria-label="{escape(heat.label)}"{data}>{names}<g transform="translate({left:.1f} {above:.1f}) scale({wide:.4f} {high:.4f})">'
        f'{paths}{diagonal}<path class="block" d="{heat.frames}"/><rect class="fields" width="{columns}" height="{rows}"/>'
        '<rect class="cursor" width="1" height="1" visibility="hidden"/></g></svg>'
    )


def _short(name: str) -> str:
    return name if cell_len(name) <= 12 else f"{set_cell_size(name, 11).rstrip()}…"


def _margin(names: Sequence[str]) -> float:
    return 8 + LETTER * max(cell_len(_short(name)) for name in names)


def _beside(names: Sequence[str], side: float, left: float, above: float) -> str:
    """The names of rows, where a field's side has room for them."""
    return "".join(
        f'<text class="tick" x="{left - 5:.1f}" y="{above + (i + 0.5) * side + 4:.1f}" text-anchor="end">{escape(_short(name))}</text>'
        for i, name in enumerate(names if side >= LEGIBLE else ())
    )


def _above(names: Sequence[str], side: float, left: float, above: float) -> str:
    """The names of columns, likewise; they are turned unless all are as short as a number."""
    shift, turn, anchor = (0.0, "", "middle") if max(map(len, names)) <= 2 else (4.0, " rotate(-90)", "start")
    return "".join(
        f'<text class="tick" transform="translate({left + (j + 0.5) * side + shift:.1f} {above - 5:.1f}){turn}" text-anchor="{anchor}">'
        f"{escape(_short(name))}</text>"
        for j, name in enumerate(names if side >= LEGIBLE else ())
    )


def _fields(levels: Sequence[Sequence[int]], level: int, masked: bool) -> str:
    """A path over all fields of a level, one piece for neighbours in a row."""
    pieces = []
    for i, row in enumerate(levels):
        start = None
        for j in range(len(row) + 1):
            there = j < len(row) and row[j] == level and not (masked and i == j)
            if there and start is None:
                start = j
            elif not there and start is not None:
                pieces.append(f"M{start} {i}h{j - start}v1h{start - j}z")
                start = None
    return "".join(pieces)


def _packed(matrix: Matrix, top: float) -> str:
    """Two hexadecimal digits for each value, row by row; ff is the end of the scale."""
    return bytes(round(255 * min(value / top, 1)) for row in matrix for value in row).hex()


def scale(least: str, most: str) -> str:
    """The legend of a heat map's colours: what stands at its ends."""
    steps = "".join(f'<i class="w{k}"></i>' for k in range(LEVELS + 1))
    return f'<div class="scale"><span>{escape(least)}</span><span class="steps" aria-hidden="true">{steps}</span><span>{most}</span></div>'


def slider(moments: Sequence[int], unit: str) -> str:
    """It moves the heat maps of the `staged` element that it is in, and is hidden until the script is there."""
    return (
        f'<label class="stages" hidden>{escape(unit)} <input type="range" class="stage" min="0" max="{len(moments) - 1}" '
        f'value="{len(moments) - 1}" data-moments="{json.dumps(list(moments), separators=(",", ":"))}" data-unit="{escape(unit)}">'
        f"<output>{moments[-1]:,}</output></label>"
    )
