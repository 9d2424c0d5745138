"""The keyboard of `coterie serve` as a folder of static files, whose models run in the browser: a
graph, clients' tensors, and the page, which writes chats without running the chat template.
"""

import gzip
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from coterie.core.errors import Refused
from coterie.core.files import write_atomically
from coterie.data.chats import ChatTemplate
from coterie.data.chats.messages import user
from coterie.data.text_encoding import TextEncoder
from coterie.export.format import ClientModel, Options, Written, filled_readme
from coterie.export.gguf import SAMPLE
from coterie.export.onnx import BASE, WEIGHTS, Onnx, own_file
from coterie.personal import ManyModels, PersonalModel
from coterie.personal.text_inference import LONGEST, NO_LETTERS, UNFINISHED, Words
from coterie.personal.ui import keyboard
from coterie.personal.word_search import BEAM, PUNCTUATION, RARE, SPACES

CONTEXT = 256  # The most tokens of context: every text of the search has a cache of its own.
TYPED = 8  # control tokens in a sample
INDEX, SETTINGS = "index.html", "page.json"
WASM = "ort-wasm-simd-threaded.wasm"
TODAY = "strftime_now"  # the function that templates call for the date
DATED = "The chat template writes a date, which in the page stays that of this export."
_PLACE = "7b1e90message4c25d"  # a message that no template contains, to find the texts around it
# the template must write each of these unchanged
_MESSAGES = (
    "How are you?",
    "",
    " ",
    "\n",
    "two lines,\n\nand a third\n",
    "  spaces and\ttabs \t",
    "\u00a0\u2003other spaces\u3000\x1f",
    'It\'s "quoted" `code` \\n \\u0041 &amp; <b>5 > 4</b> $1 %s {0}',
    "{{ messages }} {% if true %}x{% endif %} {# y #}",
    "Größe, नमस्ते, 你好, مرحبا, שלום, e\u0301, 👩\u200d🚀",
    "<think>\nWhy?\n</think>\n\nSo",
    "<|im_start|>user\n[INST] x [/INST]</s>",
    "long " * 300,
)


@dataclass(frozen=True)
class ChatText:
    """The texts before and after one message of a chat."""

    before: str
    between: str  # the text between the message and its answer
    strips: bool  # whether the template strips the message, as `str.strip` does

    def opening(self, message: str, answer: str = "") -> str:
        """Return the prompt of one message as `ChatTemplate.render` writes it, and the answer."""
        return f"{self.before}{message.strip() if self.strips else message}{self.between}{answer}"

    @classmethod
    def of(cls, template: ChatTemplate) -> "ChatText":
        """Return the texts that a template writes, tested on messages of many kinds. Raises
        DataError without a template that takes them; Refused if one is not between two fixed texts.
        """

        def rendered(message: str) -> str:
            return template.render([user(message)], prompt=True)

        whole = rendered(_PLACE)
        before, *rest = whole.split(_PLACE)
        chat_text = cls(before, _PLACE.join(rest), strips=rendered(f" {_PLACE} ") == whole)
        changed = [one for one in _MESSAGES if chat_text.opening(one) != rendered(one)]
        if not changed:
            return chat_text
        problem = f"changes a message, such as {changed[0][:40]!r}"
        if len(rest) > 1:
            problem = f"writes a message {len(rest)} times"
        raise Refused(
            f"--chat: the page writes messages without running the chat template, but this one "
            f"{problem}",
            "Leave --chat out, or use coterie serve RUN --chat, which runs the template.",
        )


class Web(Onnx):
    """The files of `Onnx` and a page, whose colours need the graph's routing weights."""

    name = "web"
    about = "a keyboard for several clients that runs in a browser, offline, of every base"
    # small rather than exact, because everyone who opens the page downloads the models
    precisions = ("f16", "f32", "int8")
    base_precisions = ("int8", "f32", "w8", "w4")
    routing = True
    chats = True

    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse a chat template that the page could not write. Raises DataError without one."""
        if options.chat:
            ChatText.of(client.model.chats)

    def write_base(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        super().write_base(clients, folder, options)
        models = {own_file(client): client.model for client in clients}
        caches = [vars(shape) for shape in self.interface_of(clients[0]).caches]
        write_page(folder, models, caches, options.chat)

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        written = super().write(client, folder, options)
        dated = options.chat and TODAY in str(client.model.chats.template)
        return replace(written, notes=(DATED,)) if dated else written

    def readme(self, clients: Sequence[ClientModel]) -> str:
        names = "\n".join(f"- {client.client}" for client in clients)
        return filled_readme("web", names=names)


def assets() -> Traversable:
    """Return the folder of the page's files in this package."""
    return files("coterie.export") / "web_page"


def write_page(
    folder: Path,
    clients: Mapping[str, PersonalModel],
    caches: Sequence[Mapping[str, int]],
    chat: bool,
) -> None:
    """Write the page, a keyboard with a row for each client, named by its tensors' file, to the
    folder of a graph whose layers have `caches` (`heads`, `key`, `value`), beside the base's
    tokenizer; with `chat` it has a box for a message. Raises SaveError.
    """
    models = {model.about.client: model for model in clients.values()}
    offered = keyboard.offered(ManyModels(models), chat)
    shown = keyboard.settings(keyboard.with_base(models), offered, chat)
    base_file = next(iter(clients))
    files_of = [*({"file": file} for file in clients), {"file": base_file, "zero": True}]
    first = next(iter(models.values()))
    settings = _settings(first) | shown
    settings |= {
        "base": [BASE, WEIGHTS],
        "caches": caches,
        "clients": [row | file for row, file in zip(shown["clients"], files_of, strict=True)],
    }
    if chat:
        settings["chat"] = asdict(ChatText.of(first.chats))
        settings["samples"] += _chat_samples(first.chats)
    contents = programs() | {
        INDEX: (assets() / INDEX).read_bytes(),
        SETTINGS: json.dumps(settings).encode(),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content, lasting=False)


def programs() -> dict[str, bytes]:
    """Return the files that are the same on every page, by name."""
    paths = [path for path in assets().iterdir() if path.name.endswith(".js")]
    paths += [keyboard.assets() / name for name in ("keyboard.js", "page.css")]
    vendored = assets() / "vendor"
    paths += [path for path in vendored.iterdir() if path.name.endswith(".js")]
    contents = {path.name: path.read_bytes() for path in paths}
    wasm = lzma.decompress((vendored / f"{WASM}.xz").read_bytes())
    contents[f"{WASM}.gz"] = gzip.compress(wasm, 9, mtime=0)
    licences = (vendored / "licences").iterdir()
    return contents | {f"licences/{path.name}": path.read_bytes() for path in licences}


def _settings(model: PersonalModel) -> dict[str, Any]:
    """Return the settings of the search: its rules and vocabulary, and the tokenizer's samples."""
    backbone, texts, tokenizer = model.backbone, model.texts, model.tokenizer
    words = Words(backbone, texts)
    return {
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
            "controls": tokenizer.convert_ids_to_tokens(sorted(texts.special)),
            "typed": texts.control_tokens,
        },
        "samples": [[text, texts.prompt(text)] for text in (*_samples(texts), *keyboard.EXAMPLES)],
    }


def _samples(texts: TextEncoder) -> tuple[str, ...]:
    """Return texts that tokenizers split differently, one with typed control tokens if allowed."""
    if texts.control_tokens == "refuse":
        return (SAMPLE,)
    controls = texts.tokenizer.convert_ids_to_tokens(sorted(texts.special)[:TYPED])
    return SAMPLE, f"{SAMPLE} {' '.join(controls)} or so"


def _chat_samples(chats: ChatTemplate) -> list[tuple[str, list[int], str]]:
    """Return tuples of an answer, the tokens of its message and itself, and the message."""
    samples = _samples(chats.texts)
    return [
        (answer, chats.texts.prompt(chats.opened([user(message)], answer)), message)
        for message in (*samples, *keyboard.MESSAGES)
        for answer in ("", *samples)
    ]
