"""An audit as people read it: sentences, a table for a terminal, and a section of the report."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from coterie.reports import chart, marks
from coterie.reports.marks import Interval
from coterie.reports.parts import BLUE, GREEN, GREY, VERMILION, captioned, table

Json = Mapping[str, Any]
OBSERVERS = {"server": "the server", "others": "another client"}
COLOURS = {"server": VERMILION, "others": BLUE}
WIDTH = 80  # of a terminal that has room for everything

ABOUT = (
    "<p>Measured by <code>coterie audit</code> on this machine, which has all texts. <em>The "
    "server</em> sees what each client sent; "
    "<em>another client</em> sees the model that everybody gets. Dots are measured, whiskers "
    "their intervals, and the broken line is what "
    "guessing would give.</p>"
)
EXAMPLES = (
    "<p class=note>Words that one client alone has, at least twice in its training text, and "
    "that the base does not suggest there. These "
    "pieces of the clients' texts are in this file because the audit had all of them on one "
    "machine: do not give it away.</p>"
)


def about(found: Json) -> str:
    """Return one line: what was audited."""
    of = "" if len(found["clients"]) > 1 else f", client {found['clients'][0]}"
    return (
        f"{found['recipe']}, {found['method']}, seed {found['seed']}, after round "
        f"{found['round']}{of}"
    )


def _of(observer: str, found: Json) -> str:
    """Return an observer's name: under secure aggregation a server sees sums alone."""
    return "a server of sums" if observer == "server" and found["secure"] else OBSERVERS[observer]


def _interval(value: Json | None, digits: int, factor: float = 1) -> str:
    if value is None:
        return "-"
    middle, low, high = (f"{factor * value[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{middle} ({low} to {high})"


def rows(found: Json) -> list[list[str]]:
    """Return the lines of the table: a measure, what each observer gets, and what guessing
    would.
    """
    observers = found["observers"].values()
    lines = []
    if found["canaries"]:
        own = [o["canaries"] for o in observers]
        lines.append(
            [
                "canary exposure, bits",
                *(_interval(c["exposure"], 2) for c in own),
                f"{own[0]['exposure']['chance']:.2f}",
            ]
        )
        lines.append(["canaries told apart, AUC", *(_interval(c["auc"], 2) for c in own), "0.50"])
        lines.append(
            ["epsilon is at least", *(f"{c['epsilon']['at_least']:.2f}" for c in own), "0"]
        )
    lines.append(
        [
            f"{found['data']} told apart, AUC",
            *(_interval(o["membership"]["auc"], 2) for o in observers),
            "0.50",
        ]
    )
    lines.append(
        [
            f"{found['data']} found at 1 % FPR, %",
            *(_interval(o["membership"]["tpr"], 1, 100) for o in observers),
            "1",
        ]
    )
    if all(o["min_k"] for o in observers):
        lines.append(
            ["by Min-K%++, AUC", *(_interval(o["min_k"]["auc"], 2) for o in observers), "0.50"]
        )
    return lines


def word_rows(found: Json) -> list[list[str]]:
    """Return the lines of the second table: whose model suggests rare words, and how often."""
    words = found["words"]
    if not words or not words["words"]:
        return []
    names = {
        "others": "other clients' models",
        "shared": "the shared part alone",
        "owner": "the client's own model",
        "control": "other clients' models, words nobody trained on",
    }
    return [
        [name, _interval(words[key], 1, 100)]
        for key, name in names.items()
        if words[key] is not None
    ]


def sentences(found: Json) -> list[str]:
    """Return what the numbers mean, one plain sentence for each measure and observer."""
    said = []
    shift = found["shift"]["auc"]
    for name, own in found["observers"].items():
        who = _of(name, found)
        if own["canaries"]:
            exposure, epsilon = own["canaries"]["exposure"], own["canaries"]["epsilon"]
            seen = exposure["low"] > exposure["chance"]
            what = (
                f"{who} finds planted canaries"
                if seen
                else f"{who} does not find planted canaries better than by guessing"
            )
            bound = (
                f"so epsilon is above {epsilon['at_least']:.2f} at 95 % confidence"
                if epsilon["at_least"]
                else "no epsilon is refuted"
            )
            said.append(
                f"{what}: it guesses {epsilon['right']} of {epsilon['guesses']} coin flips "
                f"right, {bound}."
            )
        auc = own["membership"]["auc"]
        beyond = auc["low"] > max(shift["high"], 0.5)
        can = "can tell" if beyond else "cannot tell, beyond what the data alone tell,"
        data = f"without any trained model {100 * shift['value']:.0f} %"
        said.append(
            f"{who} {can} what a client trained on: right for {100 * auc['value']:.0f} % of "
            f"pairs ({data}; guessing 50 %)."
        )
    words = found["words"]
    if words and words["words"]:
        others, control = words["others"], words["control"]
        beside = f"; of words nobody trained on {100 * control['value']:.1f} %" if control else ""
        said.append(
            f"of {words['words']} words that one client alone has and the base does not suggest, "
            f"another client's model suggests "
            f"{100 * others['value']:.1f} % ({100 * others['low']:.1f} to "
            f"{100 * others['high']:.1f} %){beside}."
        )
    return [sentence[0].upper() + sentence[1:] for sentence in said]


def terminal(found: Json) -> list[Table]:
    """Return tables that fit a terminal of 80 characters."""
    first = Table(box=SIMPLE, pad_edge=False, width=WIDTH)
    for k, name in enumerate(["", *(_of(name, found) for name in found["observers"]), "chance"]):
        first.add_column(name, justify="left" if k == 0 else "right", no_wrap=True)
    for line in rows(found):
        first.add_row(*line)
    tables = [first]
    if lines := word_rows(found):
        second = Table(box=SIMPLE, pad_edge=False, width=WIDTH)
        second.add_column(f"rare words among the first {found['settings']['top']} suggestions of")
        second.add_column("%", justify="right")
        for line in lines:
            second.add_row(*line)
        tables.append(second)
    return tables


def audited(found: Json | None) -> tuple[str, ...]:
    """Return the parts of the report's section; () without an audit."""
    if not found:
        return ()
    observers = list(found["observers"])
    first = table(["", *(_of(name, found) for name in observers), "by guessing"], rows(found))
    said = (
        '<ul class="notes">'
        + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(found))
        + "</ul>"
    )
    drawn = [captioned(title, told, picture) for title, told, picture in _pictures(found)]
    parts = [ABOUT, f"<p class=note>{escape(about(found))}</p>", said, chart.grid(drawn), first]
    words = found["words"]
    if words and words["examples"]:
        lines = [
            [f"… {e['prompt'].strip()}", e["word"], e["owner"], ", ".join(e["by"])]
            for e in words["examples"]
        ]
        parts += [
            EXAMPLES,
            table(["what was typed", "suggested", "only in the text of", "by the model of"], lines),
        ]
    return tuple(parts)


def _pictures(found: Json) -> list[tuple[str, str, str]]:
    """Return a title, what is told beside it, and a picture, of each measure."""
    observers, pictures = found["observers"], []

    def drawn(
        values: Mapping[str, Json], unit: str, limits: tuple[float, float], chance: float | None
    ) -> str:
        shown = {
            _of(name, found): Interval(
                v["value"],
                v["low"],
                v["high"],
                f"{_of(name, found)}: {_interval(v, 3)}",
                COLOURS[name],
            )
            for name, v in values.items()
        }
        return marks.intervals(shown, unit, limits, chance)

    if found["canaries"]:
        exposures = {name: own["canaries"]["exposure"] for name, own in observers.items()}
        first = next(iter(exposures.values()))
        pictures.append(
            (
                "Exposure of canaries",
                "",
                drawn(exposures, "bits", (0, first["most"]), first["chance"]),
            )
        )
    areas = {name: own["membership"]["auc"] for name, own in observers.items()}
    limits = (min(0.4, *(a["low"] for a in areas.values())), 1.0)
    pictures.append(
        (
            f"{found['data'].capitalize()} trained on, told from others",
            "",
            drawn(areas, "AUC", limits, 0.5),
        )
    )
    words = found["words"]
    if words and words["words"]:
        pictures.append(("Rare words of one client, suggested", "", _words(words)))
    return pictures


def _words(words: Json) -> str:
    names: Sequence[tuple[str, str, str]] = (
        ("others", "other clients' models", BLUE),
        ("shared", "shared part alone", GREEN),
        ("owner", "its own model", VERMILION),
        ("control", "not trained on", GREY),
    )
    shown = {
        name: Interval(
            100 * words[key]["value"],
            100 * words[key]["low"],
            100 * words[key]["high"],
            f"{name}: {_interval(words[key], 1, 100)} %",
            colour,
        )
        for key, name, colour in names
        if words[key] is not None
    }
    return marks.intervals(
        shown,
        "% among the suggestions",
        (0, max(1.05 * max(row.high for row in shown.values()), 1.0)),
    )
