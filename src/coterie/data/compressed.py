"""Files that may be gzipped."""

import gzip
import io
import os
from pathlib import Path
from typing import Any, cast

from coterie.core.errors import DataError
from coterie.core.foreign import opened

_PLAIN = 64 << 20  # bytes that any gzip file may expand to
_RATIO = 100  # times its size that a larger one may expand to; text compresses to a tenth or more


def binary(path: Path) -> io.BufferedReader:
    """Open the content of a file, decompressed if its name ends in .gz. Raises OSError."""
    if path.suffix.lower() == ".gz":
        return cast(io.BufferedReader, _Bounded(path))
    return opened(path)


class _Bounded(gzip.GzipFile):
    """A gzip file that is refused once it expands beyond a limit: a few kilobytes can expand to
    gigabytes.
    """

    def __init__(self, path: Path) -> None:
        file = opened(path)
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
    """Return the content of a gzip file.

    Raises:
        DataError: It would expand too much.
        OSError: It cannot be read, or is damaged; or EOFError, zlib.error.
    """
    with _Bounded(path) as file:
        return b"".join(iter(lambda: file.read1(1 << 20), b""))
