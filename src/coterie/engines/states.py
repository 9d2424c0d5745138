"""Clients' states within a memory limit: those that do not fit are in files."""

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from filelock import BaseFileLock, FileLock, Timeout

from coterie.core import devices
from coterie.core.errors import CheckpointError, SaveError
from coterie.core.files import digest_later, load, nbytes_of_file, same_as_file, save
from coterie.core.names import encoded
from coterie.core.protocol import ClientId, State
from coterie.core.tensors import nbytes

_PREFIX = (
    "states-"  # what the names of folders begin with in which states lie while a process lives
)


class Stored(Mapping[ClientId, State]):
    """Clients' states by id, each in memory or in a safetensors file, which is read anew at each
    access.

    Args:
        places: The place of each client's state.
        digests: The SHA-256 of those that are in files.
    """

    def __init__(
        self,
        places: Mapping[ClientId, State | Path],
        digests: Mapping[ClientId, "Future[str]"] = {},
    ) -> None:
        self._places, self._digests = dict(places), dict(digests)

    def __getitem__(self, client: ClientId) -> State:
        """Return a client's state. Raises CheckpointError where its file is gone or damaged."""
        place = self._places[client]
        if not isinstance(place, Path):
            return place
        try:
            return load(place)[0]
        except CheckpointError as error:
            remedy = (
                "The run's folder was changed during the run. Resume from the last checkpoint "
                "with --resume."
            )
            raise CheckpointError(f"state of client {client!r}: {error.problem}", remedy) from None

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def file(self, client: ClientId) -> Path | None:
        """Return the file that a client's state lies in, whose content never changes; None where it
        is in memory.
        """
        place = self._places.get(client)
        return place if isinstance(place, Path) else None

    def digest(self, client: ClientId) -> "Future[str]":
        """Return the SHA-256 of the file that a client's state lies in: computed once, since that
        file never changes.
        """
        return self._digests[client]

    def nbytes(self, client: ClientId) -> int:
        """Return the size of a client's state in bytes; no values are read."""
        place = self._places[client]
        return nbytes_of_file(place) if isinstance(place, Path) else nbytes(place)


class States(Stored):
    """The storage of the states of clients that do tasks.

    Clients take turns in the same order round after round. Whoever throws out what was used longest
    ago would then always throw out what is needed next: who is in memory stays there, and the
    others are read before each task and written after it. A file is not changed but replaced, so
    that a link to it is a checkpoint of its client.

    The files are in a temporary folder, which is removed together with this object; files of a
    killed process are removed by the next one.

    Args:
        within: The folder in which that folder is made when it is needed; None: the system's for
            temporary files.
        most: Bytes of states that stay in memory; beside them there is the one that is worked on.
    """

    def __init__(self, within: Path | None = None, most: float = math.inf) -> None:
        super().__init__({})
        self._within, self._most = within, most
        self._sizes: dict[ClientId, int] = {}  # bytes of those in memory
        self._used = 0
        self._folder: Path | None = None
        if within is not None:
            for left in within.glob(f"{_PREFIX}*"):
                if (claim := _claimed(left)) is not None:
                    _remove(left, claim)

    def take(self, client: ClientId) -> State:
        """Return a client's state for a task, to be changed in place; {} for one that starts.
        Raises CheckpointError.
        """
        self._places.setdefault(client, {})
        return self[client]

    def put(self, client: ClientId, state: State) -> None:
        """Keep a client's state after a task.

        Raises:
            SaveError: It does not fit into memory, and could not be written.
        """
        size, own = nbytes(state), self._sizes.pop(client, 0)
        self._used -= own
        file = self.file(client)
        if self._used + size <= self._most:
            self._places[client], self._sizes[client] = state, size
            self._used += size
            if file is not None:
                file.unlink(missing_ok=True)
        elif file is None or not same_as_file(file, state):  # scoring changes nothing
            save(self._path(client), state, lasting=False)
            self._places[client], self._digests[client] = (
                self._path(client),
                digest_later(self._path(client)),
            )

    def together(
        self, clients: Sequence[ClientId], size: Callable[[ClientId], int]
    ) -> dict[ClientId, State] | None:
        """Return the states of several clients at once, as they lie in memory; None where one of
        them does not, or they would not fit.

        Args:
            clients: Whose.
            size: The most bytes that a client's state may take during a task.
        """
        others = self._used - sum(self._sizes.get(i, 0) for i in clients)
        needed = sum(max(size(i), self._sizes.get(i, 0)) for i in clients)
        if others + needed > self._most or any(self.file(i) is not None for i in clients):
            return None
        return {i: self.take(i) for i in clients}

    def restore(self, states: Mapping[ClientId, State]) -> None:
        """Take over states. Those that are in files and do not fit into memory are not read."""
        self._places, self._sizes, self._used = {}, {}, 0
        for client in states:
            file = states.file(client) if isinstance(states, Stored) else None
            if (
                not isinstance(states, Stored)
                or file is None
                or self._used + nbytes_of_file(file) <= self._most
            ):
                self.put(client, dict(states[client]))
            else:
                link(file, self._path(client))
                self._places[client], self._digests[client] = (
                    self._path(client),
                    states.digest(client),
                )

    def _path(self, client: ClientId) -> Path:
        """Return the file for a client's state, in the keeper's own folder."""
        if self._folder is None:
            try:
                if self._within is not None:
                    self._within.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._within))
            except OSError as error:
                where = self._within or tempfile.gettempdir()
                raise SaveError(
                    f"cannot make a folder for states in {where}: {error.strerror}",
                    "Check its permissions.",
                ) from error
            weakref.finalize(self, _remove, self._folder, _claimed(self._folder))
        return self._folder / f"{encoded(client)}.safetensors"


def half_of_memory(device: torch.device) -> float:
    """Half of the bytes of memory where a device's tensors lie; infinite on a platform that does
    not tell.
    """
    found = devices.memory(device) or devices.memory_here()
    return math.inf if found is None else found / 2


def link(source: Path, target: Path) -> None:
    """Give a file another name too, which takes no space; a copy where the file system cannot.
    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _claimed(folder: Path) -> BaseFileLock | None:
    """Return what says that a folder is in use, until it is released or its process ends; None
    where somebody uses it already.
    """
    try:
        return FileLock(folder / "lock", blocking=False).acquire().lock
    except (Timeout, OSError):  # OSError: it is gone meanwhile, or somebody else's
        return None


def _remove(folder: Path, claim: BaseFileLock | None) -> None:
    if claim is not None:
        claim.release()
    shutil.rmtree(folder, ignore_errors=True)
