"""Links of the repository's pages, turned to where the pages are on the site."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\]|\x00\d+\x00)*)\]\(([^)\s]+)\)")


def turned(text: str, source: str, places: Mapping[str, str]) -> str:
    """Return a page's text with its relative links as they are on the site.

    Args:
        text: The page.
        source: Its path in the repository.
        places: Where files of the repository are on the site. A link to a file that is not there
            becomes its text, with the path in the repository.
    """
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\x00{len(kept) - 1}\x00"

    hidden = LINK.sub(_turning(source, places), CODE.sub(keep, text))
    return re.sub(r"\x00(\d+)\x00", lambda found: kept[int(found[1])], hidden)


def _title(target: str) -> str | None:
    """Return the title of a page of the repository, which says more than the name of its file."""
    path = Path(__file__).parents[2] / target
    head = re.search(r"^# (.+)$", path.read_text("utf-8"), re.MULTILINE) if path.is_file() else None
    return head[1].replace("`", "") if head else None


def _turning(source: str, places: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    def turn(found: re.Match[str]) -> str:
        shown, link = found[1], found[2]
        file, _, anchor = link.partition("#")
        if not file or re.match(r"[a-z]+:", link):
            return found[0]
        target = os.path.normpath(PurePosixPath(source).parent / file)
        if target not in places:
            return f"{shown} (`{target}`)" if "\x00" not in shown else shown
        if shown.endswith(".md"):
            shown = _title(target) or shown
        there = os.path.relpath(places[target], PurePosixPath(places[source]).parent)
        return f"[{shown}]({there}{'#' + anchor if anchor else ''})"

    return turn
