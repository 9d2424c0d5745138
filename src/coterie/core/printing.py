"""Make untrusted text safe to print: terminals obey control characters."""

import re
import unicodedata

from coterie.core.names import JOINERS

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of characters that show nothing
_BREAK = re.compile(r"(?<![ \t])[ \t]*(?:\r?\n[ \t]*)+")  # linear: of many spaces, too


def printable(text: str, lines: bool = False) -> str:
    r"""Return text with control and invisible characters escaped, so that it cannot deceive a
    terminal, a log or a reader. Control characters, direction marks, other invisible characters and
    halves of surrogate pairs become Python escapes (`\x1b`, `\u202e`). Tabs and line ends are kept
    with `lines`; otherwise a line end becomes `↵`, so that nobody can add a line.
    """
    if not lines:
        text = _BREAK.sub(" ↵ ", text)
    kept = JOINERS + "\n\t" * lines
    return "".join(
        c
        if c in kept or unicodedata.category(c) not in _HIDDEN
        else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )
