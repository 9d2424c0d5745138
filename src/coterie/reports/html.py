"""`report.html` of a run or of a comparison: one self-contained file that works offline."""

from collections.abc import Sequence
from pathlib import Path

from coterie.core.files import write_atomically
from coterie.core.metrics import direction
from coterie.core.result import RESULT, Comparison, MetricInfo, Result, Routing, Row
from coterie.core.result.audit import AuditResult
from coterie.core.result.rows import comparability, reading
from coterie.core.result.rows import rows as rows_of
from coterie.methods import METHODS
from coterie.reports import tokens
from coterie.reports.audit import audited
from coterie.reports.collaboration import collaboration
from coterie.reports.curves import _curves, _privacy, router_panels
from coterie.reports.experts import classes, experts
from coterie.reports.parts import (
    BESIDE,
    computed_with,
    escape,
    introduction,
    notes,
    page,
    prose,
    section,
    size,
    table,
)
from coterie.reports.scores import (
    COSTS,
    PEAK,
    _costs,
    _headline,
    _kept,
    _scores,
    _spread,
    _words,
    mixtures,
)
from coterie.reports.verdict import verdict

TEXTS = (
    "<p>The beginning of each client's test text, every token in the colour of the expert with "
    "the largest routing weight in the chosen block: the stronger the colour, the larger the "
    "weight. Below each text are the mean "
    "weights of its tokens. Rows are models, columns are texts: framed cells show a model on its "
    "own client's text, the others on another client's. Hover over "
    "a token, tap it, or reach it with Tab and the arrow keys, to see all weights.</p>"
    "<p class=note>These lines of the clients' texts are in this file because this run had all "
    "data on one machine. "
    "<code>--set samples=false</code> leaves them out. ¶ ends a document, ↵ a line; ◌ is a token "
    "that is but a part of a character.</p>"
)


Parts = dict[str, Sequence[str]]  # of the sections, by their names
# what the navigation calls each section, and its heading
SECTIONS = {
    "scores": ("Scores", "{metric}"),
    "clients": ("Clients", "Spread between clients"),
    "training": ("Training", "{name} over training"),
    "weights": ("Collaboration", "Collaboration"),
    "labels": ("Classes", "Who has which classes"),
    "experts": ("Experts", "Which expert is chosen for which class"),
    "routers": ("Routers", "Router scores over training"),
    "privacy": ("Privacy", "Privacy over training"),
    "audit": ("Audit", "What the shared part reveals"),
    "texts": ("Texts", "Which expert reads which token"),
    "costs": ("Costs", "What it cost"),
}


def write_report(folder: Path, results: Sequence[Result], description: str) -> None:
    """Write `report.html` into a run's folder, from `results`, the run's own last, and from the
    `metrics.jsonl` and `routing.json` that are there. Raises SaveError.
    """
    result, rows = results[-1], rows_of(results)
    metrics, routing = folder / "metrics.jsonl", Routing.read_any(folder)
    parts = _parts(rows, results, result.method, comparability(rows, result.method)) | {
        "routers": router_panels(metrics, result.clients),
        "privacy": _privacy(metrics, result),
        "audit": audited(AuditResult.read_any(folder)),
    }
    if routing:
        shown, clients = len(routing.texts), len(result.clients)
        some = f"<p class=note>The first {shown} of {clients} clients.</p>"
        parts["texts"] = (TEXTS, some if shown < clients else "", tokens.routing(routing))
    about = f"seed {result.seed}, {result.rounds} round{'s' * (result.rounds != 1)}"
    about += computed_with(result.machine, result.versions)
    title = f"{result.recipe}: {METHODS[result.method].title}"
    header = introduction(description, about)
    _write(folder, title, header, _headline(rows, result), result.metric, parts)


def write_comparison(folder: Path, comparison: Comparison, description: str) -> None:
    """Write `report.html` into a comparison's folder. Raises SaveError."""
    rows, seeds = comparison.rows, comparison.seeds
    firsts = [folder / r.method / f"seed-{seeds[0]}" for r in rows]
    results = [Result.read(path) for path in firsts if (path / RESULT).exists()]
    several = len(seeds) > 1
    deviation = "<p>One seed: no standard deviation.</p>"
    if several:
        deviation = "<p>± is the sample standard deviation over seeds.</p>"
    first = f"<p class=note>Of seed {seeds[0]}.</p>"
    parts = _parts(rows, results, comparison.own, comparison.notes, deviation, first)
    parts["clients"] = _spread(rows, results)
    about = f"{len(seeds)} seed{'s' * several} ({', '.join(map(str, seeds))})"
    about += computed_with(comparison.machine, comparison.versions)
    title = f"{comparison.recipe}: {len(rows)} methods"
    _write(folder, title, introduction(description, about), "", rows[0].metric, parts)


def _parts(
    rows: Sequence[Row],
    results: Sequence[Result],
    own_method: str,
    remarks: Sequence[str],
    deviation: str = "",
    note: str = "",
) -> Parts:
    """Return the parts of sections by name; `results` are drawn, below `note`, the own one last."""
    own_first = {METHODS[r.method].title: r for r in [*results[-1:], *results[:-1]]}
    once = max((r.once_bytes or 0 for r in results), default=0)
    who = "every client that embeds data with it"
    in_addition = f"<p>In addition, the common expert is sent once to {who}: {size(once)}.</p>"
    text, words, of_parts = verdict(rows, own_method), _words(results), mixtures(results)
    pictures: Parts = {
        "training": (_curves(results),) if results else (),
        "weights": collaboration(own_first),
        "labels": classes(results[-1]) if results else (),  # all methods have the same
        "experts": experts(own_first),
    }
    return {
        "scores": (
            _scored(rows),
            deviation,
            _scores(rows),
            _kept(rows),
            f'<p class="verdict">{prose(text)}</p>' if text else "",
            note if words or of_parts else "",
            words,
            *(f"<p>{escape(says)}</p>{table(*lines)}" for says, lines in of_parts.items()),
            notes(remarks),
        ),
        **{id: (note, *drawn) for id, drawn in pictures.items() if drawn},
        "costs": (COSTS, in_addition if once else "", _costs(rows, results), PEAK),
    }


def _scored(rows: Sequence[Row]) -> str:
    """Return an explanation of the columns of the scores."""
    beside = ", ".join(f"<em>{f.name}</em> {f.sentence}" for f in BESIDE if f.known(rows))
    which = direction(rows[0].metric)
    if any(row.groups is not None for row in rows):
        return (
            "<p>Over the whole test sets of clients that never take part in training and have "
            f"no labels; {which}. There is a column of means for each group. Methods are ranked by "
            "the first group, which also has <em>best</em> and <em>best of last ten</em> "
            "evaluations during training (chosen on the test set, as in the paper, so that they "
            "favour every method), <em>gate</em>, the share of samples sent to an expert "
            f"whose anchor has their class, and {beside}.</p>"
        )
    return f"<p>Over each client's whole test set; {which}. {reading(rows[0])} {beside}.</p>"


def _write(
    folder: Path, title: str, header: str, tiles: str, metric: MetricInfo, parts: Parts
) -> None:
    """Write the page of the sections that have parts, with a link to each."""
    names = {"metric": str(metric).capitalize(), "name": metric.name.capitalize()}
    sections, links = "", ""
    for id, (link, heading) in SECTIONS.items():
        if shown := section(id, heading.format(**names), *parts.get(id, ())):
            sections += shown
            links += f'<a href="#{id}">{link}</a>'
    nav = f'<nav aria-label="Sections">{links}</nav>'
    write_atomically(folder / "report.html", page(title, header, tiles + sections, nav))
