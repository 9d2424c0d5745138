"""Messages to a new client of a run of language models: that it has the shared part alone, or the
effect of its own training.
"""

from coterie.adapt.personalisation import Personalised
from coterie.reports.parts import figure


def sentences(client: str, result: Personalised | None) -> list[str]:
    """Describe a client's model before and after training, and whether the training helped.

    Args:
        client: The client's id, as it can be printed.
        result: The effect of the training; None if nothing was trained.
    """
    if result is None:
        return [
            f"{client}: nothing was personalised. The model is the shared part alone. To train on "
            f"this text: --train."
        ]
    tokens = result.tokens
    what = (
        "specialists and router; the shared part is unchanged"
        if result.own
        else "a copy of the shared part"
    )
    stopped = (
        ""
        if result.iterations == result.most
        else f", stopped after {result.iterations} of at most {result.most}"
    )
    test = f"Perplexity on {tokens['test']:,} tokens of test text"
    lines = [
        f"{client}: {tokens['train']:,} tokens of training text, {tokens['valid']:,} of "
        f"validation text; trained: {what}."
    ]
    before = f"{test}: {figure(result.before)} before, with the shared part alone"
    if not result.iteration:
        lines.append(
            f"{before} (the base: {figure(result.base)}); no iteration was better than that on "
            f"validation text{stopped}."
        )
        return [*lines, f"It did not help: the shared part alone is kept. {_remedy(result)}"]
    change = abs(result.after / result.before - 1)
    how = "lower" if result.after < result.before else "higher"
    lines.append(
        f"{before}, {figure(result.after)} after iteration {result.iteration}, {change:.1%} {how} "
        f"(the base: {figure(result.base)}){stopped}."
    )
    if not result.helped:
        return [
            *lines,
            f"It helped on validation text only, which may be chance: the shared part alone is "
            f"kept. "
            f"{_remedy(result)}",
        ]
    if result.base <= result.after:
        return [
            *lines,
            "It helped, and the personalised model is kept. But the base alone does as well on "
            "this text, or better.",
        ]
    return [*lines, "It helped: the personalised model is kept."]


def _remedy(result: Personalised) -> str:
    """Return advice for training that did not help."""
    unlike = (
        "The base alone does better than the shared part: this text differs from the run's. "
        if result.base < result.before
        else ""
    )
    return f"{unlike}More text helps most."
