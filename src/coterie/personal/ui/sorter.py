"""A local web page for classifiers: it shows what each client's model predicts."""

import html
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from coterie.core.errors import DataError
from coterie.core.printing import printable
from coterie.models.networks import NetworkShape
from coterie.models.text import TextShape
from coterie.personal.classifier import PersonalClassifier
from coterie.personal.ui import page

# the probability of each class, the chosen expert, and the experts to choose from
Answer = tuple[dict[str, float], str, str]
Shown = tuple[dict[str, float], str]
SHOWN = 3  # classes for each client
STYLE = """
.expert { min-width: 9rem !important; align-self: center }
#image img { width: 100%; height: 100%; object-fit: contain; image-rendering: pixelated }
@media (max-width: 640px) { .client { flex: 1 0 100% !important } }
"""


def sorter(models: Mapping[str, PersonalClassifier]) -> Any:
    """Return the page of classifiers, all of images or all of texts: a Gradio `Blocks` that is not
    started yet. Raises Refused without Gradio.
    """
    gradio = page.gradio()
    shape = next(iter(models.values())).shape

    def classify(given: str | None) -> list[Any]:
        if not given or not given.strip():
            return hidden() * len(models)
        try:
            groups = grouped({client: _answer(model, given) for client, model in models.items()})
        except DataError as error:
            raise gradio.Error(html.escape(printable(str(error))), print_exception=False) from None
        return [
            value
            for client in models
            for value in (shown(*groups[client]) if client in groups else hidden())
        ]

    def hidden() -> list[Any]:
        return [gradio.Row(visible=False), "", None, ""]

    def shown(clients: list[str], answer: Shown) -> list[Any]:
        return [gradio.Row(visible=True), page.plain(", ".join(clients)), *answer]

    with gradio.Blocks(title="coterie", analytics_enabled=False) as blocks:
        gradio.Markdown(f"## How does each client classify it?\n{_instruction(shape)}")
        if isinstance(shape, TextShape):
            given = gradio.Textbox(label="Text", lines=3, autofocus=True, elem_id="text")
        else:
            # without a mode Gradio does not convert the file
            given = gradio.Image(
                label="Image",
                type="filepath",
                image_mode=None,
                sources=["upload"],
                height=220,
                elem_id="image",
            )
        answers: list[Any] = []
        for client in models:
            with gradio.Row(visible=False) as row:
                answers += [row, gradio.Markdown(page.plain(client), elem_classes="client")]
                answers.append(
                    gradio.Label(
                        show_label=False,
                        show_heading=False,
                        num_top_classes=SHOWN,
                        elem_classes="answer",
                        scale=3,
                    )
                )
                answers.append(gradio.Markdown(elem_classes="expert"))
        given.change(classify, given, answers, trigger_mode="always_last", **page.QUIET)
    return blocks


def served(models: Mapping[str, PersonalClassifier], port: int) -> AbstractContextManager[str]:
    """Serve the page on this machine only, see `page.served`."""
    return page.served(sorter(models), STYLE, port)


def grouped(answers: Mapping[str, Answer]) -> dict[str, tuple[list[str], Shown]]:
    """Group clients whose shown answers are equal: by the first client of a group, all its clients
    and their answer. Clients with the same chosen expert have the same answer, whatever other
    experts they have; the other experts are named if all clients of the group have the same.
    """
    groups: dict[Any, dict[str, Answer]] = {}
    for client, answer in answers.items():
        classes, expert, _ = answer
        seen = tuple((name, round(share, 2)) for name, share in sorted(classes.items())), expert
        groups.setdefault(seen, {})[client] = answer
    rows = {}
    for group in groups.values():
        (classes, expert, among), *others = group.values()
        rows[next(iter(group))] = (
            list(group),
            (classes, expert + among * all(held == among for _, _, held in others)),
        )
    return rows


def _answer(model: PersonalClassifier, given: str) -> Answer:
    """Return the probability of each class, and the expert that the gate scores highest."""
    (batch,) = model.batches(given)
    outputs, experts = model.answer(batch.x)
    classes = dict(zip(map(printable, model.about.names), outputs[0].exp().tolist(), strict=True))
    return (
        (classes, "", "")
        if experts is None
        else (classes, f"expert **{experts.item()}**", f" of {', '.join(map(str, model.experts))}")
    )


def _instruction(shape: NetworkShape | TextShape) -> str:
    """Return the instruction for the user."""
    if isinstance(shape, TextShape):
        return "Type a text."
    _, height, width = shape.inputs
    return f"Choose an image of height {height} and width {width} pixels."
