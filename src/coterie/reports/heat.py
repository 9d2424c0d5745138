"""Heat maps as inline SVG, with a slider where they change over rounds."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len, set_cell_size

from coterie.reports.chart import LETTER
from coterie.reports.parts import escape

LEVELS = 10  # steps of a heat map's colours above 0
STAGES = 100  # stages of a slider, at most
FIELDS = 200_000  # fields of all stages of a heat map, at most: two characters each
# sides of a field: the largest, and the smallest at which its row has a name
FIELD, LEGIBLE = 22.0, 12.0
Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Heat:
    """A matrix as fields of colour, at one moment or more."""

    rows: Sequence[str]
    columns: Sequence[str]
    # moments, and values (rows, columns) from 0 to `top`; the last is drawn, a slider shows all
    stages: Sequence[tuple[int, Matrix]]
    top: float
    label: str  # a description for those who do not see the map
    tooltip: str  # of a field, with {row}, {column} and {value}
    digits: int = 2  # behind the point
    masked: bool = False  # whether the diagonal is left out
    frames: str = ""  # a path around fields that are set off, in units of fields


def room(fields: int) -> int:
    """Return how many stages of so many fields fit on a page."""
    return max(5, min(STAGES, FIELDS // fields))


def heat_map(
    heat: Heat, width: float = 12 * FIELD, height: float = 12 * FIELD, field: float = FIELD
) -> str:
    """Return an SVG with a path for each level of the scale, so that colours follow the page's
    scheme. `width` and `height` limit all fields together, `field` the side of one. Rows and
    columns have names if there is room.
    """
    columns, rows = len(heat.columns), len(heat.rows)
    wide, high = min(field, width / columns), min(field, height / rows)
    left, above = (
        _margin(names) if side >= LEGIBLE else 4.0
        for names, side in ((heat.rows, high), (heat.columns, wide))
    )
    names = _beside(heat.rows, high, left, above) + _above(heat.columns, wide, left, above)
    levels = [
        [round(LEVELS * min(value / heat.top, 1)) for value in row] for row in heat.stages[-1][1]
    ]
    paths = "".join(
        f'<path class="w{k}" d="{_fields(levels, k, heat.masked)}"/>' for k in range(LEVELS + 1)
    )
    attributes = {
        "rows": json.dumps(list(heat.rows)),
        "columns": json.dumps(list(heat.columns)),
        "top": f"{heat.top:g}",
        "told": heat.tooltip,
        "digits": heat.digits,
        "stages": json.dumps(
            [(at, _packed(matrix, heat.top)) for at, matrix in heat.stages], separators=(",", ":")
        ),
    }
    pairs = (f' data-{name}="{escape(str(value))}"' for name, value in attributes.items())
    data = "".join(pairs) + " data-masked" * heat.masked
    right, below = left + columns * wide + 4, above + rows * high + 4
    moving = " moving" * (len(heat.stages) > 1)
    diagonal = f'<path class="own" d="M0 0L{columns} {rows}"/>' * heat.masked
    return (
        f'<svg class="heat{moving}" width="{right:.0f}" height="{below:.0f}" role="img" '
        f'aria-label="{escape(heat.label)}"{data}>{names}<g transform="translate({left:.1f} '
        f'{above:.1f}) scale({wide:.4f} {high:.4f})">'
        f'{paths}{diagonal}<path class="block" d="{heat.frames}"/><rect class="fields" '
        f'width="{columns}" height="{rows}"/>'
        '<rect class="cursor" width="1" height="1" visibility="hidden"/></g></svg>'
    )


def _short(name: str) -> str:
    return name if cell_len(name) <= 12 else f"{set_cell_size(name, 11).rstrip()}…"


def _margin(names: Sequence[str]) -> float:
    return 8 + LETTER * max(cell_len(_short(name)) for name in names)


def _beside(names: Sequence[str], side: float, left: float, above: float) -> str:
    """Return the names of rows, if a field's side has room for them."""
    return "".join(
        f'<text class="tick" x="{left - 5:.1f}" y="{above + (i + 0.5) * side + 4:.1f}" '
        f'text-anchor="end">{escape(_short(name))}</text>'
        for i, name in enumerate(names if side >= LEGIBLE else ())
    )


def _above(names: Sequence[str], side: float, left: float, above: float) -> str:
    """Return the names of columns, turned unless all are as short as a number."""
    shift, turn, anchor = (
        (0.0, "", "middle") if max(map(len, names)) <= 2 else (4.0, " rotate(-90)", "start")
    )
    return "".join(
        f'<text class="tick" transform="translate({left + (j + 0.5) * side + shift:.1f} '
        f'{above - 5:.1f}){turn}" text-anchor="{anchor}">'
        f"{escape(_short(name))}</text>"
        for j, name in enumerate(names if side >= LEGIBLE else ())
    )


def _fields(levels: Sequence[Sequence[int]], level: int, masked: bool) -> str:
    """Return a path over all fields of a level, one piece for neighbours in a row."""
    pieces = ""
    for i, row in enumerate(levels):
        inside = (value == level and not (masked and i == j) for j, value in enumerate(row))
        pieces += "".join(f"M{j} {i}h{k}v1h-{k}z" for j, k in runs(inside))
    return pieces


def runs(flags: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each run of true flags."""
    at = 0
    for flag, run in groupby(flags):
        count = len(list(run))
        if flag:
            yield at, count
        at += count


def _packed(matrix: Matrix, top: float) -> str:
    """Return two hexadecimal digits for each value, row by row; ff is the end of the scale."""
    return bytes(round(255 * min(value / top, 1)) for row in matrix for value in row).hex()


def scale(least: str, most: str) -> str:
    """Return the legend of a heat map's colours, with a text at each end."""
    steps = "".join(f'<i class="w{k}"></i>' for k in range(LEVELS + 1))
    shades = f'<span class="steps" aria-hidden="true">{steps}</span>'
    return f'<div class="scale"><span>{escape(least)}</span>{shades}<span>{most}</span></div>'


def slider(moments: Sequence[int], unit: str) -> str:
    """Return a slider for the heat maps of the `staged` element around it, shown by the script."""
    last = len(moments) - 1
    values = json.dumps(list(moments), separators=(",", ":"))
    return (
        f'<label class="stages" hidden>{escape(unit)} <input type="range" class="stage" min="0" '
        f'max="{last}" value="{last}" data-moments="{values}" data-unit="{escape(unit)}">'
        f"<output>{moments[-1]:,}</output></label>"
    )
