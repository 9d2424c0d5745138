"""The sender's text in a mail, without quotations, forwarded mails and signatures."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

_BLOCKS = {"p", "div", "br", "li", "tr", "ul", "ol", "table", "blockquote", "pre", "hr"}
_BLOCKS |= {f"h{level}" for level in range(1, 7)}
_UNSEEN = {"script", "style", "head", "title"}
_LONGEST = 500  # characters of a line that may introduce a quotation
_HTML = 1 << 18  # characters of HTML that are read; nobody writes more into a mail

_SIGNATURE = ("-- ", "--")
# `---- Forwarded message ----`, and the line that Outlook draws
_RULE = re.compile(r"\s{0,9}(?:-{3,12} ?[^-\n]{4,60} ?-{3,12}|_{20,80})\s{0,9}")
_FIELD = re.compile(r"\*?[^\W\d_][\w ]{1,20}\s?:\*? ")
_SENT = re.compile(r"\*?(?:Sent|Date|Gesendet|Datum|Envoyé|Enviado|Fecha|Inviato|Data)\s?:\*? ")
_WROTE = re.compile(
    r"(?=.*\d)(?:On|Am|Le|El|Il|Em|Op|Den|W dniu|Dne) .*"
    r"(?:wrote|schrieb.*|écrit|escribió|scritto|escreveu|schreef.*|skrev.*|napisał.*|napsal.*)\s?:"
)
_YEAR_OR_ADDRESS = re.compile(r"(?:19|20)\d\d|@")


def written_here(text: str) -> str:
    """Return the lines of a mail that its sender wrote."""
    lines = re.sub("(?m)^>From ", "From ", text).split("\n")  # as mbox files escape it
    kept: list[str] = []
    number = 0
    while number < len(lines) and not _ends(lines, number):
        if lines[number].startswith(">"):
            if not lines[number - 1].startswith(">"):
                _remove_introduction(kept)
        elif length := _introduction(lines, number):
            number += length
            behind = (lines[i] for i in range(number, len(lines)))
            following = next((line for line in behind if line.strip()), "")
            if not following.startswith(">"):  # all behind it is quoted
                break
            continue
        else:
            kept.append(lines[number].rstrip())
        number += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _ends(lines: Sequence[str], number: int) -> bool:
    """Whether the sender's own text ends before a line: by a signature, or by the header of a mail
    that is forwarded or quoted whole.
    """
    line, following = lines[number], lines[number + 1 : number + 5]
    if line in _SIGNATURE:
        return True
    if _RULE.fullmatch(line):
        return sum(bool(_FIELD.match(other)) for other in following) > 1
    return bool(_FIELD.match(line)) and any(map(_SENT.match, following[:3]))


def _introduction(lines: Sequence[str], number: int) -> int:
    """Return how many lines from here on say who wrote what follows: `On 12 May Ben wrote:`."""
    for length in (1, 2, 3):
        joined = " ".join(lines[number : number + length]).strip()
        if len(joined) <= _LONGEST and joined.endswith(":") and _WROTE.fullmatch(joined):
            return length
    return 0


def _remove_introduction(kept: list[str]) -> None:
    """Remove the line before a quotation that says whose it is, in whatever language."""
    for last in range(len(kept) - 1, max(len(kept) - 4, -1), -1):
        if kept[last]:
            if kept[last].endswith(":") and _YEAR_OR_ADDRESS.search(kept[last]):
                del kept[last:]
            return


class _Stripper(HTMLParser):
    """Collects the text of HTML; quoted lines begin with `> ` as in plain text."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = ["\n"]
        self.quoted = self.unseen = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n")
        self.quoted += tag == "blockquote"
        self.unseen = 0 if tag == "body" else self.unseen + (tag in _UNSEEN)

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n")
        self.quoted = max(self.quoted - (tag == "blockquote"), 0)
        self.unseen = max(self.unseen - (tag in _UNSEEN), 0)

    def handle_data(self, data: str) -> None:
        begins = self.pieces[-1] == "\n"
        text = re.sub(r"\s+", " ", data)
        text = text.lstrip() if begins else text
        if text and not self.unseen:
            self.pieces.append("> " * (begins and self.quoted > 0) + text)


def text_of_html(html: str) -> str:
    """Return the text of HTML, a line for each block."""
    stripper = _Stripper()
    stripper.feed(html[:_HTML])
    stripper.close()
    return "".join(stripper.pieces)
