"""People's own archives, as messengers and mail programs export them, as conversations."""

from coterie.data.archives.forms import (
    Me,
    archives_in,
    files_of,
    is_part_of_export,
    kind_of,
    not_text,
    rows_of,
)

__all__ = ["Me", "archives_in", "files_of", "is_part_of_export", "kind_of", "not_text", "rows_of"]
