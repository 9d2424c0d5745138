"""The content of clients' texts, in a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from rich.console import Console
from rich.text import Text

from coterie.core.printing import printable
from coterie.data.summary import DataSummary, Token
from coterie.reports.parts import FEW
from coterie.reports.tables import fitted, say

_SIZES = ("client", "split", "documents", "tokens", "with loss", "median", "longest")
_EQUAL = ("client", "repeated", "shared", "in two splits", "nearly equal", "of these in two")
SIZES = (
    "Documents are texts, parts of long texts, or conversations. With loss: tokens that count in "
    "an epoch. Median and longest: documents, in tokens."
)
EQUAL = (
    "Documents are equal that differ only in white space, line ends, ids and times. Repeated: the "
    "client has it already. Shared: other clients have it, too. In two splits: another split has "
    "it, whoever's. Nearly equal: most of its runs of five words are in another document; "
    "data.near_duplicates: together keeps these in one split."
)
EXAMPLES = "The first training rows as the model sees them; tokens with loss are bold and blue."
_SHOWN = 50  # rows of a table that a terminal shows
LINE = "↵"


def print_data(console: Console, summary: DataSummary) -> None:
    """Print the content of clients' texts."""
    say(console, summary.description)
    for sentence in (*summary.notes, *_remarks(summary)):
        say(console, f"- {sentence}")
    for header, rows, about in _tables(summary):
        console.print(fitted("", header, rows[:_SHOWN], console.width))
        if len(rows) > _SHOWN:
            say(console, f"... and {len(rows) - _SHOWN:,} more rows: --json has all")
        console.print(about, style="dim", highlight=False)
    _print_examples(console, summary)
    for id, client in summary.clients.items():
        for file, splits in client.files.items():
            say(console, f"{id}: {', '.join(splits)}: {file}")


def _print_examples(console: Console, summary: DataSummary) -> None:
    rows = [(id, row) for id, client in summary.clients.items() for row in client.examples]
    if rows:
        console.print(f"\n{EXAMPLES}", style="dim", highlight=False)
    for id, row in rows:
        say(console, f"\n{id}:")
        console.print(Text.assemble(*map(_styled, row)), soft_wrap=True)


def _styled(token: Token) -> tuple[str, str]:
    colour = "bold blue" if token.counted else ""
    visible = printable(token.text, lines=True).replace("\n", f"{LINE}\n")
    return visible, f"{colour} {'reverse' * token.special}".strip()


def _tables(summary: DataSummary) -> Iterator[tuple[Sequence[str], list[list[str]], str]]:
    """Yield the header, the rows and a description of each table."""
    sizes = [
        [id, name, *map("{:,}".format, astuple(split))]
        for id, client in summary.clients.items()
        for name, split in client.splits.items()
    ]
    yield _SIZES, sizes, SIZES
    counts = {
        id: (texts.repeated, texts.shared, texts.crossing, texts.near, texts.near_crossing)
        for id, texts in summary.clients.items()
    }
    if any(map(any, counts.values())):
        yield _EQUAL, [[id, *map("{:,}".format, numbers)] for id, numbers in counts.items()], EQUAL


def _remarks(summary: DataSummary) -> list[str]:
    """Return sentences about characters and scripts."""
    odd = {id: client.odd for id, client in summary.clients.items() if client.odd}
    remarks = [
        f"{id}: {', '.join(f'{count:,} {what}' for what, count in odd[id].items())}"
        for id in list(odd)[:FEW]
    ]
    if len(odd) > FEW:
        remarks.append(f"... and odd characters of {len(odd) - FEW:,} more clients")
    scripts: dict[str, list[str]] = {}
    for id, client in summary.clients.items():
        shares = ", ".join(
            f"{script.capitalize()} " + (f"{share:.0%}" if share >= 0.01 else "under 1%")
            for script, share in client.scripts.items()
        )
        scripts.setdefault(shares or "no letters", []).append(id)
    return remarks + [f"letters of {_few(ids)}: {shares}" for shares, ids in scripts.items()]


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")
