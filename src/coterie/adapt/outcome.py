"""What a new client of a run of language models is told: that it has the shared part alone, or
what its own training gave.
"""

from coterie.adapt.personalisation import Personalised
from coterie.reports.parts import figure


def sentences(client: str, found: Personalised | None) -> list[str]:
    """Say what a client has, what it was before and after, and whether that was worth it.

    Args:
        client: Who, as it can be printed.
        found: What training gave; None where nothing was trained.
    """
    if found is None:
        return [
            f"{client}: nothing was personalised. The model is the shared part alone. To train on "
            f"this text: --train."
        ]
    tokens = found.tokens
    what = (
        "specialists and router; the shared part is unchanged"
        if found.own
        else "a copy of the shared part"
    )
    stopped = (
        ""
        if found.iterations == found.most
        else f", stopped after {found.iterations} of at most {found.most}"
    )
    test = f"Perplexity on {tokens['test']:,} tokens of test text"
    lines = [
        f"{client}: {tokens['train']:,} tokens of training text, {tokens['valid']:,} of "
        f"validation text; trained: {what}."
    ]
    before = f"{test}: {figure(found.before)} before, with the shared part alone"
    if not found.iteration:
        lines.append(
            f"{before} (the base: {figure(found.base)}); no iteration was better than that on "
            f"validation text{stopped}."
        )
        return [*lines, f"It did not help: the shared part alone is kept. {_remedy(found)}"]
    change = abs(found.after / found.before - 1)
    how = "lower" if found.after < found.before else "higher"
    lines.append(
        f"{before}, {figure(found.after)} after iteration {found.iteration}, {change:.1%} {how} "
        f"(the base: {figure(found.base)}){stopped}."
    )
    if not found.helped:
        return [
            *lines,
            f"It helped on validation text only, which may be chance: the shared part alone is "
            f"kept. "
            f"{_remedy(found)}",
        ]
    if found.base <= found.after:
        return [
            *lines,
            "It helped, and the personalised model is kept. But the base alone does as well on "
            "this text, or better.",
        ]
    return [*lines, "It helped: the personalised model is kept."]


def _remedy(found: Personalised) -> str:
    """Return what to do about training that did not help."""
    unlike = (
        "The base alone does better than the shared part: this text differs from the run's. "
        if found.base < found.before
        else ""
    )
    return f"{unlike}More text helps most."
