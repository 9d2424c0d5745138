"""`report.html` of a run or of a comparison: one self-contained file that works offline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coterie.core.files import write_atomically
from coterie.core.metrics import direction
from coterie.core.result import RESULT, Comparison, MetricInfo, Result, Routing, Row
from coterie.core.result.audit import AuditResult
from coterie.core.result.rows import comparability
from coterie.core.result.rows import rows as rows_of
from coterie.methods import METHODS
from coterie.reports import tokens
from coterie.reports.audit import audited
from coterie.reports.beside import BESIDE
from coterie.reports.classes import classes
from coterie.reports.collaboration import collaboration
from coterie.reports.curves import _curves, _privacy, router_panels
from coterie.reports.experts import experts
from coterie.reports.parts import escape, page, prose, section, size
from coterie.reports.scores import COSTS, PEAK, _costs, _headline, _kept, _scores, _spread
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


def write_report(folder: Path, results: Sequence[Result], description: str) -> None:
    """Write `report.html` into a run's folder, from `results` and from the `metrics.jsonl` and
    `routing.json` that are there.

    Args:
        folder: The run's folder.
        results: The result of each method, the run's own last.
        description: The description of the recipe.

    Raises:
        SaveError: It could not be written.
    """
    result, rows = results[-1], rows_of(results)
    metric = result.metric
    routing = Routing.read_any(folder)
    about = f"seed {result.seed}, {result.rounds} rounds, {_made_with(result)}"
    sections = {
        "scores": section(
            "scores",
            _heading(metric),
            _scored(rows),
            _scores(rows),
            _kept(rows),
            _verdict(rows, result.method),
            _notes(comparability(rows, result.method)),
        ),
        "training": section(
            "training", f"{metric.name.capitalize()} over training", _curves(results)
        ),
        "weights": _collaboration(results),
        "labels": _labels(results),
        "experts": _experts(results),
        "routers": section(
            "routers",
            "Router scores over training",
            *router_panels(folder / "metrics.jsonl", result.clients),
        ),
        "privacy": section(
            "privacy", "Privacy over training", *_privacy(folder / "metrics.jsonl", result)
        ),
        "audit": section(
            "audit", "What the shared part reveals", *audited(AuditResult.read_any(folder))
        ),
        "texts": section(
            "texts",
            "Which expert reads which token",
            TEXTS,
            _of_how_many(routing, result),
            tokens.routing(routing),
        )
        if routing
        else "",
        "costs": section(
            "costs", "What it cost", COSTS, _once(results), _costs(rows, results), PEAK
        ),
    }
    title = f"{result.recipe}: {METHODS[result.method].title}"
    write_atomically(
        folder / "report.html",
        page(title, _body(title, description, about, _headline(rows, result), sections)),
    )


def write_comparison(folder: Path, comparison: Comparison, description: str) -> None:
    """Write `report.html` into a comparison's folder.

    Args:
        folder: The comparison's folder.
        comparison: The comparison.
        description: The description of the recipe.

    Raises:
        SaveError: It could not be written.
    """
    rows, seeds = comparison.rows, comparison.seeds
    metric = rows[0].metric
    firsts = [folder / r.method / f"seed-{seeds[0]}" for r in rows]
    results = [Result.read(path) for path in firsts if (path / RESULT).exists()]
    about = (
        f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'} ({', '.join(map(str, seeds))}), "
        f"{_made_with(comparison)}"
    )
    deviation = (
        "<p>± is the sample standard deviation over seeds.</p>"
        if len(seeds) > 1
        else "<p>One seed: no standard deviation.</p>"
    )
    first = f"<p class=note>Of seed {seeds[0]}.</p>"
    sections = {
        "scores": section(
            "scores",
            _heading(metric),
            _scored(rows),
            deviation,
            _scores(rows),
            _kept(rows),
            _verdict(rows, comparison.own),
            _notes(comparison.notes),
        ),
        "clients": section("clients", "Spread between clients", *_spread(rows, results)),
        "training": section(
            "training", f"{metric.name.capitalize()} over training", first, _curves(results)
        )
        if results
        else "",
        "weights": _collaboration(results, first),
        "labels": _labels(results, first),
        "experts": _experts(results, first),
        "costs": section(
            "costs", "What it cost", COSTS, _once(results), _costs(rows, results), PEAK
        ),
    }
    title = f"{comparison.recipe}: {len(rows)} methods"
    write_atomically(
        folder / "report.html", page(title, _body(title, description, about, "", sections))
    )


def _heading(metric: MetricInfo) -> str:
    return str(metric).capitalize()


def _scored(rows: Sequence[Row]) -> str:
    """Return an explanation of the columns of the scores."""
    beside = ", ".join(figure.sentence for figure in BESIDE if figure.known(rows))
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
    if rows[0].kept_rounds:
        return (
            f"<p>Over each client's whole test set; {which}. <em>mean</em> and the clients' "
            f"figures score of each client the model of the round whose validation score was best, "
            f"the untrained start included. {beside}.</p>"
        )
    return (
        f"<p>Over each client's whole test set; {which}. <em>mean</em> and the clients' "
        "figures are those of each client's model right after its last local iteration, "
        f"<em>synced</em> after one more synchronisation. {beside}.</p>"
    )


def _collaboration(results: Sequence[Result], note: str = "") -> str:
    """Return the section of collaboration weights, the last method first; "" without any."""
    parts = collaboration({METHODS[r.method].title: r for r in [*results[-1:], *results[:-1]]})
    return section("weights", "Collaboration", note, *parts) if parts else ""


def _labels(results: Sequence[Result], note: str = "") -> str:
    """Return the section of labels; all methods have the same."""
    parts = classes(results[-1]) if results else ()
    return section("labels", "Who has which classes", note, *parts) if parts else ""


def _experts(results: Sequence[Result], note: str = "") -> str:
    """Return the section of pools, the last method first; "" if no method has any."""
    parts = experts({METHODS[r.method].title: r for r in [*results[-1:], *results[:-1]]})
    return (
        section("experts", "Which expert is chosen for which class", note, *parts) if parts else ""
    )


def _once(results: Sequence[Result]) -> str:
    """Return a sentence on the cost of the common expert; "" without one."""
    once = max((r.once_bytes or 0 for r in results), default=0)
    return (
        f"<p>In addition, the common expert is sent once to every client that embeds data with it: "
        f"{size(once)}.</p>"
        if once
        else ""
    )


def _of_how_many(routing: Routing, result: Result) -> str:
    shown, clients = len(routing.texts), len(result.clients)
    return f"<p class=note>The first {shown} of {clients} clients.</p>" if shown < clients else ""


def _made_with(result: Result | Comparison) -> str:
    machine, versions = result.machine, result.versions
    parts = [machine.device, machine.dtype] if machine else []
    parts += [f"coterie {versions.coterie}", f"torch {versions.torch}"] if versions else []
    return ", ".join(parts)


def _body(title: str, description: str, about: str, tiles: str, sections: Mapping[str, str]) -> str:
    names = {
        "scores": "Scores",
        "training": "Training",
        "weights": "Collaboration",
        "labels": "Classes",
        "experts": "Experts",
        "routers": "Routers",
        "privacy": "Privacy",
        "audit": "Audit",
        "texts": "Texts",
        "clients": "Clients",
        "costs": "Costs",
    }
    links = "".join(f'<a href="#{id}">{names[id]}</a>' for id, shown in sections.items() if shown)
    return (
        f"<header><h1>{escape(title)}</h1><p>{escape(description)}</p><p "
        f"class=about>{escape(about)}</p></header>"
        f'<nav aria-label="Sections">{links}</nav><main>{tiles}{"".join(sections.values())}</main>'
    )


def _verdict(rows: Sequence[Row], own_method: str) -> str:
    text = verdict(rows, own_method)
    return f'<p class="verdict">{prose(text)}</p>' if text else ""


def _notes(notes: Sequence[str]) -> str:
    return (
        '<ul class="notes">' + "".join(f"<li>{prose(note)}</li>" for note in notes) + "</ul>"
        if notes
        else ""
    )
