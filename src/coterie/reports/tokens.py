"""Sample texts shaded by the weights of experts: rows are models, columns texts (CoMiGS, Fig. 3).

A token has the colour of the expert with the largest weight, stronger for larger weights: no colour
if all weights are equal, full colour if one expert has the whole weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from coterie.core.result import ClientResult, Mixture, Routing
from coterie.reports.parts import BLUE, GREEN, ORANGE, PINK, SKY, VERMILION, escape

GRID = 4  # clients whose texts all fit side by side; of more, two are chosen
SLOTS = ("first", "middle", "last")  # pages use their first letters
GENERALISTS = (
    (BLUE, "none"),
    (SKY, "overline"),
    (GREEN, "overline dotted"),
    (PINK, "overline double"),
)
SPECIALISTS = (
    (VERMILION, "underline"),
    (GREEN, "underline dotted"),
    (PINK, "underline double"),
    (ORANGE, "underline dashed"),
    (SKY, "underline wavy"),
)


@dataclass(frozen=True)
class Expert:
    """One expert of every block."""

    key: str  # `g0`, `g1`, ... for generalists, `s0`, ... for specialists
    name: str
    colour: str
    cue: str  # the CSS text decoration that tells it apart without colours


def experts(counts: Mixture | ClientResult) -> list[Expert]:
    """Return experts in the order of routing weights, generalists first, numbered if several."""
    kinds = {
        "generalist": (counts.generalists, GENERALISTS),
        "specialist": (counts.specialists, SPECIALISTS),
    }
    return [
        Expert(f"{kind[0]}{k}", kind if n == 1 else f"{kind} {k + 1}", *looks[k % len(looks)])
        for kind, (n, looks) in kinds.items()
        for k in range(n)
    ]


def routing(routing: Routing) -> str:
    """Return the selector, the legend and the pictures; "" if no model has a router."""
    if not routing.weights:
        return ""
    slots = {1: ("only",), 2: ("first", "last")}.get(len(routing.blocks or ()), SLOTS)
    mixtures = {i: experts(counts) for i, counts in routing.experts.items()}
    known = {expert.key: expert for mixture in mixtures.values() for expert in mixture}
    kinds = [known[key] for key in sorted(known)]
    cells = "".join(_row(i, routing, mixtures[i], slots) for i in routing.weights)
    heads = "".join(
        f'<div class="head">text of <b>{escape(text)}</b></div>' for text in routing.texts
    )
    many = " many" if max(len(routing.texts), len(routing.weights)) > GRID else ""
    return (
        f"<style>{_rules(kinds, slots)}</style>"
        f'<div class="routing{many}" data-slots="{",".join(slots)}"><div '
        f'class="controls">{_selector(slots, routing)}{_legend(kinds)}</div>'
        f'{_choices(routing)}<div class="wide"><div class="grid" '
        f'style="--texts:{len(routing.texts)}">'
        f'<div class="head"></div>{heads}{cells}</div></div></div>'
    )


def _rules(kinds: Sequence[Expert], slots: Sequence[str]) -> str:
    """Return CSS by which the chosen block decides which class of a token counts."""
    looks = {e: f"{{--c:{e.colour};text-decoration:{e.cue}}}" for e in kinds}
    rules = "".join(f".{e.key}{look}" for e, look in looks.items())
    for slot in slots:
        chosen = f".routing:has(#block-{slot}:checked)"
        rules += "".join(f"{chosen} .{slot[0]}{e.key}{look}" for e, look in looks.items())
        rules += f"{chosen} .text .t{{--k:var(--{slot[0]})}}"
        rules += f"{chosen} .share-{slot}{{display:flex}}"
    return rules


def _selector(slots: Sequence[str], routing: Routing) -> str:
    """Return radio buttons of the blocks; the last is chosen, where experts differ most."""
    buttons = "".join(
        f'<input type="radio" name="block" '
        f'id="block-{slot}"{" checked" if slot == slots[-1] else ""}>'
        f'<label for="block-{slot}">{slot} <small>({block + 1} of {routing.depth})</small></label>'
        for slot, block in zip(slots, routing.blocks or (), strict=True)
    )
    return f'<fieldset class="blocks"><legend>block</legend>{buttons}</fieldset>'


def _legend(kinds: Sequence[Expert]) -> str:
    items = "".join(f'<li><span class="t {e.key}">{escape(e.name)}</span></li>' for e in kinds)
    steps = "".join(f'<i class="t" style="--k:{k}"></i>' for k in range(0, 101, 25))
    shades = f'<span class="shades" aria-hidden="true">{steps}</span>'
    return f'<ul class="legend">{items}<li>equal weights {shades} one expert only</li></ul>'


def _choices(routing: Routing) -> str:
    """Return selectors of a model and a text, shown by a script if there is little room."""
    models, texts = (
        "".join(f'<option value="{escape(i)}">{escape(i)}</option>' for i in clients)
        for clients in (routing.weights, routing.texts)
    )
    return (
        '<div class="choices" hidden><label>model of '
        f'<select class="model">{models}</select></label> <label>beside its own text, that of '
        f'<select class="text-of">{texts}</select></label></div>'
    )


def _row(model: str, routing: Routing, mixture: Sequence[Expert], slots: Sequence[str]) -> str:
    cells = "".join(_picture(model, text, routing, mixture, slots) for text in routing.texts)
    return f'<div class="side"><span>model of <b>{escape(model)}</b></span></div>{cells}'


def _picture(
    model: str, text: str, routing: Routing, mixture: Sequence[Expert], slots: Sequence[str]
) -> str:
    weights = routing.weights[model][text]
    spans = "".join(
        _token(piece, [block[k] for block in weights], mixture, slots)
        for k, piece in enumerate(routing.texts[text])
    )
    of_slots = zip(slots, weights, strict=True)
    shares = "".join(_shares(block, mixture, slot) for slot, block in of_slots)
    title = f"model of {model}, {'own text' if model == text else f'text of {text}'}"
    return (
        f'<div class="cell{" own" if model == text else ""}" data-model="{escape(model)}" '
        f'data-text="{escape(text)}" '
        f'data-experts="{escape("|".join(e.name for e in mixture))}" '
        f'data-colours="{"|".join(e.colour for e in mixture)}">'
        f'<h4>{escape(title)}</h4><p class="text" role="group" '
        f'aria-label="{escape(title)}">{spans}</p>{shares}</div>'
    )


def _token(
    piece: str, weights: Sequence[Sequence[float]], mixture: Sequence[Expert], slots: Sequence[str]
) -> str:
    top, full = [], []
    for slot, w in zip(slots, weights, strict=True):
        top.append(slot[0] + mixture[w.index(max(w))].key)
        full.append(f"--{slot[0]}:{100 * lead(w):.0f}")
    permille = ";".join(",".join(f"{1000 * value:.0f}" for value in w) for w in weights)
    shown = piece.replace("\r\n", "\n").replace("\n", "↵\n")
    look = f'class="t {" ".join(top)}" style="{";".join(full)}" data-w="{permille}"'
    return f"<span {look}>{escape(shown)}</span>"


def lead(weights: Sequence[float]) -> float:
    """Return how far the largest weight is above an equal share: 0 if all are equal, at most 1."""
    alike = 1 / len(weights)
    return max(0.0, (max(weights) - alike) / (1 - alike)) if len(weights) > 1 else 1.0


def _shares(block: Sequence[Sequence[float]], mixture: Sequence[Expert], slot: str) -> str:
    """Return the mean weight of each expert, as a bar and in words."""
    shares = list(zip(mixture, map(fmean, zip(*block, strict=True)), strict=True))
    parts = "".join(
        f'<i style="flex:{share:.3f};background:{e.colour}"></i>' for e, share in shares if share
    )
    words = ", ".join(f"{e.name} {100 * share:.0f} %" for e, share in shares)
    mix = f'<span class="mix" aria-hidden="true">{parts}</span>'
    return f'<div class="share share-{slot}">{mix}<small>{escape(words)}</small></div>'
