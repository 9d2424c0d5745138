"""The JSON of archives."""

from pathlib import Path
from typing import Any

from coterie.core.foreign import json_of
from coterie.data.archives.conversations import damaged
from coterie.data.plain_text import read_text


def load(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        DataError: It cannot be read, or is no JSON.
    """
    try:
        return json_of(read_text(path))
    except ValueError as error:
        raise damaged(str(path), f"not JSON ({error})") from None
