"""Tables in a terminal: scores, groups, costs, what was measured, and what a recipe would take."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coterie.core.metrics import best, prediction, worst
from coterie.core.printing import printable
from coterie.core.result import Evaluated, MetricInfo, Result, Row
from coterie.data.splits import SPLITS
from coterie.methods import METHODS
from coterie.reports.parts import BESIDE, VERDICTS, known, rounded, size, unseen
from coterie.reports.scores import mixtures

ROWS = 16  # clients that a table has a line for
_BREAK = re.compile(r"\w[-_./@](?!\d)")  # a word without room may be broken after it
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
            say(console, line)
        for split in SPLITS:
            counts = [getattr(data, split).predictions for data in federation.everyone.values()]
            least, most = min(counts), max(counts)
            each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            say(console, f"  {split:<6} {sum(counts):,} {what}s, {each} per client")
    sizes = sorted(
        {
            sum(prepared.problem.trainable(one).trainable_parameters for one in layout.models)
            for layout in set(prepared.site.layouts.values())
        }
    )
    trained = "none"
    if method.total_iterations:
        trained = " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
    up_to = "at most " if prepared.recipe.limit else ""
    memory = "" if estimate.memory is None else f", {estimate.memory / 1e9:,.1f} GB of memory"
    say(
        console,
        f"{METHODS[prepared.recipe.method['name']].title}: {up_to}{method.rounds} rounds, "
        f"parameters trained per client: {trained}",
    )
    takes = f"about {clock(estimate.seconds)} in all"
    if estimate.part_of is not None:
        takes = f"trained with {METHODS[estimate.part_of].title}, once"
    cost = f"a round: {size(estimate.up)} up, {size(estimate.down)} down a client; {takes}{memory}"
    console.print(Padding(Text(cost), (0, 0, 0, 2)))  # wrapped between words


def say(console: Console, text: str) -> None:
    """Print a text as it is, without rich's markup, wrapped by the terminal alone."""
    console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)


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
    scores = (_groups if rows[0].groups else _scores)(rows, titles, width)
    return [_costs(rows, titles, width), _beside(rows, titles, width), scores]


def mixture_tables(results: Sequence[Result]) -> list[Table]:
    """Return a table for each result with parts, see `mixtures`; of many clients its title."""
    tables = []
    for title, (header, lines) in mixtures(results).items():
        cells = [
            [Text(printable(cell.text), "bold" * cell.best) for cell in line]
            for line in (lines if len(lines) <= ROWS else ())
        ]
        tables.append(fitted(title, header, cells))
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

    # where the terminal is narrow, deviations go first
    for spread in (True, False):
        figures, lines, header = grid(spread)
        if fits := _form(_columns(header, lines), width) is not None:
            break
    if len(columns) > FEW or not fits:
        columns = ["best client", "worst client"]
        clients = [[best(values, metric), worst(values, metric)] for values in clients]
        figures, lines, header = grid(False)
    return fitted(str(metric), header, _bold(lines, figures, metric), width)


def _groups(rows: Sequence[Row], titles: Mapping[str, str], width: int) -> Table:
    """Return the test metric of each unseen group, and the first group's best in training."""
    metric, (first, *others) = rows[0].metric, list(rows[0].groups or ())
    gated = any(row.gate_accuracy is not None for row in rows)
    title = (
        f"{metric}; best and best of last ten evaluations: for {first}, chosen on the test set"
        + "; gate accuracy" * gated
    )
    names = *map(unseen, (first, *others)), "best", "best of last ten"
    header = ("method", *names, *("gate %",) * gated)
    numbers = [
        [row.mean, *map(row.mean_of, others), known(row.best), known(row.best_of_last_ten)]
        for row in rows
    ]
    lines = _lines(rows, titles, numbers)
    for row, line in zip(rows, lines, strict=True):
        line.extend(["" if row.gate_accuracy is None else f"{row.gate_accuracy:.1f}"] * gated)
    return fitted(title, header, _bold(lines, numbers, metric), width)


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
    lines: list[list[str]], numbers: list[list[float]], metric: MetricInfo
) -> Iterator[list[str | Text]]:
    """Yield lines, the best figures bold."""
    tops = [best(column, metric) for column in zip(*numbers, strict=True)]
    for (name, *cells), values in zip(lines, numbers, strict=True):
        bold = [value == top for value, top in zip(values, tops, strict=True)]
        styles = ["bold" * top for top in bold] + [""] * (len(cells) - len(bold))
        yield [name, *map(Text, cells, styles)]


def _beside(rows: Sequence[Row], titles: Mapping[str, str], width: int) -> Table:
    """Return the figures beside the metric, see `BESIDE`."""
    known = [figure for figure in BESIDE if figure.known(rows)]
    about = "; ".join(figure.about for figure in known).replace("{metric}", rows[0].metric.name)
    lines: list[list[str]] = []
    for row in rows:
        values = ((figure.of(row), figure.digits) for figure in known)
        cells = ("" if value is None else f"{value:.{digits}f}" for value, digits in values)
        lines.append([titles[row.method], *cells])
    header = ("method", *(figure.name for figure in known))
    return fitted(about, header, lines, width)


def _costs(rows: Sequence[Row], titles: Mapping[str, str], width: int) -> Table:
    what = prediction(rows[0].metric)
    once = f"; common expert, once: {size(rows[0].once_bytes)}" if rows[0].once_bytes else ""
    broken = map(Text, (f"MFLOPs\n/{what}", "kB up\n/round", "kB down\n/round"))
    names: list[str | Text] = ["method", "parameters", "active", *broken, "s"]
    parts = f"parameters trained, and active per {what}; work of a forward pass"
    title = f"cost per client: {parts}; seconds of all clients{once}"
    lines: list[list[str]] = []
    for row in rows:
        kilobytes = (
            rounded(count / 1000, ",.0f")
            for count in (row.bytes_up_per_round, row.bytes_down_per_round)
        )
        parameters = f"{row.trainable_parameters:,}"
        work = rounded(row.flops_per_token / 1e6, ",.2f")
        active = "" if row.active_parameters is None else f"{row.active_parameters:,}"
        costs = parameters, active, work, *kilobytes, f"{row.wall_s:.0f}"
        lines.append([titles[row.method], *costs])
    return fitted(title, names, lines, width)


def fitted(
    title: str,
    header: Sequence[str | Text],
    lines: Iterable[Sequence[str | Text]],
    width: int = 80,
    text: Collection[int] = (0,),
) -> Table:
    """Return a table of at most `width` characters, broken between words where it must be: first
    the header, then the columns `text`, the widest first. A word is broken, and a figure, only
    where not even the words have room.
    """
    columns = _columns(header, lines)
    gap, widths = _form(columns, width) or (1, _broken(columns))
    words = [_widest(_by_words(cell, 1) for cell in column) for column in columns]
    for room in (words, [3] * len(columns)):
        least = [room[k] if k in text else wide for k, wide in enumerate(widths)]
        widths = _narrowed(widths, least, gap, width)
    shown = Table(
        title=Text(printable(title, lines=True), "italic"),
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, int(gap > 1), 0, int(gap > 2)),
    )
    rows = [
        [_by_words(cell, room) for cell, room in zip(row, widths, strict=True)]
        for row in zip(*columns, strict=True)
    ]
    for k, name in enumerate(rows[0]):
        justify: Literal["left", "right"] = "left" if k in text else "right"
        shown.add_column(name, justify=justify, min_width=widths[k], max_width=widths[k])
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def _columns(
    header: Sequence[str | Text], lines: Iterable[Sequence[str | Text]]
) -> list[list[Text]]:
    """Return the columns of a table, the header first, safe to print."""
    columns = zip(header, *lines, strict=True)
    return [[c if isinstance(c, Text) else Text(printable(c)) for c in of] for of in columns]


def _form(columns: Sequence[Sequence[Text]], width: int) -> tuple[int, list[int]] | None:
    """Return the characters between columns, 3 to 1, and their widths; None if they have no room,
    though the header is broken between words.
    """
    for gap in (3, 2, 1):
        widths = _narrowed(list(map(_widest, columns)), _broken(columns), gap, width)
        if sum(widths) + gap * len(widths) + 1 <= width:
            return gap, widths
    return None


def _narrowed(widths: Sequence[int], least: Sequence[int], gap: int, width: int) -> list[int]:
    """Return widths, the widest narrowed first, until they fit or are the least."""
    narrowed = list(widths)
    while sum(narrowed) + gap * len(narrowed) + 1 > width:
        wide = [k for k, room in enumerate(narrowed) if room > least[k]]
        if not wide:
            break
        narrowed[max(wide, key=narrowed.__getitem__)] -= 1
    return narrowed


def _broken(columns: Sequence[Sequence[Text]]) -> list[int]:
    """Return the widths of columns whose header is broken between words."""
    return [_widest([_by_words(name, 1), *cells]) for name, *cells in columns]


def _widest(cells: Iterable[Text]) -> int:
    return max(cell_len(line) for cell in cells for line in cell.plain.split("\n"))


def _by_words(text: Text, room: int) -> Text:
    """Return a text in lines of at most `room` characters, and never broken within a word."""
    lines: list[Text] = []
    for line in text.split("\n"):
        ends, start, end = [], 0, 0
        for word in re.finditer(r"\S+\s*|\s+", line.plain):
            inner = _BREAK.finditer(word[0]) if cell_len(word[0].rstrip()) > room else ()
            for place in (*(word.start() + m.end() for m in inner), word.end()):
                if end > start and cell_len(line.plain[start:place].rstrip()) > room:
                    ends.append(start := end)
                end = place
        lines += line.divide(ends)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


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


def evaluated(scores: Mapping[str, Evaluated], width: int = 80) -> Table:
    """Return a table of clients' models on given data, with the figures that any of them has."""
    words = [None if of.words is None else vars(of.words) for of in scores.values()]
    figures = {
        name: [vars(of)[field] for of in scores.values()]
        if field in Evaluated.__dataclass_fields__
        else [of and of[field] for of in words]
        for name, field in _EVALUATED.items()
    }
    known = {name: of for name, of in figures.items() if set(of) != {None}}
    lines = [
        [
            client,
            *("" if v is None else f"{v:,.{0 if float(v).is_integer() else 2}f}" for v in values),
        ]
        for client, *values in zip(scores, *known.values(), strict=True)
    ]
    return fitted("", ["client", *known], lines, width)
