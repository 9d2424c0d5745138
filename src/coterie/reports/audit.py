"""An audit as people read it: sentences, a table for a terminal, and a section of the report."""

from collections.abc import Mapping
from html import escape

from rich.table import Table
from rich.text import Text

from coterie.core.result.audit import AuditResult, CanaryResult, Estimate, WordsResult
from coterie.reports import chart, marks
from coterie.reports.marks import Interval
from coterie.reports.parts import BLUE, GREEN, GREY, VERMILION, captioned, notes, table
from coterie.reports.tables import fitted

OBSERVERS = {"server": "the server", "others": "another client", "user": "the model's user"}
COLOURS = {"server": VERMILION, "others": BLUE, "user": GREEN}

ABOUT = (
    "<p>Measured by <code>coterie audit</code> on this machine, which has all texts. <em>The "
    "server</em> sees what each client sent. <em>Another client</em> sees the model that every "
    "client receives. <em>The model's user</em> asks a client's own model, whose predictions are "
    "mixed. Dots are measured values, whiskers are their intervals, and the broken line "
    "is the value of guessing.</p>"
)
EXAMPLES = (
    "<p class=note>Words that only one client has, at least twice in its training text, and that "
    "the base does not suggest there. These pieces of the clients' texts are in this file because "
    "the audit had all of them on one machine. Do not share this file.</p>"
)


def about(audit: AuditResult) -> str:
    """Return one line that says what was audited."""
    of = "" if len(audit.clients) > 1 else f", client {audit.clients[0]}"
    return f"{audit.recipe}, {audit.method}, seed {audit.seed}, after round {audit.round}{of}"


def _of(observer: str, audit: AuditResult) -> str:
    """Return an observer's name; under secure aggregation the server sees only sums."""
    return "a server of sums" if observer == "server" and audit.secure else OBSERVERS[observer]


def _interval(value: Estimate | None, digits: int, factor: float = 1) -> str:
    if value is None:
        return "-"
    middle, low, high = (
        f"{factor * end:.{digits}f}" for end in (value.value, value.low, value.high)
    )
    return f"{middle} ({low} to {high})"


def rows(audit: AuditResult) -> list[list[str]]:
    """Return the rows of the table: a measure, its value for each observer, and by guessing."""
    observers = audit.observers.values()
    membership = [result.membership for result in observers]
    min_k = [result.min_k for result in observers if result.min_k]
    canaries = [result.canaries for result in observers if result.canaries]
    lines = []
    if canaries:
        exposures = [_interval(result.exposure, 2) for result in canaries]
        areas = [_interval(result.auc, 2) for result in canaries]
        bounds = [f"{result.epsilon.at_least:.2f}" for result in canaries]
        lines += [
            ["canary exposure, bits", *exposures, f"{canaries[0].exposure.chance:.2f}"],
            ["canaries told apart, AUC", *areas, "0.50"],
            ["epsilon is at least", *bounds, "0"],
        ]
    areas = [_interval(result.auc, 2) for result in membership]
    rates = [_interval(result.tpr, 1, 100) for result in membership]
    lines += [[f"{audit.data} told apart, AUC", *areas, "0.50"], ["TPR at 1 % FPR, %", *rates, "1"]]
    if min_k:
        lines.append(["by Min-K%++, AUC", *(_interval(result.auc, 2) for result in min_k), "0.50"])
    return lines


def word_rows(audit: AuditResult) -> list[list[str]]:
    """Return the rows of the second table: whose model suggests rare words, and how often."""
    rates = _rates(audit.words) if audit.words and audit.words.words else ()
    return [[name, _interval(rate, 1, 100)] for name, rate, _ in rates]


def _rates(words: WordsResult) -> list[tuple[str, Estimate, str]]:
    """Return how often each model suggests rare words, with its name and colour."""
    rates = (
        ("other clients' models", words.others, BLUE),
        ("the shared part alone", words.shared, GREEN),
        ("the client's own model", words.owner, VERMILION),
        ("others, words nobody trained on", words.control, GREY),
    )
    return [(name, rate, colour) for name, rate, colour in rates if rate]


def sentences(audit: AuditResult) -> list[str]:
    """Return what the numbers mean: two plain sentences for each measure and observer."""
    lines = []
    for name, result in audit.observers.items():
        who = _of(name, audit)
        who = who[0].upper() + who[1:]
        if result.canaries:
            lines.append(_canaries_found(who, result.canaries))
        lines.append(_members_found(who, audit.data, result.membership.auc, audit.shift.auc))
    if audit.words and audit.words.others:
        lines.append(_words_suggested(audit.words, audit.words.others))
    return lines


def _canaries_found(who: str, canaries: CanaryResult) -> str:
    """Return whether an observer finds canaries."""
    exposure, epsilon = canaries.exposure, canaries.epsilon
    outcome = "does not find planted canaries better than by guessing"
    if exposure.low > exposure.chance:
        outcome = "finds planted canaries"
    bound = "That shows no lower bound on epsilon."
    if epsilon.at_least:
        bound = f"Epsilon is above {epsilon.at_least:.2f} at 95 % confidence."
    guesses = f"It guesses {epsilon.right} of {epsilon.guesses} coin flips right."
    return f"{who} {outcome}. {guesses} {bound}"


def _members_found(who: str, data: str, auc: Estimate, shift: Estimate) -> str:
    """Return whether an observer can tell what clients trained on."""
    beyond = auc.low > max(shift.high, 0.5)
    can, limit = ("can", "") if beyond else ("cannot", " better than the data alone show")
    return (
        f"{who} {can} tell which {data} a client trained on{limit}. It is right for "
        f"{100 * auc.value:.0f} % of pairs (without any trained model {100 * shift.value:.0f} %, "
        f"by guessing 50 %)."
    )


def _words_suggested(words: WordsResult, others: Estimate) -> str:
    """Return how often other clients' models suggest rare words."""
    value, low, high = (f"{100 * end:.1f}" for end in (others.value, others.low, others.high))
    those = f"{words.words} words that only one client has and that the base does not suggest"
    sentence = f"Another client's model suggests {value} % ({low} to {high} %) of the {those}."
    if (control := words.control) is None:
        return sentence
    return f"{sentence} Of words that nobody trained on it suggests {100 * control.value:.1f} %."


def terminal(audit: AuditResult) -> list[Table]:
    """Return tables that fit a terminal of 80 characters."""
    header = ["", *(_of(name, audit) for name in audit.observers), "chance"]
    three = len(audit.observers) > 2  # and their intervals have no room beside the values
    lines = [
        [Text(cell.replace(" (", "\n(") if three else cell) for cell in line]
        for line in rows(audit)
    ]
    shown = [fitted("", header, lines)]
    if words := word_rows(audit):
        about = f"rare words among the first {audit.settings.top} suggestions of"
        shown.append(fitted("", [about, "%"], words))
    return shown


def audited(audit: AuditResult | None) -> tuple[str, ...]:
    """Return the parts of the report's section; () without an audit."""
    if not audit:
        return ()
    header = ["", *(_of(name, audit) for name in audit.observers), "by guessing"]
    parts = [
        ABOUT,
        f"<p class=note>{escape(about(audit))}</p>",
        notes(sentences(audit)),
        chart.grid([captioned(title, "", drawn) for title, drawn in _pictures(audit).items()]),
        table(header, rows(audit)),
    ]
    if audit.words and audit.words.examples:
        lines = [
            [f"… {e.prompt.strip()}", e.word, e.owner, ", ".join(e.by)]
            for e in audit.words.examples
        ]
        names = ["what was typed", "suggested", "only in the text of", "by the model of"]
        parts += [EXAMPLES, table(names, lines)]
    return tuple(parts)


def _pictures(audit: AuditResult) -> dict[str, str]:
    """Return the picture of each measure by its title."""
    observers, pictures = audit.observers, {}
    exposures = {name: r.canaries.exposure for name, r in observers.items() if r.canaries}
    if exposures:
        first = next(iter(exposures.values()))
        pictures["Exposure of canaries"] = _drawn(
            audit, exposures, "bits", (0, first.most), first.chance
        )
    areas = {name: result.membership.auc for name, result in observers.items()}
    limits = (min(0.4, *(area.low for area in areas.values())), 1.0)
    pictures[f"Training {audit.data} told from others"] = _drawn(audit, areas, "AUC", limits, 0.5)
    if audit.words and audit.words.words:
        pictures["Rare words of one client, suggested"] = _words(audit.words)
    return pictures


def _drawn(
    audit: AuditResult, rows: Mapping[str, Estimate], unit: str, limits: chart.Point, chance: float
) -> str:
    """Return a picture of a measure, with a row for each observer."""
    shown = {
        _of(observer, audit): _row(_of(observer, audit), estimate, COLOURS[observer], 3)
        for observer, estimate in rows.items()
    }
    return marks.intervals(shown, unit, limits, chance)


def _row(
    name: str, estimate: Estimate, colour: str, digits: int, factor: float = 1, unit: str = ""
) -> Interval:
    value, low, high = (factor * end for end in (estimate.value, estimate.low, estimate.high))
    tooltip = f"{name}: {_interval(estimate, digits, factor)}{unit}"
    return Interval(value, low, high, tooltip, colour)


def _words(words: WordsResult) -> str:
    """Return a picture of how often rare words are suggested."""
    shown = {name: _row(name, rate, of, 1, 100, " %") for name, rate, of in _rates(words)}
    most = max(1.05 * max(row.high for row in shown.values()), 1.0)
    return marks.intervals(shown, "% among the suggestions", (0, most))
