"""Tables in a terminal: scores, groups, costs, what was measured, and what a recipe would take."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coterie.core.metrics import best, prediction, worst
from coterie.core.printing import printable
from coterie.core.result import Evaluated, MetricInfo, Result, Row
from coterie.data.splits import SPLITS
from coterie.methods import METHODS
from coterie.reports.parts import BESIDE, VERDICTS, rounded, size, unseen
from coterie.reports.scores import mixtures

W_ERROR = "W error", "W\u00a0error"  # the second without a break between the words
ROWS = 16  # clients that a table has a line for
FEW = 8  # clients that a table has a column for, if it has room for all of them


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def estimate_table(console: Console, prepared: Any, estimate: Any, first: bool) -> None:
    """Print a method's estimated cost, before the `first` also the data that all share."""
    federation, method = prepared.problem.federation, prepared.method
    what = prediction(prepared.problem.metric.about)
    if first:
        for line in (federation.description, *federation.notes):
            _say(console, line)
        for split in SPLITS:
            counts = [getattr(data, split).predictions for data in federation.everyone.values()]
            least, most = min(counts), max(counts)
            each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            _say(console, f"  {split:<6} {sum(counts):,} {what}s, {each} per client")
    sizes = sorted(
        {
            sum(prepared.problem.trainable(one).trainable_parameters for one in layout.models)
            for layout in prepared.site.layouts.values()
        }
    )
    trained = "none"
    if method.total_iterations:
        trained = " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
    up_to = "at most " if prepared.recipe.limit else ""
    memory = "" if estimate.memory is None else f", {estimate.memory / 1e9:,.1f} GB of memory"
    _say(
        console,
        f"{METHODS[prepared.recipe.method['name']].title}: {up_to}{method.rounds} rounds, "
        f"parameters trained per client: {trained}",
    )
    takes = f"about {clock(estimate.seconds)} in all"
    if estimate.part_of is not None:
        takes = f"trained with {METHODS[estimate.part_of].title}, once"
    cost = f"a round: {size(estimate.up)} up, {size(estimate.down)} down a client; {takes}{memory}"
    console.print(Padding(Text(cost), (0, 0, 0, 2)))  # wrapped between words


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def verdicts(console: Console, items: Iterable[tuple[bool | None, str, str]]) -> None:
    """Print checked sentences, see `parts.verdicts`."""
    for holds, says, detail in items:
        console.print(Text.assemble((f"{VERDICTS[holds]}  ", "green" if holds else "yellow"), says))
        console.print(Padding(Text(detail, style="dim"), (0, 0, 0, 4)))


def tables(rows: Sequence[Row], titles: Mapping[str, str], width: int = 80) -> list[Table]:
    """Return tables for a terminal of `width` characters: the test metric by method and client, the
    figures beside it, and the cost of each method. With more than eight clients, or more than fit,
    only the best and the worst are shown. The scores come last, as the end of the output stays
    visible; the best of each column is bold.
    """
    scores = _groups(rows, titles) if rows[0].groups else _scores(rows, titles, width)
    return [_costs(rows, titles), _beside(rows, titles), scores]


def mixture_tables(results: Sequence[Result]) -> list[Table]:
    """Return a table for each result with parts, see `mixtures`; of many clients its title."""
    tables = []
    for title, (header, lines) in mixtures(results).items():
        tables.append(shown := _plain(title, header))
        for cells in lines if len(lines) <= ROWS else ():
            shown.add_row(*(Text(printable(cell.text), "bold" * cell.best) for cell in cells))
    return tables


def _scores(rows: Sequence[Row], titles: Mapping[str, str], width: int) -> Table:
    metric, columns = rows[0].metric, list(rows[0].clients)
    synced = not rows[0].kept_rounds  # kept models are not synchronised again
    clients = [[row.clients[i] for i in columns] for row in rows]

    def grid(spread: bool) -> tuple[list[list[float]], list[list[str]], list[str]]:
        """Return figures, the texts of the lines, of clients' with their deviations over seeds if
        asked and known, and the header.
        """
        figures = [
            [row.mean, *values, *[row.mean_synced] * synced]
            for row, values in zip(rows, clients, strict=True)
        ]
        names = ["method", "mean", *map(printable, columns), *["synced"] * synced]
        lines = _lines(rows, titles, figures)
        for row, line in zip(rows, lines, strict=True):
            for place, client in enumerate(columns if spread else (), start=2):
                line[place] += f" ± {row.clients_std[client]:.2f}" if row.clients_std else ""
        return figures, lines, names

    # where the terminal is narrow, names are broken, columns stand closer, and deviations go
    for spread in (True, False):
        figures, lines, header = grid(spread)
        rooms = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        broken = list(map(_by_words, header, rooms))
        forms = [(header, 3), *((broken, gap) for gap in (3, 2, 1))]
        form = next((f for f in forms if _needed([f[0], *lines], f[1]) <= width), None)
        if form is not None:
            break
    if len(columns) > FEW or form is None:
        columns = ["best client", "worst client"]
        clients = [[best(values, metric), worst(values, metric)] for values in clients]
        figures, lines, header = grid(False)
        form = header, 3
    return _bold(_plain(str(metric), *form), lines, figures, metric)


def _by_words(name: str, room: int) -> str:
    """Return a name in lines of at most `room` characters, and never broken within a word."""
    lines = [""]
    for word in re.findall(r"[^-\s_./@]*[-\s_./@]|[^-\s_./@]+$", name):
        if lines[-1] and cell_len(f"{lines[-1]}{word}".strip()) > room:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.strip() for line in lines)


def _groups(rows: Sequence[Row], titles: Mapping[str, str]) -> Table:
    """Return the test metric of each unseen group, and the first group's best in training."""
    metric, (first, *others) = rows[0].metric, list(rows[0].groups or ())
    gated = any(row.gate_accuracy is not None for row in rows)
    title = (
        f"{metric}; best and best of last ten evaluations: for {first}, chosen on the test set"
        + "; gate accuracy" * gated
    )
    names = *(unseen(g).replace(" ", "\n") for g in (first, *others)), "best", "best of\nlast ten"
    shown = _plain(title, ("method", *names, *("gate %",) * gated))
    numbers = [
        [row.mean, *map(row.mean_of, others), _figure(row.best), _figure(row.best_of_last_ten)]
        for row in rows
    ]
    lines = _lines(rows, titles, numbers)
    for row, line in zip(rows, lines, strict=True):
        line.extend(["" if row.gate_accuracy is None else f"{row.gate_accuracy:.1f}"] * gated)
    return _bold(shown, lines, numbers, metric)


def _figure(value: float | None) -> float:
    return math.nan if value is None else value


def _lines(
    rows: Sequence[Row], titles: Mapping[str, str], numbers: Sequence[Sequence[float]]
) -> list[list[str]]:
    """Return titles and figures, the first with its deviation."""
    lines = []
    for row, values in zip(rows, numbers, strict=True):
        name, mean, *others = titles[row.method], *(f"{value:.2f}" for value in values)
        lines.append([name, mean + (f" ± {row.std:.2f}" if len(row.per_seed) > 1 else ""), *others])
    return lines


def _bold(
    table: Table, lines: list[list[str]], numbers: list[list[float]], metric: MetricInfo
) -> Table:
    """Return a table with lines added, the best figures bold; headers may wrap, figures not."""
    tops = [best(column, metric) for column in zip(*numbers, strict=True)]
    for (name, *cells), values in zip(lines, numbers, strict=True):
        bold = [value == top for value, top in zip(values, tops, strict=True)]
        styles = ["bold" * top for top in bold] + [""] * (len(cells) - len(bold))
        table.add_row(name, *map(Text, cells, styles))
    for column in table.columns:
        column.min_width = max(
            cell_len(str(cell)) for cell in column.cells if cell is not column.header
        )
    return table


def _needed(lines: Sequence[Sequence[str]], gap: int) -> int:
    """Return the width of a table with so many characters between columns, and one at each end."""
    widths = [
        max(map(cell_len, "\n".join(column).split("\n"))) for column in zip(*lines, strict=True)
    ]
    return sum(widths) + gap * (len(widths) - 1) + 2


def _beside(rows: Sequence[Row], titles: Mapping[str, str]) -> Table:
    """Return the figures beside the metric, see `BESIDE`."""
    known = [figure for figure in BESIDE if figure.known(rows)]
    about = "; ".join(figure.about for figure in known).replace("{metric}", rows[0].metric.name)
    names = (figure.name for figure in known)
    shown = _plain(about.replace(*W_ERROR), ("method", *(name.replace(*W_ERROR) for name in names)))
    for row in rows:
        values = ((figure.of(row), figure.digits) for figure in known)
        cells = ("" if value is None else f"{value:.{digits}f}" for value, digits in values)
        shown.add_row(titles[row.method], *cells)
    return shown


def _costs(rows: Sequence[Row], titles: Mapping[str, str]) -> Table:
    what = prediction(rows[0].metric)
    once = f"; common expert, once: {size(rows[0].once_bytes)}" if rows[0].once_bytes else ""
    names = ("method", "parameters", "active", f"MFLOPs /{what}", "kB up /round", "kB down /round")
    parts = f"parameters trained, and active per {what}; work of a forward pass"
    shown = _plain(f"cost per client: {parts}; seconds of all clients{once}", (*names, "s"))
    for row in rows:
        kilobytes = (
            rounded(count / 1000, ",.0f")
            for count in (row.bytes_up_per_round, row.bytes_down_per_round)
        )
        parameters = f"{row.trainable_parameters:,}"
        work = rounded(row.flops_per_token / 1e6, ",.2f")
        active = "" if row.active_parameters is None else f"{row.active_parameters:,}"
        shown.add_row(titles[row.method], parameters, active, work, *kilobytes, f"{row.wall_s:.0f}")
    return shown


def _plain_text(text: str) -> str:
    """Return untrusted text for Rich: no control characters, and no markup."""
    return escape(printable(text, lines=True))


def _plain(title: str, header: Sequence[str], gap: int = 3) -> Table:
    """Return an empty table with so many characters between columns, from 1 to 3."""
    padding = (0, int(gap > 1), 0, int(gap > 2))
    shown = Table(
        title=_plain_text(title), title_justify="left", box=SIMPLE, pad_edge=False, padding=padding
    )
    for k, name in enumerate(header):
        justify: Literal["right", "left"] = "right" if k else "left"
        shown.add_column(
            _plain_text(name), justify=justify, no_wrap=k <= 2, overflow="fold", min_width=3
        )
    return shown


_EVALUATED = {
    "perplexity": "perplexity",
    "tokens": "tokens",
    "first word, %": "first",
    "first three, %": "first_three",
    "keystrokes saved, %": "keystrokes_saved",
    "questions": "questions",
    "right choice, %": "accuracy",
    "right by length, %": "by_length",
    "exact match, %": "exact_match",
}


def evaluated(scores: Mapping[str, Evaluated]) -> Table:
    """Return a table of clients' models on given data, with the figures that any of them has."""
    words = [None if of.words is None else vars(of.words) for of in scores.values()]
    figures = {
        name: [vars(of)[field] for of in scores.values()]
        if field in Evaluated.__dataclass_fields__
        else [of and of[field] for of in words]
        for name, field in _EVALUATED.items()
    }
    known = {name: of for name, of in figures.items() if set(of) != {None}}
    shown = _plain("", ["client", *known])
    for client, *values in zip(scores, *known.values(), strict=True):
        cells = ("" if v is None else f"{v:,.{0 if v == int(v) else 2}f}" for v in values)
        shown.add_row(_plain_text(client), *cells)
    return shown
