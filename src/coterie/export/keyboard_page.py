"""The page of the browser's keyboard: static files for a graph and clients' tensors."""

import gzip
import html
import json
import lzma
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from coterie.core.files import write_atomically
from coterie.data.chats import ChatTemplate
from coterie.data.chats.messages import user
from coterie.data.text_encoding import TextEncoder
from coterie.export.chat_text import ChatText
from coterie.export.gguf import SAMPLE
from coterie.personal import ManyModels, PersonalModel
from coterie.personal.ui import keyboard, page
from coterie.personal.word_search import BEAM, PUNCTUATION, RARE, SPACES
from coterie.personal.words import LONGEST, NO_LETTERS, UNFINISHED, Words
from coterie.reports.parts import COLOURS

# The most tokens of context: every text of the search has a cache of its own.
CONTEXT = 256
# control tokens in a sample
TYPED = 8
# clients whose rows are shown at first; the user can choose the others
CHOSEN = 8
INDEX, SETTINGS, STYLE = "index.html", "page.json", "keyboard.css"
WASM = "ort-wasm-simd-threaded.wasm"
MESSAGE_BOX = """<label for="message">Message</label>
<textarea id="message" rows="2" autocomplete="off" spellcheck="false"></textarea>
"""
# the page and its worker can send requests only to the folder that they are in
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src blob: 'self'; "
    "connect-src 'self'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


def assets() -> Traversable:
    """Return the folder of the page's files in this package."""
    return files("coterie.export") / "web_page"


def write(
    folder: Path,
    clients: Mapping[str, PersonalModel],
    base: Sequence[str],
    caches: Sequence[Mapping[str, int]],
    chat: bool = False,
) -> None:
    """Write the page to the folder of a graph and the clients' tensors.

    Args:
        folder: The folder of the graph, the clients' tensors and the base's tokenizer.
        clients: Models by the names of their tensors' files, in the order of the rows.
        base: The files of the graph, the graph first.
        caches: The shape of each layer's cache: `heads`, `key`, `value`.
        chat: Whether the text is the answer to a message; the page then has a box for the message.

    Raises:
        DataError: The base has no chat template.
        Refused: The page could not write texts as the chat template does.
        SaveError: The page could not be written.
    """
    models = {model.about.client: model for model in clients.values()}
    graph = {"base": [*base], "caches": [*map(dict, caches)], "clients": _rows(clients)}
    first = next(iter(models.values()))
    settings = _settings(first) | graph
    if chat:
        settings["chat"] = ChatText.of(first.chats).to_json()
        settings["samples"] += _chat_samples(first.chats)
    contents = programs() | {
        INDEX: _index(models, chat).encode(),
        STYLE: (page.STYLE + keyboard.STYLE).encode(),
        SETTINGS: json.dumps(settings).encode(),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content, lasting=False)


def _rows(clients: Mapping[str, PersonalModel]) -> list[dict[str, Any]]:
    """Return the rows of the keyboard: one for each client, and one for the base, which has zeros
    in place of a client's tensors.
    """
    rows = [
        {
            "name": model.about.client,
            "file": file,
            "experts": model.experts if model.layout.routed else (),
            "chosen": place < CHOSEN,
        }
        for place, (file, model) in enumerate(clients.items())
    ]
    base = {"name": keyboard.BASE, "file": next(iter(clients)), "zero": True}
    return [*rows, base | {"experts": (), "chosen": True}]


def programs() -> dict[str, bytes]:
    """Return the files that are the same on every page, by name."""
    paths = [path for path in assets().iterdir() if path.name.endswith((".js", ".css"))]
    vendored = assets() / "vendor"
    paths += [path for path in vendored.iterdir() if path.name.endswith(".js")]
    contents = {path.name: path.read_bytes() for path in paths}
    wasm = lzma.decompress((vendored / f"{WASM}.xz").read_bytes())
    contents[f"{WASM}.gz"] = gzip.compress(wasm, 9, mtime=0)
    licences = (vendored / "licences").iterdir()
    return contents | {f"licences/{path.name}": path.read_bytes() for path in licences}


def _index(models: Mapping[str, PersonalModel], chat: bool) -> str:
    """Return the page's HTML."""
    texts = keyboard.MESSAGES if chat else keyboard.EXAMPLES
    offered = keyboard.most_disputed(ManyModels(models), texts, chat)
    button = '<button type="button" class="{}"{}>{}</button>'
    parts = {
        "policy": POLICY,
        "title": html.escape(keyboard.CHAT_TITLE if chat else keyboard.TITLE),
        "hint": html.escape(keyboard.HINT),
        "message": MESSAGE_BOX if chat else "",
        "text": "Answer" if chat else "Text",
        "examples": "\n".join(button.format("example", "", html.escape(one)) for one in offered),
        "legend": keyboard.legend(models),
        "words": button.format("word", " disabled", "…\n&nbsp;") * keyboard.SHOWN,
    }
    document = (assets() / INDEX).read_text(encoding="utf-8")
    for name, part in parts.items():
        document = document.replace(f"{{{name}}}", part)
    return document


def _settings(model: PersonalModel) -> dict[str, Any]:
    """Return the settings of the search: its rules and vocabulary, and the tokenizer's samples."""
    backbone, texts, tokenizer = model.backbone, model.texts, model.tokenizer
    words = Words(backbone, texts)
    return {
        "shown": keyboard.SHOWN,
        "colours": len(COLOURS),
        "rules": {
            "beam": BEAM,
            "rare": RARE,
            "longest": LONGEST,
            "unfinished": UNFINISHED,
            "spaces": SPACES,
            "punctuation": "".join(sorted(PUNCTUATION)),
            "noLetters": "".join(sorted(NO_LETTERS)),
        },
        "vocabulary": {
            "names": words.names,
            "first": words.first,
            "anchor": words.anchor,
            "context": min(backbone.context_limit, CONTEXT),
            "tidy": bool(tokenizer.clean_up_tokenization_spaces),
        },
        "texts": {
            "begin": texts.begin,
            "empty": texts.prompt(""),
            "controls": _controls(texts),
            "typed": texts.control_tokens,
        },
        "samples": [[text, texts.prompt(text)] for text in (*_samples(texts), *keyboard.EXAMPLES)],
    }


def _controls(texts: TextEncoder) -> list[str]:
    """Return all control tokens."""
    tokens: list[str] = texts.tokenizer.convert_ids_to_tokens(sorted(texts.special))
    return tokens


def _samples(texts: TextEncoder) -> tuple[str, ...]:
    """Return texts that tokenizers split in different ways, and where typed control tokens are not
    refused one that has some.
    """
    if texts.control_tokens == "refuse":
        return (SAMPLE,)
    return SAMPLE, f"{SAMPLE} {' '.join(_controls(texts)[:TYPED])} or so"


def _chat_samples(chats: ChatTemplate) -> list[tuple[str, list[int], str]]:
    """Return tuples of an answer, the tokens of its message and itself, and the message."""
    samples = _samples(chats.texts)
    return [
        (answer, chats.texts.prompt(chats.opened([user(message)], answer)), message)
        for message in (*samples, *keyboard.MESSAGES)
        for answer in ("", *samples)
    ]
