"""Valid client names, and their encoding as file names.

Names may have letters of any alphabet, but a file's name must be the same on every disk, in every
archive and locale: macOS may decompose letters, Windows forbids some characters, and many disks
ignore case. So names are percent-encoded (RFC 3986, section 2.1), all but plain letters, digits and
`._-`.
"""

import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import sha256
from urllib.parse import quote, unquote_to_bytes

LONGEST = 100  # characters of a name
# bytes of an encoded name: with what is put behind it (`.safetensors.new`), any file system takes
# that
LONGEST_FILE = 120
# Beside letters and digits: a typographic apostrophe (U+2019), the middle dots of Catalan and
# Japanese, and Hebrew's two abbreviation marks
SIGNS = " -_.'&+@\u2019\u00b7\u30fb\u05f3\u05f4"
CENTRALIZED = "centralized"  # who holds the union of all clients' data, for the Centralized row
_TAKEN = {
    CENTRALIZED: "the union of all clients' data",
    "__metadata__": "what safetensors files say of themselves",
}
JOINERS = "\u200c\u200d"  # which the spelling of some languages needs, and only join letters
# Of direction, and of no width, which programs put around names and texts, for `str.translate`
MARKS = dict.fromkeys([0x61C, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF])
MARKS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)])
# Letters and marks that show nothing (Default_Ignorable_Code_Point of Unicode 16), so that two
# names would look the same
_INVISIBLE = {0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0}
_INVISIBLE |= {*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
# of Windows, whatever their ending
_DEVICES = {"con", "prn", "aux", "nul"} | {f"{p}{n}" for p in ("com", "lpt") for n in range(10)}
_CUT = "~"  # between the beginning of a name that is too long for a file and its digest
_DIGEST = 32  # hexadecimal digits: 128 bits


def normal(name: str) -> str:
    """Return a name in Unicode's normal form C, which composes `e` and an accent into `é`."""
    return unicodedata.normalize("NFC", name)


def mistake(name: str) -> str:
    """Return why a name is invalid, in a few words; "" if it is valid. A name has at most `LONGEST`
    letters, marks and digits of any alphabet, `SIGNS`, and single spaces between them; it begins
    with a letter, a digit, `-` or `_`, and is in normal form C.
    """
    return next(_mistakes(name), "")


def _mistakes(name: str) -> Iterator[str]:
    """Yield the mistakes of a name."""
    if len(name) > LONGEST:
        yield f"it has {len(name):,} characters, at most {LONGEST} are possible"
    if not name:
        yield "it is empty"
    for place, character in enumerate(name):
        if not _allowed(name, place):
            yield f"it has {_named(character)}"
    if name != normal(name):
        yield "its accents are separate characters: it is not in Unicode's normal form C"
    if not _begins(name[0]):
        yield f"it begins with {_named(name[0])}"
    if name.endswith(" ") or "  " in name:
        yield "it has a space at its end, or two in a row"
    if (taken := _TAKEN.get(name.casefold())) is not None:
        yield f"it is reserved: it names {taken}"


def _begins(character: str) -> bool:
    return character in "-_" or unicodedata.category(character)[0] in "LN"


def _allowed(name: str, place: int) -> bool:
    """Return whether the character at a place may stand there."""
    character = name[place]
    if character in JOINERS:  # it must change how letters are written (RFC 5892, appendix A)
        before, after = name[place - 1 : place], name[place + 1 : place + 2]
        return bool(before and after) and (
            unicodedata.combining(before) == 9
            or unicodedata.bidirectional(before) == unicodedata.bidirectional(after) == "AL"
        )
    category = unicodedata.category(character)
    return character in SIGNS or (
        ord(character) not in _INVISIBLE and (category[0] in "LN" or category in ("Mn", "Mc"))
    )


def _named(character: str) -> str:
    """Return a readable description of a character, even of an invisible one."""
    number = f"U+{ord(character):04X}"
    known = unicodedata.name(character, "")
    shown = f"{character!r}, " if character.isprintable() else ""
    return f"{shown}{number}{f' {known}' if known else ''}"


def nearest(text: str) -> str:
    """Return a valid name for a text: invalid characters become `-`, and long names are cut."""
    name = normal(" ".join(text.split()))
    kept = "".join(c if _allowed(name, place) else "-" for place, c in enumerate(name))
    start = next((place for place, c in enumerate(kept) if _begins(c)), len(kept))
    return kept[start : start + LONGEST].rstrip(f" {JOINERS}")


def folded(name: str) -> str:
    """Return a key that is equal for names that differ only in case or joiners."""
    return normal("".join(c for c in normal(name).casefold() if c not in JOINERS))


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of different names with equal `folded` keys, each with the first of them."""
    first: dict[str, str] = {}
    return [
        (other, name) for name in names if (other := first.setdefault(folded(name), name)) != name
    ]


def encoded(name: str) -> str:
    """Return the name of a file for a client's name: ASCII, never hidden, no path, no device of
    Windows. Raises ValueError for an empty one. Different names have different files: a name that
    is cut, beyond `LONGEST_FILE` bytes, ends in a digest. Plain ASCII names are kept, except those
    with a meaning to Windows or a shell.
    """
    if not name:
        raise ValueError("an empty name cannot name a file")
    reserved = name.partition(".")[0].rstrip(" ").lower() in _DEVICES
    escaped = {0} if name[0] == "." or reserved else set[int]()
    escaped |= {len(name) - 1} if name[-1] == "." else set()
    parts = [
        f"%{ord(c):02X}" if k in escaped or c == _CUT else quote(c, "", errors="surrogatepass")
        for k, c in enumerate(name)
    ]
    if sum(map(len, parts)) <= LONGEST_FILE:
        return "".join(parts)
    beginning = ""
    for part in parts:
        if len(beginning) + len(part) > LONGEST_FILE - _DIGEST - len(_CUT):
            break
        beginning += part
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{beginning}{_CUT}{digest[:_DIGEST]}"


def is_cut(file: str) -> bool:
    """Return whether a file's name has only the beginning of a client's name."""
    return _CUT in file


def decoded(file: str) -> str:
    """Return the client's name of a file's name; of one that `is_cut`, the beginning and `…`."""
    beginning, cut, _ = file.partition(_CUT)
    return unquote_to_bytes(beginning).decode("utf-8", "replace") + "…" * bool(cut)
