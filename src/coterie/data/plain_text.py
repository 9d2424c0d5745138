"""Plain or gzipped text files: decoded by their byte-order mark, or diagnosed if not UTF-8."""

import codecs
import gzip
import io
import os
import re
import shlex
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

from coterie.core.errors import DataError
from coterie.core.foreign import opened as opened_binary
from coterie.core.foreign import read_text as core_text
from coterie.core.foreign import yaml_of

_PLAIN = 64 << 20  # bytes that any gzip file may expand to
_RATIO = 100  # times its size that a larger one may expand to; text compresses to a tenth or more


def binary(path: Path) -> io.BufferedReader:
    """Open a file, decompressed if its name ends in .gz. Raises OSError."""
    if path.suffix.lower() == ".gz":
        return cast(io.BufferedReader, _Bounded(path))
    return opened_binary(path)


class _Bounded(gzip.GzipFile):
    """A gzip file that is refused beyond a limit, as a few kilobytes can expand to gigabytes."""

    def __init__(self, path: Path) -> None:
        file = opened_binary(path)
        super().__init__(fileobj=file)
        self.myfileobj = cast(Any, file)  # which `close` closes
        self.path, self.size = path, os.fstat(file.fileno()).st_size
        self.most = max(_PLAIN, _RATIO * self.size)

    def read1(self, size: int = -1) -> bytes:
        data = super().read1(size)
        if self.tell() > self.most:
            raise DataError(
                f"{self.path}: its {self.size:,} bytes would expand to more than {self.most:,}",
                "Text does not compress like that: leave the file out.",
            )
        return data


def decompressed(path: Path) -> bytes:
    """Return the content of a gzip file. Raises DataError if it expands too much; OSError, EOFError
    or zlib.error if it cannot be read.
    """
    with _Bounded(path) as file:
        return b"".join(iter(lambda: file.read1(1 << 20), b""))


def read_text(path: Path) -> str:
    r"""Return the text of a file in UTF-8, or UTF-16 or UTF-32 with a mark, gzipped if it ends in
    .gz.

    Line ends become \n. Raises DataError if it is missing, unreadable, empty, not text, or in
    another encoding.
    """
    with opened(path) as file:  # in parts, so that a gzip file's size is watched
        text = "".join(iter(lambda: file.read(1 << 20), ""))
    if not text.strip():
        raise empty(path)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        problem = f"{path}:{line}: not text: it has NUL characters"
        raise DataError(problem, "Remove them, or leave it out.")
    return text


def empty(path: Path) -> DataError:
    """Return the refusal of an empty file."""
    return DataError(f"{path}: the file is empty", "Put text into it, or remove it.")


@contextmanager
def opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file, see `read_text`. Errors while reading are raised as DataError, too."""
    encoding = ""
    with _readable(path):
        try:
            with binary(path) as file:
                encoding = encoding_of(path, file.peek(SAMPLE))
                yield io.TextIOWrapper(file, encoding, newline=newline)
        except UnicodeDecodeError:
            if encoding != "utf-8":
                problem = f"{path}: damaged {encoding.removesuffix('-sig').upper()} text"
                raise DataError(problem, "Save it again.") from None
            with binary(path) as file:
                raise not_utf8(path, file) from None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a DataError if a file cannot be read or decompressed in the block."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"{path}: damaged gzip file ({error})"
        raise DataError(problem, "Copy or download it again.") from None
    except OSError as error:
        problem = f"{path}: cannot be read ({error.strerror})"
        raise DataError(problem, "Check the path and its permissions.") from None


SAMPLE = 1 << 16  # bytes to examine


@cache
def _tables() -> dict[str, Any]:
    """Return `encodings.yaml`: how text (`marks`) and other `kinds` of files begin, as pairs of
    bytes and words; what `iconv` calls encodings, and the `candidates` of the detector.
    """
    words: dict[str, Any] = yaml_of(core_text(Path(__file__).with_name("encodings.yaml")))
    for name in ("marks", "kinds"):
        words[name] = [(begin.encode("latin-1"), word) for begin, word in words[name].items()]
    return words


def named(kind: str, beginning: bytes) -> str | None:
    """Return the encoding (`marks`) or kind (`kinds`) of a file that begins like this."""
    return next((word for begin, word in _tables()[kind] if beginning.startswith(begin)), None)


_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_MOST_CONTROL = 0.3  # of all bytes; Perl's -T takes this, too
_C1 = re.compile("[\x80-\x9f]")
_BESIDE_LATIN = re.compile(r"(?<=[A-Za-z])[^\W\d_A-Za-z]|[^\W\d_A-Za-z](?=[A-Za-z])")
_UNLIKE_LATIN = ("CYRILLIC", "GREEK")
_USUAL = "cp1252"  # of those that are as likely as each other, by far the most frequent
_LEAST_CONFIDENCE = 0.1  # of the detector: that of one French sentence is 0.11, of one word 0.02

_TEXT_FILE = "Save its text in a .txt file (UTF-8), or leave it out."


def encoding_of(path: Path, beginning: bytes) -> str:
    """Return the encoding by the byte-order mark, or UTF-8. Raises DataError if it is no text."""
    if kind := named("kinds", beginning):
        raise DataError(f"{path}: not text but {kind}", _TEXT_FILE)
    if marked := named("marks", beginning):
        return marked
    if b"\0" in beginning:
        import chardet

        detected = str(chardet.detect(beginning)["encoding"]).lower()
        if (wide := _tables()["iconv"].get(detected)) is not None:
            problem = f"{path}: {wide} text without a mark that says so"
            raise DataError(problem, f"Convert it: {_command(wide, path)}.")
        raise DataError(f"{path}: not text: it has NUL characters", _TEXT_FILE)
    if len(_CONTROL.findall(beginning)) > _MOST_CONTROL * len(beginning):
        raise DataError(f"{path}: not text: mostly control characters", _TEXT_FILE)
    return "utf-8"


def not_utf8(path: Path, lines: Iterable[bytes]) -> DataError:
    """Return the refusal of a file with these lines, which is not UTF-8."""
    remaining, utf8_before, number = iter(lines), False, 0
    for line in remaining:
        number += 1
        try:
            utf8_before |= len(line.decode()) < len(line)
        except UnicodeDecodeError as error:
            number += line.count(b"\r", 0, error.start)
            break
    sample = line
    while len(sample) < SAMPLE and (more := next(remaining, b"")):
        sample += more
    sample = sample[:SAMPLE]
    if utf8_before or _mostly_utf8(sample):
        remedy = "Repair this line; the rest of the file is UTF-8, which converting would damage."
        return DataError(f"{path}:{number}: damaged UTF-8 text", remedy)
    if encoding := _detected(path, sample):
        problem = f"{path}:{number}: not UTF-8 text but {encoding}"
        return DataError(problem, f"Convert it: {_command(encoding, path)}.")
    problem = f"{path}:{number}: not UTF-8 text, and its encoding cannot be told for sure"
    return DataError(problem, "Save it as UTF-8 in the program that it is from.")


def _mostly_utf8(sample: bytes) -> bool:
    beyond = [c for c in sample.decode("utf-8", "surrogateescape") if not c.isascii()]
    return 2 * sum("\udc80" <= c <= "\udcff" for c in beyond) < len(beyond)


def _detected(path: Path, sample: bytes) -> str:
    """Return iconv's name of the encoding of a sample; "" if uncertain."""
    import chardet

    guesses = chardet.detect_all(sample, include_encodings=_tables()["candidates"].split())
    likely = [
        guess for guess in guesses if guess["encoding"] and guess["confidence"] >= _LEAST_CONFIDENCE
    ]
    names = [
        codecs.lookup(str(guess["encoding"])).name
        for guess in likely
        if guess["confidence"] > 0.99 * likely[0]["confidence"]
    ]
    if not names:
        return ""
    name = _USUAL if _USUAL in names else names[0]
    if _mixed(sample.decode(name, "ignore")):
        return ""
    try:
        with binary(path) as file, io.TextIOWrapper(file, name) as text:
            while text.read(SAMPLE):
                pass
    except UnicodeDecodeError:
        return ""
    return str(_tables()["iconv"].get(name, name.replace("_", "-").upper()))


def _mixed(text: str) -> bool:
    """Whether words mix alphabets or have control characters, signs of a wrong encoding."""
    beside = _BESIDE_LATIN.findall(text)
    foreign = [c for c in "".join(beside) if unicodedata.name(c, "").startswith(_UNLIKE_LATIN)]
    return 10 * len(foreign) > sum(not c.isascii() for c in text) or bool(_C1.search(text))


def _command(encoding: str, path: Path) -> str:
    old, convert = shlex.quote(str(path)), f"iconv -f {encoding} -t UTF-8"
    if path.suffix.lower() == ".gz":
        return f"gunzip -c {old} | {convert} | gzip > NEW && mv NEW {old}"
    return f"{convert} {old} > NEW && mv NEW {old}"
