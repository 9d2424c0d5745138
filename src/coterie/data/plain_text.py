"""Files of text, plain or gzipped, decoded by their mark."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from coterie.core.errors import DataError
from coterie.data.compressed import binary
from coterie.data.encodings import SAMPLE, encoding_of, not_utf8


def read_text(path: Path) -> str:
    r"""Return the text of a file in UTF-8 or with the mark of UTF-16 or UTF-32, gzipped if it ends
    in .gz, with \n line ends.

    Raises:
        DataError: It is missing, unreadable, empty, not text, or in another encoding.
    """
    with opened(path) as file:  # in parts, so that a gzip file's size is watched
        text = "".join(iter(lambda: file.read(1 << 20), ""))
    if not text.strip():
        raise empty(path)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path}:{line}: not text: it has NUL characters", "Remove them, or leave it out."
        )
    return text


def empty(path: Path) -> DataError:
    """Return the refusal of a file without text."""
    return DataError(f"{path}: the file is empty", "Put text into it, or remove it.")


@contextmanager
def opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    r"""Open a file of text. Errors while it is read are raised as DataError, too.

    Args:
        path: The file.
        newline: As Python's `open` takes it; None: every line ends in \n.

    Raises:
        DataError: As `read_text`, except for an empty file.
    """
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
        raise DataError(
            f"{path}: damaged gzip file ({error})", "Copy or download it again."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror})", "Check the path and its permissions."
        ) from None
