"""Make untrusted text safe to print: terminals obey control characters."""

import re
import unicodedata

# which the spelling of some languages needs, and do no more than join letters
_JOINERS = "\u200c\u200d"
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of characters that show nothing
_BREAK = re.compile(r"(?<![ \t])[ \t]*(?:\r?\n[ \t]*)+")  # linear: of many spaces, too


def printable(text: str, lines: bool = False) -> str:
    r"""Return text with control and invisible characters escaped, so that it cannot deceive a
    terminal, a log or a reader.

    Control characters (escape sequences begin with one), marks that turn the direction of writing
    round, other invisible characters and halves of surrogate pairs become escapes as Python writes
    them (`\x1b`, `\u202e`).

    Args:
        text: Of anybody.
        lines: Whether tabs and ends of lines stay as they are; otherwise an end of line becomes
            `↵`, so that nobody can add a line.
    """
    if not lines:
        text = _BREAK.sub(" ↵ ", text)
    kept = _JOINERS + "\n\t" * lines
    return "".join(
        c
        if c in kept or unicodedata.category(c) not in _HIDDEN
        else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )
