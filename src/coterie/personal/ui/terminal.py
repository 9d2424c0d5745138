"""Tables of several clients' suggestions or predictions in a terminal."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.core.printing import printable
from coterie.personal.classifier import Prediction
from coterie.personal.model import PersonalModel
from coterie.personal.word_search import Word


def show(
    console: Console,
    models: Mapping[str, PersonalModel],
    words: Mapping[str, Sequence[Word]],
    text: str,
) -> None:
    """Print a table of the next words of a text by client, with probabilities and experts."""
    console.print(Text(printable(f"{text.rstrip()} …", lines=True), style="italic"))
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("client", overflow="fold")
    for place in range(max(map(len, words.values()))):
        table.add_column(str(place + 1), overflow="fold")
    for client, suggestions in words.items():
        table.add_row(
            Text(printable(client)), *(_cell(models[client], word) for word in suggestions)
        )
    console.print(table)
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
    table = Table(box=SIMPLE, pad_edge=False)
    several = len(predictions) > 1
    gated = any(
        prediction.expert is not None
        for client_predictions in predictions.values()
        for prediction in client_predictions
    )
    for column in ["sample", *["client"] * several, "class"]:
        table.add_column(column, overflow="fold")
    for column in ["probability", *["expert"] * gated]:
        table.add_column(column, justify="right")
    for k, name in enumerate(names):
        for client, client_predictions in predictions.items():
            predicted = client_predictions[k]
            expert = ["" if predicted.expert is None else str(predicted.expert)] * gated
            cells = [
                name,
                *[client] * several,
                predicted.name,
                f"{predicted.probability:.1%}",
                *expert,
            ]
            table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
