"""Parts of reports: tables, legends, colours. Text is escaped, or marked as HTML by its type."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as html_escape
from importlib.resources import files
from typing import Any, TypeVar

from coterie.core.metrics import best
from coterie.core.printing import printable
from coterie.core.result import Machine, MetricInfo, Row, Versions

# Okabe and Ito's colours, which colour-blind people tell apart, and two more; they hold on a light
# and on a dark ground.
BLUE, VERMILION, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
ORANGE, SKY = "#e69f00", "#56b4e9"
GREY, BROWN = "#7d8590", "#9c6b3f"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, GREY, BROWN)
T = TypeVar("T")
FEW = 8  # clients that a table has a column for
MANY = 100  # clients beyond which there is no line or dot for each
TILES = 6  # side by side, at most


@dataclass(frozen=True)
class Cell:
    """One cell of a table, its text not yet escaped."""

    text: str
    share: float | None = None  # the length of the bar behind it, in [0, 1]; None: no bar
    best: bool = False  # of its column; a bar has no such mark


def escape(text: str) -> str:
    """Return untrusted text escaped for a page, without invisible and reversing characters."""
    return html_escape(printable(text, lines=True))


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    best: int | None = None,
    typeset: Callable[[str], str] | None = None,
) -> str:
    """Return a table whose first column names the rows; if it is too wide, it scrolls within
    itself. Row `best` is set off; `typeset` converts texts to HTML.
    """
    shown = typeset or escape
    head = "".join(f'<th scope="col">{shown(name)}</th>' for name in header)
    lines = ""
    for k, row in enumerate(rows):
        first, *cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
        lines += f'<tr{" class=best" * (k == best)}><th scope="row">{shown(first.text)}</th>'
        for cell in cells:
            look = " class=best" * cell.best
            if cell.share is not None:
                look = f' class="bar" style="--share:{100 * cell.share:.1f}%"'
            lines += f"<td{look}>{shown(cell.text)}</td>"
        lines += "</tr>"
    shown_rows = f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="wide"><table>{shown_rows}</table></div>'


def by_columns(columns: Mapping[str, Sequence[Cell | str]], best: int | None = None) -> str:
    """Return a table of columns by their names, see `table`."""
    return table(list(columns), list(zip(*columns.values(), strict=True)), best)


def bars(values: Sequence[float | None], form: str, unit: float = 1) -> list[Cell]:
    """Return a column of figures with bars behind them, the longest for the largest; unknown ones
    are a dash. Figures are divided by `unit` and formatted by `form`.
    """
    largest = max((value for value in values if value is not None), default=0) or 1
    return [
        Cell("-") if value is None else Cell(rounded(value / unit, form), value / largest)
        for value in values
    ]


def ranked(
    values: Sequence[float | None], metric: MetricInfo, digits: int = 2, texts: Sequence[str] = ()
) -> list[Cell]:
    """Return a column of figures in which the best is set off, in every row that has it; unknown
    ones are a dash. `texts` are those of the figures, by default as `figure` writes them.
    """
    known = [value for value in values if value is not None]
    top = best(known, metric) if known else None
    shown = texts or ["-" if value is None else figure(value, digits) for value in values]
    return [
        Cell(text, best=value is not None and value == top)
        for value, text in zip(values, shown, strict=True)
    ]


def rounded(value: float, form: str) -> str:
    """Return a formatted number, or two significant digits if the format would show 0."""
    return format(value, form if value == 0 or float(f"{value:{form.replace(',', '')}}") else ".2g")


def figure(value: float, digits: int = 2) -> str:
    """Return a number as people read it; a perplexity beyond float range is infinite."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:,.{digits}f}" if abs(value) < 1e9 else f"{value:.2e}"


def known(value: float | None) -> float:
    """Return a number; nan if it is unknown."""
    return math.nan if value is None else value


def plus_minus(mean: float, std: float | None) -> str:
    """Return a mean with its standard deviation, if there is one."""
    return figure(mean) + ("" if std is None else f" ± {figure(std)}")


def prose(text: str) -> str:
    """Return a sentence as HTML, with text between backticks as code."""
    return re.sub("`(.*?)`", r"<code>\1</code>", escape(text))


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, evenly spread, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)]


def size(count: float) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 1000:,.0f} kB" if count < 1e6 else f"{count / 1e6:,.2f} MB"


def unseen(group: str) -> str:
    """Return the title of a group of clients; "" where no client is unseen."""
    return f"{group} (unseen)" if group else "all clients"


def captioned(title: str, detail: str, drawn: str) -> str:
    """Return a picture with its title, and a detail beside the title."""
    small = f" <small>{escape(detail)}</small>" if detail else ""
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{drawn}</figure>"


def folded(summary: str, content: str, narrow: bool = False) -> str:
    """Return folded content, with `narrow` only in a narrow window; "" without content."""
    opened = " open class=narrow" if narrow else ""
    shown = f"<details{opened}><summary>{escape(summary)}</summary>{content}</details>"
    return shown if content else ""


def tiles(items: Sequence[tuple[str, str]]) -> str:
    """Return tiles of figures, each with its name, in rows of about equal length."""
    shown = "".join(f"<li><b>{escape(value)}</b> {escape(name)}</li>" for value, name in items)
    return f'<ul class="tiles" style="--columns:{level(len(items), TILES)}">{shown}</ul>'


def level(count: int, most: int) -> int:
    """Return how many of `count` things to put in a row, at most `most`, for about equal rows."""
    return -(-count // -(-count // most))


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend of pairs: a sample's HTML, and a name that is not yet escaped."""
    shown = "".join(f"<li>{sample} {escape(name)}</li>" for sample, name in items)
    return f'<ul class="legend">{shown}</ul>'


def notes(sentences: Iterable[str]) -> str:
    """Return a list of sentences, with text between backticks as code; "" without any."""
    items = "".join(f"<li>{prose(sentence)}</li>" for sentence in sentences)
    return f'<ul class="notes">{items}</ul>' if items else ""


VERDICTS: Mapping[bool | None, str] = {True: "holds", False: "does not hold", None: "undecided"}
_CLASSES: Mapping[bool | None, str] = {True: "holds", False: "fails", None: "open"}


def verdicts(
    items: Iterable[tuple[bool | None, str, str]], typeset: Callable[[str], str] | None = None
) -> str:
    """Return a list of checked sentences: whether each holds (None: open), it, and its numbers."""
    shown = typeset or escape
    lines = (
        f'<li class="{_CLASSES[holds]}"><b>{VERDICTS[holds]}</b>'
        f"<span>{shown(says)}<small>{shown(detail)}</small></span></li>"
        for holds, says, detail in items
    )
    return f'<ul class="verdicts">{"".join(lines)}</ul>'


def section(id: str, title: str, *parts: str) -> str:
    """Return a section that the navigation can lead to; "" without content."""
    shown = "".join(parts)
    return f'<section id="{id}"><h2>{escape(title)}</h2>{shown}</section>' if shown else ""


def page(title: str, header: str, main: str, nav: str = "") -> bytes:
    """Return the whole file, nothing from elsewhere; `header`, `main` and `nav` are HTML."""
    style, script = (
        files("coterie.reports").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{style}</style></head><body>'
        f"<header><h1>{escape(title)}</h1>{header}</header>{nav}<main>{main}</main>"
        f"<script>{script}</script></body></html>"
    )
    return text.encode()


def computed_with(machine: Machine | None, versions: Versions | None) -> str:
    """Return what a result was computed with, each after a comma."""
    parts = []
    if machine is not None:
        threads = f"{machine.threads} thread" + "s" * (machine.threads > 1)
        parts += [machine.device, machine.dtype, threads]
    parts += [f"coterie {versions.coterie}", f"torch {versions.torch}"] if versions else []
    return "".join(f", {part}" for part in parts)


def introduction(description: str, about: str) -> str:
    """Return the description of a page and, in small print, what it was computed with."""
    return f"<p>{escape(description)}</p><p class=about>{escape(about)}</p>"


@dataclass(frozen=True)
class Beside:
    """A figure that a table shows beside the metric."""

    name: str  # the heading of its column
    path: str  # of the figure in a row: a field, or one within `words` or `answers`
    digits: int  # behind the point
    lower_is_better: bool
    sentence: str  # a description as the rest of a sentence that begins with the name
    about: str  # the same in a few words

    def of(self, row: Row) -> float | None:
        """Return the figure of a row; None if it is unknown."""
        value: Any = row
        for part in self.path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        return None if value is None else float(value)

    def known(self, rows: Sequence[Row]) -> bool:
        """Return whether any row has the figure."""
        return any(self.of(row) is not None for row in rows)


_BETWEEN = "standard deviation of the {metric} over clients"
_GAIN = "the share of clients that do better than their own Local run of the same seed"
_WRONG = "the share of collaboration weights on the wrong side of a threshold in the end"
_SAVED = (
    "the share of keystrokes that need not be made if every word is taken as soon as it is among "
    "the three suggestions"
)
_SHARES = (  # in percent: the digits, the name, the path, and the sentence
    (0, "right facts", "answers.facts", "the share of a model's own answers with the right fact"),
    (0, "right manner", "answers.manner", "the share in the client's manner"),
    (0, "both right", "answers.all", "the share that is right in every respect"),
    (1, "first word", "words.first", "the share of words that a keyboard's first suggestion is"),
    (1, "first three", "words.first_three", "the share that is among its three suggestions"),
    (1, "keystrokes saved", "words.keystrokes_saved", _SAVED),
)
_SPREAD = "the standard deviation of the score over clients"
BESIDE = (
    Beside("loss", "loss", 3, True, "is the mean test loss in nats", "mean test loss in nats"),
    Beside("± between clients", "between_clients", 2, True, _SPREAD, f"±: {_BETWEEN}"),
    Beside("Imp.%", "improved", 0, False, _GAIN, "Imp.%: clients that do better than alone"),
    *(Beside(name, at, n, False, says, f"{name}, %") for n, name, at, says in _SHARES),
    Beside("W error", "weights_error", 2, True, _WRONG, "W error: wrong collaboration weights"),
)
