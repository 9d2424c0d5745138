"""Checkpoints of a run: written atomically, verified by checksums when read."""

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.core.errors import CheckpointError, SaveError
from coterie.core.files import (
    check_sums,
    digest_later,
    flush,
    load,
    read_json,
    read_sums,
    save,
    write_atomically,
    write_json,
    write_sums,
)
from coterie.core.packs import Entry, Packs
from coterie.core.protocol import ClientId, State
from coterie.core.tensors import nbytes, to_bytes
from coterie.engines.states import States, Stored, link

KEPT = 2  # checkpoints: the newest, and the one before it
_SERVER, _ABOUT, _CLIENTS = "server.safetensors", "checkpoint.json", "clients.json"
_PACKS = "clients"  # the folder of a checkpoint in which the packs of clients' states are
_Count = Annotated[int, Field(ge=0)]


class _About(BaseModel):
    """The content of checkpoint.json."""

    model_config = ConfigDict(extra="forbid", strict=True)

    round: int = Field(ge=0)
    states: int = Field(ge=0)  # how many clients have one
    recipe: dict[str, Any]
    progress: dict[str, Any]


class _Index(BaseModel):
    """The content of clients.json: pack and place of each client's state."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    packs: list[Annotated[str, Field(pattern=r"^[0-9]+\.pack$")]]
    clients: dict[ClientId, tuple[_Count, _Count, _Count, _Count]]

    @classmethod
    def of(cls, states: Stored) -> "_Index":
        """Return the index of states that are all in packs."""
        numbers = {path: k for k, path in enumerate(states.digests)}
        entries = {i: entry for i in states if (entry := states.entry(i)) is not None}
        clients = {i: (numbers[e.pack], e.offset, e.length, e.nbytes) for i, e in entries.items()}
        return cls(packs=[path.name for path in numbers], clients=clients)

    def entries(self, folder: Path) -> dict[ClientId, Entry]:
        paths = [folder / name for name in self.packs]
        return {i: Entry(paths[k], *place) for i, (k, *place) in self.clients.items()}


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds: rounds done, states of server and clients, and progress as JSON
    values. Clients' states are read on access.
    """

    round: int
    server: State
    clients: Mapping[ClientId, State]
    progress: dict[str, Any]


class Checkpoints:
    """The folder `checkpoints/` of a run: `round-00007/` each, of which the two newest are kept.

    A checkpoint is written under another name, flushed to disk, and renamed: it is complete or
    absent. Its files are verified by its `SHA256SUMS` before use.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.folder, self.recipe = folder, dict(recipe)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint; delete all but the newest two; return its path. Raises SaveError."""
        final = self.folder / f"round-{checkpoint.round:05d}"
        new = self.folder / f"{final.name}.new"
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            save(new / _SERVER, checkpoint.server)
            digests = {_SERVER: digest_later(new / _SERVER)}
            if checkpoint.clients:
                states = _linked(checkpoint.clients, new / _PACKS)
                digests |= {f"{_PACKS}/{path.name}": d for path, d in states.digests.items()}
                write_atomically(new / _CLIENTS, _Index.of(states).model_dump_json().encode())
                digests[_CLIENTS] = digest_later(new / _CLIENTS)
            about = {
                "round": checkpoint.round,
                "states": len(checkpoint.clients),
                "recipe": self.recipe,
                "progress": checkpoint.progress,
            }
            write_json(new / _ABOUT, about)
            digests[_ABOUT] = digest_later(new / _ABOUT)
            write_sums(new, {name: digest.result() for name, digest in digests.items()})
            if final.is_dir():
                shutil.rmtree(final)
            final.unlink(missing_ok=True)
            new.rename(final)
            flush(self.folder)
        except (OSError, SaveError) as error:
            shutil.rmtree(new, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else error.problem
            raise SaveError(
                f"cannot save the checkpoint of round {checkpoint.round}: {reason}",
                "The previous checkpoint is intact: free some space and run again with --resume.",
            ) from error
        self.tidy()
        return final

    def tidy(self) -> None:
        """Delete all but the newest two, and incomplete ones; only if `alone` in the folder."""
        for old in (*self._all()[:-KEPT], *self.folder.glob("round-*.new")):
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        begun = (p for p in self.folder.glob("round-*") if p.is_dir() and p.suffix != ".new")
        return sorted(begun, key=lambda path: (len(path.name), path.name))  # 100000 after 99999

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint, with clients' states read on access; None if there is none.
        Raises CheckpointError if it is truncated or of another recipe, naming the first different
        field.
        """
        folders = self._all()
        if not folders:
            return None
        folder = folders[-1]
        try:
            sums = read_sums(folder)
            check_sums(folder, [_ABOUT], sums)
            about = _read(folder)
            if not (differing := sorted(_differences(self.recipe, about.recipe))):
                check_sums(folder, [_SERVER], sums)
                server, clients = load(folder / _SERVER)[0], _stored(folder, about, sums)
        except CheckpointError as error:
            former = "Start a new run, with another --out."
            if len(folders) > 1:
                former = f"Delete {folder} to resume from {folders[-2].name}."
            raise CheckpointError(f"checkpoint {folder.name}: {error.problem}", former) from None
        if differing:
            field, ours, theirs = differing[0]
            raise CheckpointError(
                f"checkpoint {folder} is from another recipe: {field} was {theirs}, now {ours}"
                + (f" ({len(differing)} fields differ)" if len(differing) > 1 else ""),
                "Resume with the same recipe and options, or choose another --out.",
            )
        return Checkpoint(about.round, server, clients, about.progress)


def _read(folder: Path) -> _About:
    """Return the description of a checkpoint. Raises CheckpointError."""
    path = folder / _ABOUT
    try:
        about = _About.model_validate(read_json(path, finite=False))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(problem) from None
    if f"round-{about.round:05d}" != folder.name:
        raise CheckpointError(f"{path} is of round {about.round}")
    return about


def _known(digest: str) -> "Future[str]":
    future: Future[str] = Future()
    future.set_result(digest)
    return future


def _differences(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = {key: f"{prefix}.{key}" if prefix else key for key in ours.keys() | theirs.keys()}
        inner = (_differences(ours.get(key), theirs.get(key), name) for key, name in keys.items())
        return list(chain.from_iterable(inner))
    return [] if ours == theirs else [(prefix, repr(ours), repr(theirs))]


def _stored(folder: Path, about: _About, sums: Mapping[str, str]) -> Stored:
    """Return the clients' states of a checkpoint, in checked packs. Raises CheckpointError."""
    if not about.states:
        return Stored({})
    check_sums(folder, [_CLIENTS], sums)
    try:
        index = _Index.model_validate(read_json(folder / _CLIENTS))
        files = [f"{_PACKS}/{name}" for name in index.packs]
        check_sums(folder, files, sums)
        digests = {folder / file: _known(sums[file]) for file in files}
        return Stored(index.entries(folder / _PACKS), digests)
    except (ValidationError, IndexError) as error:
        raise CheckpointError(f"{folder / _CLIENTS} is damaged ({error})") from None


def _linked(states: Mapping[ClientId, State], folder: Path) -> Stored:
    """Return clients' states in packs of a folder; existing packs are linked. Raises SaveError."""
    folder.mkdir()
    if isinstance(states, States):
        kept = states.persisted()
        for path in kept.digests:
            link(path, folder / path.name)
    else:
        packs = Packs(folder)
        entries = {i: packs.append(to_bytes(state), nbytes(state)) for i, state in states.items()}
        packs.seal()
        kept = Stored(entries, packs.sealed())
    for path in kept.digests:
        flush(folder / path.name)
    flush(folder)
    return kept
