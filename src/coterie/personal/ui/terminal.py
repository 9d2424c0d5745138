"""Tables of several clients' suggestions or predictions in a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from coterie.core.printing import printable
from coterie.personal.classifier import Prediction
from coterie.personal.model import PersonalModel
from coterie.personal.word_search import Word
from coterie.reports.tables import fitted


def show(
    console: Console,
    models: Mapping[str, PersonalModel],
    words: Mapping[str, Sequence[Word]],
    text: str,
) -> None:
    """Print a table of the next words of a text by client, with probabilities and experts."""
    console.print(Text(printable(f"{text.rstrip()} …", lines=True), style="italic"))
    header = ["client", *map(str, range(1, 1 + max(map(len, words.values()))))]
    lines: list[list[str | Text]] = [
        [client, *(_cell(models[client], word) for word in of), *[""] * (len(header) - 1 - len(of))]
        for client, of in words.items()
    ]
    console.print(fitted("", header, lines, console.width, range(len(header))))
    if any(word.experts for suggestions in words.values() for word in suggestions):
        console.print(
            "G generalist, S specialist: the expert with the largest routing weight where the "
            "word was chosen (mean over all blocks).",
            highlight=False,
        )


def _cell(model: PersonalModel, word: Word) -> Text:
    speaker = model.speaker(word)
    return Text.assemble(
        (printable(word.word), "bold"),
        f" {word.probability:.1%}" + (f" {speaker}" if speaker else ""),
    )


def show_classes(
    console: Console, names: Sequence[str], predictions: Mapping[str, Sequence[Prediction]]
) -> None:
    """Print a table of predictions by sample, in the given order, and client."""
    several = len(predictions) > 1
    gated = any(one.expert is not None for of in predictions.values() for one in of)
    header = ["sample", *["client"] * several, "class", "probability", *["expert"] * gated]
    lines = [
        [
            name,
            *[client] * several,
            of[k].name,
            f"{of[k].probability:.1%}",
            *["" if of[k].expert is None else str(of[k].expert)] * gated,
        ]
        for k, name in enumerate(names)
        for client, of in predictions.items()
    ]
    console.print(fitted("", header, lines, console.width, range(2 + several)))
