"""Packs: files that hold many sets of tensors each, so that ten thousand sets need few files."""

import os
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import CheckpointError, TensorError
from coterie.core.files import digest_later, unwritable
from coterie.core.foreign import opened
from coterie.core.tensors import Tensors, from_bytes

LARGEST = 256 * 2**20  # bytes of a pack, about, behind which the next one begins


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a set of tensors, as safetensors bytes, in a pack."""

    pack: Path
    offset: int
    length: int
    nbytes: int  # of the tensors alone

    def content(self) -> bytes:
        """Return the bytes. Raises CheckpointError if the file is missing or too short."""
        try:
            with opened(self.pack) as file:
                if self.offset + self.length > os.fstat(file.fileno()).st_size:
                    raise CheckpointError(f"{self.pack} is truncated: it ends within what is read")
                file.seek(self.offset)
                return file.read(self.length)
        except FileNotFoundError:
            raise CheckpointError(f"{self.pack} does not exist") from None
        except OSError as error:
            raise CheckpointError(f"{self.pack} cannot be read ({error.strerror})") from None

    def read(self) -> Tensors:
        """Return the tensors. Raises CheckpointError."""
        try:
            return from_bytes(self.content(), str(self.pack))
        except TensorError as error:
            raise CheckpointError(error.problem) from None


class Packs:
    """The packs of an existing folder. Sets of tensors are appended to the newest pack until it is
    sealed; it never changes after that, so that a link to it is a copy.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}  # bytes of each, those behind a failed write left out
        self._live: dict[Path, int] = {}  # bytes of the entries that are still needed
        self._digests: dict[Path, Future[str]] = {}  # of those that are sealed
        self._open: Path | None = None
        self._count = 0

    def append(self, data: bytes, nbytes: int) -> Entry:
        """Append the bytes of a set of tensors. On a SaveError the earlier entries are intact."""
        if self._open is not None and self._sizes[self._open] >= LARGEST:
            self.seal()
        if self._open is None:
            self._count += 1
            self._open = self._new(self._count)
        path, offset = self._open, self._sizes[self._open]
        try:
            with open(path, "r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(data)
        except OSError as error:
            raise unwritable(path, error) from error
        self._sizes[path] += len(data)
        self._live[path] += len(data)
        return Entry(path, offset, len(data), nbytes)

    def adopt(self, source: Path, digest: "Future[str]") -> Path:
        """Return the path of a new sealed pack; the caller links or copies `source` to it."""
        number = int(source.stem) if source.stem.isdecimal() else 0
        if not number or self._named(number) in self._sizes:
            number = self._count + 1
        # Its own number: a run that was interrupted names the next packs as one that was not.
        self._count, path = max(self._count, number), self._new(number)
        self._sizes[path], self._digests[path] = source.stat().st_size, digest
        return path

    def need(self, entry: Entry) -> None:
        """Count an entry of an adopted pack as needed."""
        self._live[entry.pack] += entry.length

    def drop(self, entry: Entry) -> None:
        """Count an entry as no longer needed; a sealed pack without needed entries is deleted."""
        self._live[entry.pack] -= entry.length
        if not self._live[entry.pack] and entry.pack != self._open:
            self._delete(entry.pack)

    def seal(self) -> None:
        """Let the next set of tensors begin a new pack."""
        path, self._open = self._open, None
        if path is None:
            return
        if self._live[path]:
            self._digests[path] = digest_later(path)
        else:
            self._delete(path)

    def sealed(self) -> dict[Path, "Future[str]"]:
        """Return the packs that will never change, with their SHA-256."""
        return dict(self._digests)

    def sparse(self) -> Set[Path]:
        """Return the sealed packs less than half of which is needed."""
        return {path for path in self._digests if 2 * self._live[path] < self._sizes[path]}

    def _named(self, number: int) -> Path:
        return self._folder / f"{number:06d}.pack"

    def _new(self, number: int) -> Path:
        path = self._named(number)
        self._sizes[path] = self._live[path] = 0
        return path

    def _delete(self, path: Path) -> None:
        del self._sizes[path], self._live[path]
        self._digests.pop(path, None)
        path.unlink(missing_ok=True)
