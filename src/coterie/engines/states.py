"""Clients' states within a memory limit: those that do not fit are in packs, a few files."""

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from filelock import BaseFileLock, FileLock, Timeout

from coterie.core import devices
from coterie.core.errors import CheckpointError, SaveError
from coterie.core.packs import Entry, Packs
from coterie.core.protocol import ClientId, State
from coterie.core.tensors import nbytes, to_bytes

_PREFIX = "states-"  # of the temporary folders of a process's states


class Stored(Mapping[ClientId, State]):
    """Clients' states by id, in memory or in packs, whose SHA-256 are in `digests`."""

    def __init__(
        self, places: Mapping[ClientId, State | Entry], digests: Mapping[Path, "Future[str]"] = {}
    ) -> None:
        self._places, self.digests = dict(places), dict(digests)

    def __getitem__(self, client: ClientId) -> State:
        """Return a client's state. Raises CheckpointError if its pack is missing or damaged."""
        place = self._places[client]
        if not isinstance(place, Entry):
            return place
        try:
            return place.read()
        except CheckpointError as error:
            raise CheckpointError(
                f"state of client {client!r}: {error.problem}",
                "The run's folder was changed during the run. Resume from the last checkpoint "
                "with --resume.",
            ) from None

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def entry(self, client: ClientId) -> Entry | None:
        """Return the place of a client's state in a pack; None if it is in memory."""
        place = self._places.get(client)
        return place if isinstance(place, Entry) else None

    def nbytes(self, client: ClientId) -> int:
        """Return the size of a client's state in bytes, without reading it."""
        place = self._places[client]
        return place.nbytes if isinstance(place, Entry) else nbytes(place)


class States(Stored):
    """The storage of the states of clients that do tasks.

    Clients take turns in the same order in every round, so that evicting the least recently used
    state would always evict the next one needed. States in memory therefore stay there; others are
    read before each task and written after it, into packs of many clients. Packs are never
    overwritten: a link to a pack is a checkpoint of its clients, and the next checkpoint takes only
    what changed. Packs are in a temporary folder, removed with this object; those of a killed
    process are removed by the next one.

    Args:
        within: Where that folder is made when needed; None: the system's temporary folder.
        most: Bytes of states in memory, beside the one in use.
    """

    def __init__(self, within: Path | None = None, most: float = math.inf) -> None:
        super().__init__({})
        self._within, self._most = within, most
        self._sizes: dict[ClientId, int] = {}  # bytes of those that have room in memory
        self._used = 0
        self._written: dict[ClientId, Entry] = {}  # what each was when it was written last
        self._changed: dict[ClientId, None] = {}  # those in memory that came back since, in order
        self._packs: Packs | None = None
        self._remove: Callable[[], object] | None = None
        if within is not None:
            for left in within.glob(f"{_PREFIX}*"):
                if (claim := _claimed(left)) is not None:
                    _remove(left, claim)

    def take(self, client: ClientId) -> State:
        """Return a client's state, to change in place; {} of a new one. Raises CheckpointError."""
        self._places.setdefault(client, {})
        state = self[client]
        if client in self._sizes:  # it may have been in a pack since the run was resumed
            self._places[client] = state
        return state

    def put(self, client: ClientId, state: State) -> None:
        """Keep a client's state after a task. Raises SaveError: no room in memory or on disk."""
        size, before = nbytes(state), self._sizes.get(client, 0)
        if self._used - before + size <= self._most:
            self._places[client], self._sizes[client] = state, size
            self._used += size - before
            self._changed[client] = None
            return
        self._places[client] = self._write(client, state)
        self._used -= self._sizes.pop(client, 0)
        self._changed.pop(client, None)

    def together(
        self, clients: Sequence[ClientId], size: Callable[[ClientId], int]
    ) -> dict[ClientId, State] | None:
        """Return the states of several clients as they lie in memory, if each takes at most `size`
        bytes during a task; None if one is not in memory, or they would not fit.
        """
        others = self._used - sum(self._sizes.get(i, 0) for i in clients)
        needed = sum(max(size(i), self._sizes.get(i, 0)) for i in clients)
        outside = any(self.entry(i) is not None and i not in self._sizes for i in clients)
        if others + needed > self._most or outside:
            return None
        return {i: self.take(i) for i in clients}

    def persisted(self) -> Stored:
        """Return all states in packs, of which only what changed is written. Raises SaveError."""
        for client in self._changed:
            self._write(client, self[client])
        self._changed.clear()
        if self._packs is None:
            return Stored({})
        self._gather(self._packs)
        self._packs.seal()
        entries = {i: self._written[i] for i in self._places if i in self._written}
        return Stored(entries, self._packs.sealed())

    def _write(self, client: ClientId, state: State) -> Entry:
        """Return a client's state's place in a pack, written if changed. Raises SaveError."""
        data, before = to_bytes(state), self._written.get(client)
        if before is not None and before.length == len(data) and before.content() == data:
            return before
        packs = self._own_packs()
        after = self._written[client] = packs.append(data, nbytes(state))
        if before is not None:
            packs.drop(before)
        if not after.offset:  # a pack has begun, and those before it may have lost much
            self._gather(packs)
        return after

    def _gather(self, packs: Packs) -> None:
        """Rewrite what is needed of mostly obsolete packs. Raises SaveError, CheckpointError."""
        sparse = packs.sparse()
        for client, entry in list(self._written.items()) if sparse else ():
            if entry.pack in sparse:
                self._written[client] = packs.append(entry.content(), entry.nbytes)
                if isinstance(self._places[client], Entry):
                    self._places[client] = self._written[client]
                packs.drop(entry)

    def restore(self, states: Mapping[ClientId, State]) -> None:
        """Take over states; those in packs are not read until needed."""
        self._places, self._sizes, self._used = {}, {}, 0
        self._written, self._changed, self._packs = {}, {}, None
        self.close()
        adopted: dict[Path, Path] = {}
        for client in states:
            entry = states.entry(client) if isinstance(states, Stored) else None
            if entry is None or not isinstance(states, Stored):
                self.put(client, dict(states[client]))
                continue
            packs = self._own_packs()
            if entry.pack not in adopted:
                path = adopted[entry.pack] = packs.adopt(entry.pack, states.digests[entry.pack])
                link(entry.pack, path)
            adopted_entry = replace(entry, pack=adopted[entry.pack])
            packs.need(adopted_entry)
            self._places[client] = self._written[client] = adopted_entry
            if self._used + adopted_entry.nbytes <= self._most:
                self._sizes[client] = adopted_entry.nbytes
                self._used += adopted_entry.nbytes

    def close(self) -> None:
        """Remove the packs, and with them states that are not in checkpoints."""
        if self._remove is not None:
            self._remove()

    def _own_packs(self) -> Packs:
        """Return the packs in this object's folder, which is made if missing."""
        if self._packs is None:
            try:
                if self._within is not None:
                    self._within.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._within))
            except OSError as error:
                where = self._within or tempfile.gettempdir()
                problem = f"cannot make a folder for states in {where}: {error.strerror}"
                raise SaveError(problem, "Check its permissions.") from error
            self._remove = weakref.finalize(self, _remove, folder, _claimed(folder))
            self._packs = Packs(folder)
        return self._packs


def half_of_memory(device: torch.device) -> float:
    """Return half of the bytes of memory of a device; infinite if unknown."""
    total = devices.memory(device) or devices.memory_here()
    return math.inf if total is None else total / 2


def link(source: Path, target: Path) -> None:
    """Link a file to another name, or copy it if the file system cannot. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _claimed(folder: Path) -> BaseFileLock | None:
    """Return a lock of a folder, held until released or the process ends; None if it is in use."""
    try:
        return FileLock(folder / "lock", blocking=False).acquire().lock
    except (Timeout, OSError):  # OSError: it is gone meanwhile, or somebody else's
        return None


def _remove(folder: Path, claim: BaseFileLock | None) -> None:
    if claim is not None:
        claim.release()
    shutil.rmtree(folder, ignore_errors=True)
