"""Checkpoints of a run: written atomically, and verified by checksums when they are read."""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.core.errors import CheckpointError, SaveError
from coterie.core.files import digest_later, load, read_json, save, write_json
from coterie.core.names import encoded
from coterie.core.protocol import ClientId, State
from coterie.engines.states import Stored, link
from coterie.runs.folder import check_sums, read_sums, write_sums

KEPT = 2  # checkpoints: the newest, and the one before it


class _About(BaseModel):
    """The content of checkpoint.json."""

    model_config = ConfigDict(extra="forbid", strict=True)

    round: int = Field(ge=0)
    clients: list[ClientId]
    recipe: dict[str, Any]
    progress: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds.

    Args:
        round: Rounds done.
        server: The server's state.
        clients: The clients' states. Those that are in files are linked to, or read when they are
            asked for.
        progress: What else the run carries on: traffic, curves, seconds. JSON values.
    """

    round: int
    server: State
    clients: Mapping[ClientId, State]
    progress: dict[str, Any]


_SERVER, _ABOUT = "server.safetensors", "checkpoint.json"  # of a checkpoint


def _of(client: ClientId) -> str:
    """Return the file of a client's state in a checkpoint."""
    return f"clients/{encoded(client)}.safetensors"


class Checkpoints:
    """The folder `checkpoints/` of a run: `round-00007/` each, of which the two newest are kept.

    A checkpoint is written under another name, flushed to disk, and renamed: it is complete or
    absent. Each of its files has a checksum in its `SHA256SUMS`, which is verified before it is
    used.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.folder, self.recipe = folder, dict(recipe)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and drop all but the newest two; returns its folder.

        Raises:
            SaveError: It could not be written (a full disk); the former ones are unchanged.
        """
        final = self.folder / f"round-{checkpoint.round:05d}"
        new = self.folder / f"{final.name}.new"
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            save(new / _SERVER, checkpoint.server)
            digests = {_SERVER: digest_later(new / _SERVER)}
            for client in checkpoint.clients:
                digests[_of(client)] = _keep(new / _of(client), checkpoint.clients, client)
            if checkpoint.clients:
                _sync(new / "clients")
            about = {
                "round": checkpoint.round,
                "clients": list(checkpoint.clients),
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
            _sync(self.folder)
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
        """Delete all but the newest two, and incomplete ones of a killed process; only if `alone`
        in the run's folder.
        """
        for old in (*self._all()[:-KEPT], *self.folder.glob("round-*.new")):
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(
            path for path in self.folder.glob("round-*") if path.is_dir() and path.suffix != ".new"
        )

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint, or None if there is none. Clients' states are read when
        they are asked for.

        Raises:
            CheckpointError: It is truncated, or of another recipe; the message names the first
                field that differs.
        """
        found = self._all()
        if not found:
            return None
        folder = found[-1]
        try:
            sums = read_sums(folder)
            check_sums(folder, [_ABOUT], sums)
            about = _read(folder)
            self._check_recipe(folder, about.recipe)
            check_sums(folder, [_SERVER, *map(_of, about.clients)], sums)
            server = load(folder / _SERVER)[0]
        except _OtherRecipe:
            raise
        except CheckpointError as error:
            former = (
                f"Delete {folder} to resume from {found[-2].name}."
                if len(found) > 1
                else "Start a new run, with another --out."
            )
            raise CheckpointError(f"checkpoint {folder.name}: {error.problem}", former) from None
        clients = {i: folder / _of(i) for i in about.clients}
        return Checkpoint(
            about.round,
            server,
            Stored(clients, {i: _known(sums[_of(i)]) for i in clients}),
            about.progress,
        )

    def _check_recipe(self, folder: Path, found: Mapping[str, Any]) -> None:
        if differing := sorted(_differences(self.recipe, found)):
            field, ours, theirs = differing[0]
            raise _OtherRecipe(
                f"checkpoint {folder} is from another recipe: {field} was {theirs}, now {ours}"
                + (f" ({len(differing)} fields differ)" if len(differing) > 1 else ""),
                "Resume with the same recipe and options, or choose another --out.",
            )


class _OtherRecipe(CheckpointError):
    """A checkpoint of another recipe, which is not damaged."""


def _read(folder: Path) -> _About:
    """Return the description of a checkpoint. Raises CheckpointError."""
    path = folder / _ABOUT
    try:
        about = _About.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    if f"round-{about.round:05d}" != folder.name:
        raise CheckpointError(f"{path} is of round {about.round}")
    return about


def _known(digest: str) -> "Future[str]":
    """Return a digest that need not be computed."""
    found: Future[str] = Future()
    found.set_result(digest)
    return found


def _differences(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = ours.keys() | theirs.keys()
        return [
            d
            for key in keys
            for d in _differences(
                ours.get(key), theirs.get(key), f"{prefix}.{key}" if prefix else str(key)
            )
        ]
    return [] if ours == theirs else [(prefix, repr(ours), repr(theirs))]


def _keep(path: Path, states: Mapping[ClientId, State], client: ClientId) -> "Future[str]":
    """Write a client's state. One that is in a file is there already: all it needs is to be on the
    disk, and another name.

    Returns:
        The SHA-256 of the file.
    """
    if isinstance(states, Stored) and (file := states.file(client)) is not None:
        link(file, path)
        _sync(path)
        return states.digest(client)
    save(path, states[client])
    return digest_later(path)


def _sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to disk, so that it, or a rename, survives a power
    cut.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
