"""The text of one client alone, from its own files."""

from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data.federation import ClientData, federate
from coterie.data.folders import ENDINGS, Folders, text_files
from coterie.data.splits import SPLITS
from coterie.data.store import encode


def files_of_text(data: Path) -> list[Path]:
    """Return the files of a text, at least one. Raises DataError."""
    if not (found := text_files(data)):
        raise DataError(
            f"{data}: no text in it",
            f"Name a file that ends in {', '.join(ENDINGS)}, or a folder of such.",
        )
    return found


def own_text(
    section: Folders,
    tokenizer: Any,
    context: int,
    seed: int,
    id: ClientId,
    data: Path,
    otherwise: str = "",
) -> ClientData:
    """Return the text of a client as it would be split in a folder of clients.

    Args:
        section: Says how texts are read and split.
        tokenizer: The base's.
        context: Window length in tokens.
        seed: Fixes the orders of all walks.
        id: The client's.
        data: Its file or folder.
        otherwise: What else can be done about too little text.

    Raises:
        DataError: There is none, or too little for three splits.
    """
    files_of_text(data)
    parts = dict(zip(SPLITS, section.read_one(data), strict=True))
    encoded = {name: list(encode(tokenizer, texts, None)) for name, texts in parts.items()}
    tokens = {
        name: np.concatenate(pieces) if pieces else np.empty(0, np.uint16)
        for name, pieces in encoded.items()
    }
    needed = context + 1
    if any(len(own) < needed for own in tokens.values()):
        found = ", ".join(f"{len(own):,} for {name}" for name, own in tokens.items())
        raise DataError(
            f"{data}: too little text to train on and to judge by: tokens {found}, and each "
            f"needs {needed:,}",
            f"Give more text (to each split, if the folder has its own){otherwise}.",
        )
    return federate({id: tokens}, context, seed, str(data)).clients[id]
