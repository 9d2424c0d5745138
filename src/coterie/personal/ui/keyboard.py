"""A local web page like a phone's keyboard: it shows each client's next words."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from coterie.core.printing import printable
from coterie.data.chats.messages import user
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal.many import ManyModels
from coterie.personal.model import PersonalModel
from coterie.personal.ui import page
from coterie.reports.mixtures import made_of
from coterie.reports.parts import COLOURS

SHOWN = 3  # suggestions for each client
OFFERED = 4  # examples that are shown
EXAMPLES = (
    "In my free time, I like to",
    "The weather",
    "Yesterday I",
    "The first thing to do is",
    "Returns the",
    "A new",
    "It was found that",
    "My favourite",
)
MESSAGES = (
    "How are you?",
    "What should I do in my free time?",
    "What is this about?",
    "Can you help me?",
    "Tell me something new.",
    "Why is that?",
)
BASE = "(the base, untrained)"  # no client's name contains brackets
TITLE, CHAT_TITLE = "What would each client write next?", "What would each client answer?"
HINT = "Type, choose a word, or start with an example."
RESTART = "Begin again with the first weights"
FOCUS = """() => setTimeout(() => {
  const box = document.querySelector("#text textarea");
  box.focus(); box.setSelectionRange(box.value.length, box.value.length) }, 0)"""
STYLE = """
.word { display: block !important; min-width: 6rem !important; white-space: pre-line !important;
  line-height: 1.35;
  border: 2px solid #808080; border-left-width: 8px;
  font-size: .8rem; font-weight: 400; padding: .35rem .7rem;
  color: var(--body-text-color) !important;
  background: var(--block-background-fill) !important }
.word::first-line { font-size: 1.15rem; font-weight: 600 }
.word:hover, .word:focus-visible { background: var(--background-fill-secondary) !important;
  outline: 2px solid var(--body-text-color) }
@media (max-width: 640px) {
  .client { flex: 1 0 100% !important }
  .word { flex: 1 1 28% !important; min-width: 28% !important; padding: .35rem .15rem;
    overflow-wrap: anywhere }
  .word::first-line { font-size: .9rem }
  .example { flex: 1 1 45% !important; min-width: 45% !important }
}
.client p + p { font-weight: 400; font-size: .8rem }
.legend span { display: inline-block; margin-right: 1.4rem }
.legend i { display: inline-block; width: .9rem; height: .9rem; border-radius: 2px;
  margin-right: .45rem; vertical-align: -.12rem }
""" + "".join(
    f".word.expert{j} {{ border-color: {colour} }}\n.legend .expert{j} {{ background: {colour} }}\n"
    for j, colour in enumerate(COLOURS)
)


def keyboard(models: Mapping[str, PersonalModel], chat: bool = False) -> Any:
    """Return the page, a Gradio `Blocks` that is not started yet, with a row for each model. With
    `chat`, another field has the message that the text answers. Raises Refused without Gradio, and
    DataError without a chat template.
    """
    gradio = page.gradio()
    offers = MESSAGES if chat else EXAMPLES
    examples = most_disputed(ManyModels(models), offers, chat)
    models = with_base(models)
    together = ManyModels(models)
    followed: list[Any] = [model for model in models.values() if model.following]

    def suggest(text: str, message: str = "", reset: bool = False) -> list[Any]:
        for model in followed:
            if reset:
                model.following.reset()
            model.observe(message, text, growing=True)
        suggestions = together.next_words(
            _opening(together, message, text) if chat else text, SHOWN
        )
        inserts = [[word.insert for word in words] for words in suggestions.values()]
        return [
            (text, inserts),
            *map(described, models),
            *(
                button
                for client, words in suggestions.items()
                for button in buttons(models[client], words)
            ),
        ]

    def described(client: str) -> str:
        shares = models[client].shares
        return page.plain(client) + (f"\n\n{page.plain(made_of(shares))}" if shares else "")

    def buttons(model: PersonalModel, words: list[Any]) -> list[Any]:
        shown = [
            gradio.Button(
                _label(model, word), elem_classes=["word", _style(model, word)], visible=True
            )
            for word in words
        ]
        return shown + [gradio.Button(visible=False)] * (SHOWN - len(words))

    def append(row: int, place: int) -> Any:
        def clicked(text: str, suggested: tuple[str, list[list[str]]]) -> str:
            seen, inserts = suggested
            # if the text has changed, its new suggestions are not shown yet
            return text if text != seen else text + inserts[row][place]

        return clicked

    with gradio.Blocks(title="coterie", analytics_enabled=False) as blocks:
        gradio.Markdown(f"## {CHAT_TITLE if chat else TITLE}\n{HINT}")
        message = gradio.Textbox(label="Message", lines=2, elem_id="message", visible=chat)
        text = gradio.Textbox(
            label="Answer" if chat else "Text", lines=3, autofocus=True, elem_id="text"
        )
        with gradio.Row():
            offered = [
                gradio.Button(example, size="sm", elem_classes="example") for example in examples
            ]
        state = gradio.State(("", []))
        rows: list[list[Any]] = []
        titles = []
        for client in models:
            with gradio.Row():
                titles.append(gradio.Markdown(described(client), elem_classes="client"))
                rows.append(
                    [gradio.Button("…", elem_classes="word", visible=True) for _ in range(SHOWN)]
                )
        gradio.HTML(legend(models))
        restart = gradio.Button(RESTART, size="sm", visible=bool(followed))
        everything = [state, *titles, *(button for row in rows for button in row)]
        written = [text, message] if chat else [text]
        blocks.load(suggest, written, everything, **page.QUIET)
        restart.click(partial(suggest, reset=True), written, everything, **page.QUIET)
        for box in written:
            box.change(suggest, written, everything, trigger_mode="always_last", **page.QUIET)
        for i, row in enumerate(rows):
            for place, button in enumerate(row):
                button.click(append(i, place), [text, state], text, **page.QUIET).then(
                    None, js=FOCUS
                )
        for button, example in zip(offered, examples, strict=True):
            button.click(partial(str, example), None, written[-1], **page.QUIET).then(
                None, js=FOCUS
            )
    return blocks


def _opening(models: ManyModels, message: str, text: str) -> str:
    """Return a message and the answer so far, by the chat template."""
    return models.chats.opened([user(message)], text)


def with_base(models: Mapping[str, PersonalModel]) -> dict[str, PersonalModel]:
    """Return the models, and the untrained base: a model whose adapter has zero updates."""
    first = next(iter(models.values()))
    layout = Layout(specialists=0, rank=1)
    base = PersonalModel(
        LanguageModel(first.backbone, layout), replace(first.about, client=BASE, layout=layout)
    )
    return {**models, BASE: base}


def most_disputed(models: ManyModels, texts: Sequence[str], chat: bool = False) -> list[str]:
    """Return the texts, or messages, after which clients' next words differ most, those first."""
    words = {
        text: {
            word.word
            for suggestions in models.next_words(
                _opening(models, text, "") if chat else text, 1
            ).values()
            for word in suggestions
        }
        for text in texts
    }
    return sorted(texts, key=lambda text: -len(words[text]))[:OFFERED]


def served(
    models: Mapping[str, PersonalModel], port: int, chat: bool = False
) -> AbstractContextManager[str]:
    """Serve the page on this machine only, see `page.served`."""
    return page.served(keyboard(models, chat), STYLE, port)


def _label(model: PersonalModel, word: Any) -> str:
    speaker = model.speaker(word)
    by = f" · {speaker} {max(word.experts):.0%}" if speaker else ""
    return f"{printable(word.word)}\n{word.probability:.1%}{by}"


def _style(model: PersonalModel, word: Any) -> str:
    return (
        f"expert{model.experts.index(model.speaker(word)) % len(COLOURS)}"
        if word.experts
        else "unrouted"
    )


def legend(models: Mapping[str, PersonalModel]) -> str:
    """Return the HTML legend of letters and colours, for the client with the most experts."""
    routed = [model for model in models.values() if model.layout.routed and model.experts]
    if not routed:
        return "<p>Below each word: its probability. These models have no router.</p>"
    model = max(routed, key=lambda model: model.layout.experts)
    kinds = {"G": "generalist, shared with the others", "S": "specialist, the client's own"}
    keys = "".join(
        f'<span><i class="expert{j % len(COLOURS)}"></i><b>{name}</b> {kinds[name[0]]}</span>'
        for j, name in enumerate(model.experts)
    )
    return (
        f'<div class="legend"><p>{keys}</p><p>Below each word: its probability, and the expert '
        f"with the largest routing weight where "
        "the word was chosen, with that weight (mean over all blocks).</p></div>"
    )
