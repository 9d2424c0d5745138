"""The text of one client alone, from its own files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data.chats.fields import ChatFields
from coterie.data.federation import ClientData, MakeSplit, federate
from coterie.data.folders import Folders, text_files
from coterie.data.splits import SPLITS, Tokens
from coterie.models.backbone import Backbone
from coterie.runs.problems.language import fitted
from coterie.runs.recipes.recipe import Recipe


def _files(section: Folders, data: Path) -> list[Path]:
    """Return the files of a text or of conversations. Raises DataError if there is none."""
    if not (paths := text_files(data, section.endings)):
        problem = f"{data}: no {'text' if section.content == 'text' else 'conversations'} in it"
        remedy = f"Name a file that ends in {', '.join(section.endings)}, or a folder of such."
        raise DataError(problem, remedy)
    return paths


def section_of(data: Any) -> Folders:
    """Return the section that reads a client's own files in a run with these data."""
    if isinstance(data, Folders):
        return data
    if not isinstance(data, ChatFields):
        return Folders(control_tokens=data.control_tokens)
    shared = ChatFields.model_fields.keys() & Folders.model_fields.keys()
    return Folders(**{name: getattr(data, name) for name in shared})


def own_text(
    section: Folders,
    tokenizer: Any,
    context: int,
    seed: int,
    id: ClientId,
    data: Path,
    otherwise: str = "",
) -> ClientData:
    """Return a client's text, from a file or folder, split as in a folder of clients. `seed` fixes
    the orders of all walks. Raises DataError, with `otherwise` as further advice, for no or too
    little text.
    """
    _files(section, data)
    parts = dict(zip(SPLITS, section.of_client(id).read_one(data), strict=True))
    arrays, make = _arrays(section, tokenizer, parts, context)
    tokens = {name: len(arrays[name]) for name in SPLITS}
    running = arrays.keys() == tokens.keys()  # otherwise documents, of which one will do
    needed = context + 1 if running else 1
    if min(tokens.values()) < needed:
        sizes = ", ".join(f"{count:,} for {name}" for name, count in tokens.items())
        raise DataError(
            f"{data}: too little text to train on and to judge by: tokens {sizes}, and each "
            f"needs {needed:,}",
            f"Give more text (to each split, if the folder has its own){otherwise}.",
        )
    return federate({id: arrays}, context, seed, str(data), make).clients[id]


def _arrays(
    section: Folders, tokenizer: Any, parts: Mapping[str, Sequence[str]], context: int
) -> tuple[dict[str, Tokens], MakeSplit]:
    """Return the arrays of some splits, and the function that makes splits of them."""
    encoder, arrays = section.encoder(tokenizer), dict[str, Tokens]()
    for name, texts in parts.items():
        arrays |= encoder.arrays(texts, name, context)
    return arrays, encoder.split


def text_of(
    recipe: Recipe, backbone: Backbone, id: ClientId, data: Path, trains: bool
) -> ClientData:
    """Return a client's text, read like a run's own: in splits if it trains, otherwise the whole in
    each. Raises DataError for too little text or tokens that the base lacks.
    """
    assert recipe.model.kind == "language"
    section, context, tokenizer = section_of(recipe.data), recipe.model.context, backbone.tokenizer
    if trains:
        text = own_text(section, tokenizer, context, recipe.seed, id, data, ", or give --no-train")
        return fitted(text, backbone)
    return whole_text(section, backbone, context, id, data)


def whole_text(
    section: Folders, backbone: Backbone, context: int, id: ClientId, data: Path
) -> ClientData:
    """Return the text of a file or folder, the whole in each split. Raises DataError."""
    documents = section.of_client(id).documents(_files(section, data))
    texts = [document.text for document in documents]
    arrays, make = _arrays(section, backbone.tokenizer, dict.fromkeys(SPLITS, texts), context)
    return fitted(ClientData(id, *(make(name, arrays, context, 0) for name in SPLITS)), backbone)
