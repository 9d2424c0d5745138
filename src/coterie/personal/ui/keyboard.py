"""What the pages of language models show besides suggestions: titles, clients, and examples."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.core.foreign import read_text, yaml_of
from coterie.data.chats.messages import user
from coterie.data.chats.reading import Conversation
from coterie.data.section import Section
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal.loading import ManyModels
from coterie.personal.model import PersonalModel
from coterie.reports.parts import COLOURS
from coterie.reports.scores import made_of
from coterie.runs.folder.names import RECIPE
from coterie.runs.recipes import recipe as recipes

SHOWN = 3  # suggestions for each client
CHOSEN = 8  # clients that are shown at first
OFFERED = 4  # examples that are shown
EXAMPLES, MESSAGES = yaml_of(read_text(Path(__file__).with_name("examples.yaml"))).values()
BASE = "(the base, untrained)"  # no client's name contains brackets
TITLE, CHAT_TITLE = "What would each client write next?", "What would each client answer?"
_ON_DISK = ("folders", "table", "stdlib")  # kinds of data that are files of this machine
_OF_EACH = 2  # examples from a client's own texts
_LONGEST = 60  # characters of an example
_FOUR_WORDS = re.compile(r"\b[^\W\d_]\w*(?: [\w'\u2019-]+){3}")


def assets() -> Traversable:
    """Return the folder of the page's files in this package."""
    return files("coterie.personal.ui") / "web"


def settings(
    models: Mapping[str, PersonalModel], examples: Sequence[str], chat: bool
) -> dict[str, Any]:
    """Return what the page shows of the models, the base as the last, and the examples."""
    clients = [
        {
            "name": client,
            "experts": model.experts if model.layout.routed else (),
            "shares": made_of(model.shares),
            "chosen": place < CHOSEN or client == BASE,
        }
        for place, (client, model) in enumerate(models.items())
    ]
    title = CHAT_TITLE if chat else TITLE
    return {
        "title": title,
        "shown": SHOWN,
        "colours": len(COLOURS),
        "clients": clients,
        "examples": examples,
    }


def opening(models: ManyModels, message: str, text: str) -> str:
    """Return a message and the answer so far, by the chat template. Raises DataError without."""
    return models.chats.opened([user(message)], text)


def with_base(models: Mapping[str, PersonalModel]) -> dict[str, PersonalModel]:
    """Return the models, and the untrained base: a model whose adapter has zero updates."""
    first = next(iter(models.values()))
    layout = Layout(specialists=0, rank=1)
    base = PersonalModel(
        LanguageModel(first.backbone, layout), replace(first.about, client=BASE, layout=layout)
    )
    return {**models, BASE: base}


def offered(models: ManyModels, chat: bool, of_clients: Sequence[str] = ()) -> list[str]:
    """Return the examples to show: the clients' own, and if these are too few, general ones."""
    texts = most_disputed(models, of_clients, chat) if of_clients else []
    missing = OFFERED - len(texts)
    general = MESSAGES if chat else EXAMPLES
    return [*texts, *most_disputed(models, general, chat)[:missing]]


def most_disputed(models: ManyModels, texts: Sequence[str], chat: bool = False) -> list[str]:
    """Return the texts, or messages, after which clients' next words differ most, those first."""
    words = {
        text: {
            word.word
            for suggestions in models.next_words(
                opening(models, text, "") if chat else text, 1
            ).values()
            for word in suggestions
        }
        for text in texts
    }
    return sorted(texts, key=lambda text: -len(words[text]))[:OFFERED]


def own_examples(run: Path, clients: Sequence[str], chat: bool) -> list[str]:
    """Return beginnings of the clients' test texts, or messages that they have answered there, if
    the data of their run are files of this machine and can be read.
    """
    folder = run if (run / RECIPE).is_file() else run.parent.parent
    try:
        data = recipes.resolve(folder).data
        if not isinstance(data, Section) or getattr(data, "kind", "") not in _ON_DISK:
            return []
        if chat != (getattr(data, "content", "text") == "chats"):
            return []
        texts = data.source().read()
    except (CoterieError, OSError):
        return []
    find = _messages if chat else _beginnings
    each = [islice(find(texts[client][-1]), _OF_EACH) for client in clients if client in texts]
    return list(dict.fromkeys(example for of_client in each[:CHOSEN] for example in of_client))


def _beginnings(documents: Sequence[str]) -> Iterator[str]:
    """Yield four words in a row of each document."""
    for document in documents:
        if (match := _FOUR_WORDS.search(document)) and len(match[0]) <= _LONGEST:
            yield match[0]


def _messages(documents: Sequence[str]) -> Iterator[str]:
    """Yield the first message of the user of each conversation, unless it is long."""
    for document in documents:
        conversation = Conversation.of_document(document)
        said_first = conversation.text or [
            message["content"] for message in conversation.messages if message["role"] == "user"
        ]
        if said_first and 0 < len(said_first[0].strip()) <= _LONGEST:
            yield said_first[0].strip()
