"""The JSON of archives."""

import json
from pathlib import Path
from typing import Any

from coterie.data.archives.conversations import damaged
from coterie.data.plain_text import read_text


def load(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        DataError: It cannot be read, or is no JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise damaged(str(path), f"not JSON ({reason})") from None
