"""What a run writes while it goes on: metrics, TensorBoard events, checkpoints. Everything is whole or not there."""

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.engines.states import Stored, link
from coterie.errors import CheckpointError, Refused, SaveError
from coterie.names import encoded
from coterie.protocol import ClientId, State
from coterie.tensors import digest_later, load, save, write_atomically

KEPT = 2  # checkpoints: the newest, and the one before it
METRICS = "metrics.jsonl"
SUMS = "SHA256SUMS"  # checksums of files beside it, in the form of `sha256sum`
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically. Raises SaveError."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def make_folder(path: Path) -> None:
    """Make a folder for results, and those above it. Raises Refused where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"cannot make the folder {path}: {error.strerror}", "Choose another --out.") from None


def check_apart(folder: Path, data: Path, option: str = "--out") -> None:
    """Refuse a folder for results that lies in a folder of data, or the other way round: the one would be taken for the other.

    Raises:
        Refused: Naming both.
    """
    ours, theirs = folder.expanduser().resolve(), data.expanduser().resolve()
    if not theirs.is_dir() or not (ours.is_relative_to(theirs) or theirs.is_relative_to(ours)):
        return
    how = "is" if ours == theirs else "lies in" if ours.is_relative_to(theirs) else "holds"
    elsewhere = theirs.parent / f"{theirs.name}-run"
    raise Refused(
        f"{option} {folder} {how} the folder of the data, {data}: what is written would lie among them",
        f"Choose a folder beside it: {option} {elsewhere}",
    )


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "Is this the folder of a run? See `coterie run --out`.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", "Check the path and its permissions.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error})", "It was not written by coterie, or was changed by hand.") from None


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the SHA-256 of files in a folder, by their paths in it; `sha256sum -c` reads that too. Raises SaveError."""
    write_atomically(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode())


def read_sums(folder: Path) -> dict[str, str]:
    """What `write_sums` wrote.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, so nothing tells whether the files beside it are whole") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    found = [_SUM.fullmatch(line) for line in lines]
    if not all(found):
        raise CheckpointError(f"{path} is damaged: not lines of sha256sum")
    return {line[2]: line[1] for line in found if line}


def check_sums(folder: Path, names: Iterable[str], sums: Mapping[str, str]) -> None:
    """Refuse files in a folder that are not as they were when their checksums were written.

    Raises:
        CheckpointError: Naming the first that is missing, has no checksum, or another one.
    """
    computed = {name: digest_later(folder / name) for name in names}
    for name, digest in computed.items():
        try:
            same = digest.result() == sums.get(name)
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} does not exist") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error.strerror})") from None
        if not same:
            how = "it is not as it was written: its SHA-256 is another one" if name in sums else f"{SUMS} does not know it"
            raise CheckpointError(f"{folder / name} is damaged, {how}")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within the block no other process works in a run's folder. What a killed process left does not count.

    Raises:
        Refused: Somebody else does, who is named; or the folder cannot be written to.
    """
    make_folder(folder)
    path = folder / "lock"
    lock = FileLock(path, timeout=0, is_singleton=True)
    holder = ""
    with suppress(OSError):
        holder = path.read_text(errors="replace")[:200].strip()
    try:
        lock.acquire()
    except Timeout:
        who = f" by {holder}" if holder.isprintable() and holder else ""
        raise Refused(f"{folder} is in use{who}", "Wait until that has ended, or choose another --out.") from None
    except OSError as error:
        raise Refused(f"cannot write in {folder}: {error.strerror}", "Check its permissions, or choose another --out.") from None
    try:
        _sign(path, f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if lock.lock_counter == 1:
            _sign(path, "")
        lock.release()


def _sign(path: Path, text: str) -> None:
    """Say who has a lock; where that cannot be written, it is not said."""
    with suppress(OSError):
        path.write_text(text, encoding="utf-8")


def check_metrics(folder: Path, position: int, digest: str | None) -> None:
    """Refuse to go on behind metrics that are not there any more.

    Args:
        folder: The run's.
        position: Bytes of metrics.jsonl that belong to the checkpoint resumed from.
        digest: Their SHA-256; None where nothing is known.

    Raises:
        CheckpointError: The file is missing, shorter, or begins otherwise.
    """
    path, remedy = folder / METRICS, "Put the file back; or go on without what is lost: --resume-changed."
    try:
        with open(path, "rb") as file:
            found = file.read(position)
    except FileNotFoundError:
        found = b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", remedy) from None
    if len(found) < position:
        problem = f"{path} has {len(found):,} bytes, and had {position:,} when the checkpoint was written"
        raise CheckpointError(f"{problem}: metrics of the rounds before it are lost", remedy)
    if digest is not None and hashlib.sha256(found).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its first {position:,} bytes are not those that were written", remedy)


class MetricsFile:
    """`metrics.jsonl`, one JSON object a line, and the same figures as TensorBoard events.

    Args:
        folder: The run's folder.
        position: Bytes of metrics.jsonl that belong to the checkpoint resumed from; what follows is cut off.
        step: Local iterations done at that checkpoint; later TensorBoard events are marked void.
    """

    def __init__(self, folder: Path, position: int = 0, step: int = 0) -> None:
        self._path, self._digest = folder / METRICS, hashlib.sha256()
        try:
            self._file = open(self._path, "a+b")  # noqa: SIM115
            self._file.seek(0)
            kept = self._file.read(position)
            if len(kept) < position:  # some are lost, and whoever resumes knows of it
                kept = kept[: kept.rfind(b"\n") + 1]
            self._file.truncate(len(kept))
            self._file.seek(0, os.SEEK_END)
            self._digest.update(kept)
            self._events = _events(folder / "tensorboard", step + 1 if position else None)
        except OSError as error:
            raise SaveError(f"cannot write {error.filename or self._path}: {error.strerror}", _WRITABLE) from error

    def write(self, kind: str, round: int, step: int, client: ClientId, values: Mapping[str, Any]) -> None:
        """One line, and one TensorBoard scalar for every number in `values`."""
        line = {"kind": kind, "round": round, "iteration": step, "client": client, **values}
        try:
            written = (json.dumps(line, ensure_ascii=False) + "\n").encode(errors="backslashreplace")  # as JSON escapes halves of pairs
            self._file.write(written)
            self._digest.update(written)
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}/{client}", value, step)
        except OSError as error:
            raise SaveError(f"cannot write {self._file.name}: {error.strerror}", "Free some space and resume.") from error

    def flush(self) -> tuple[int, str]:
        """Bring everything to disk; returns the length of metrics.jsonl in bytes and its SHA-256."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._events.flush()
        except OSError as error:
            raise SaveError(f"cannot write {self._file.name}: {error.strerror}", "Free some space and resume.") from error
        return self._file.tell(), self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        self._events.close()


_WRITABLE = "Check the permissions of that folder, and that the disk is not full."


def _events(folder: Path, purge: int | None) -> Any:
    """TensorBoard's writer. Raises OSError."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge)


class _About(BaseModel):
    """What checkpoint.json says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    round: int = Field(ge=0)
    clients: list[ClientId]
    recipe: dict[str, Any]
    progress: dict[str, Any]


@dataclass(frozen=True)
class Released:
    """`released.jsonl`: the noisy results that may have left a server, each written down before it does.

    A server that goes back to a checkpoint does rounds again. The same result with the same noise tells nothing new, another one does,
    and counts besides what had left before.

    Args:
        path: The file.
    """

    path: Path

    def since(self, round: int) -> list[dict[str, Any]]:
        """Read what left in a round or later: round, phase, content (a hash), and of how many clients how many were drawn.

        Where single examples are protected, instead of these how many each client has, and the steps on them, `windows` and `steps`.

        Raises:
            CheckpointError: The file is damaged.
        """
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []
        try:
            return [found for line in lines if (found := json.loads(line))["round"] >= round]
        except (ValueError, TypeError, KeyError) as error:
            problem = f"{self.path} is damaged ({error}): what this run has sent is not known"
            raise CheckpointError(problem, "Start the run afresh, with another --out.") from None

    def add(self, result: Mapping[str, Any], since: int) -> bool:
        """Write down a result; returns whether it is new.

        Args:
            result: As `since` returns them.
            since: The first round that may be done again: what left before it is not kept here.

        Raises:
            SaveError: It could not be written.
        """
        known = self.since(since)
        if result in known:
            return False
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in [*known, result]).encode())
        return True


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds.

    Args:
        round: Rounds done.
        server: The server's state.
        clients: The clients' states. Those that are in files are linked to, or read when they are asked for.
        progress: What else the run carries on: traffic, curves, seconds. JSON values.
    """

    round: int
    server: State
    clients: Mapping[ClientId, State]
    progress: dict[str, Any]


_SERVER, _ABOUT = "server.safetensors", "checkpoint.json"  # of a checkpoint


def _of(client: ClientId) -> str:
    """The file of a client's state in a checkpoint."""
    return f"clients/{encoded(client)}.safetensors"


class Checkpoints:
    """The folder `checkpoints/` of a run: `round-00007/` each, of which the two newest are kept.

    A checkpoint is written under another name, brought to disk, and renamed: it is whole, or it is not there. Each of its files has a
    checksum in its `SHA256SUMS`, and is held against that before it is believed.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.folder, self.recipe = folder, dict(recipe)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and drop all but the newest two.

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
            about = {"round": checkpoint.round, "clients": list(checkpoint.clients), "recipe": self.recipe, "progress": checkpoint.progress}
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
                "The checkpoint before it is good: free some space and run again with --resume.",
            ) from error
        self.tidy()

    def tidy(self) -> None:
        """Drop all but the newest two, and what a killed process left of one; for whoever is `alone` in the run's folder."""
        for old in (*self._all()[:-KEPT], *self.folder.glob("round-*.new")):
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("round-*") if path.is_dir() and path.suffix != ".new")

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, or None if there is none. Clients' states are read when they are asked for.

        Raises:
            CheckpointError: It is truncated, or of another recipe; the message names the first field that differs.
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
            former = f"Delete {folder} to resume from {found[-2].name}." if len(found) > 1 else "Start the run afresh, with another --out."
            raise CheckpointError(f"checkpoint {folder.name}: {error.problem}", former) from None
        clients = {i: folder / _of(i) for i in about.clients}
        return Checkpoint(about.round, server, Stored(clients, {i: _known(sums[_of(i)]) for i in clients}), about.progress)

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
    """What a checkpoint says of itself. Raises CheckpointError."""
    path = folder / _ABOUT
    try:
        about = _About.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if f"round-{about.round:05d}" != folder.name:
        raise CheckpointError(f"{path} is of round {about.round}")
    return about


def _known(digest: str) -> "Future[str]":
    """A digest that need not be computed."""
    found: Future[str] = Future()
    found.set_result(digest)
    return found


def _differences(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = ours.keys() | theirs.keys()
        return [d for key in keys for d in _differences(ours.get(key), theirs.get(key), f"{prefix}.{key}" if prefix else str(key))]
    return [] if ours == theirs else [(prefix, repr(ours), repr(theirs))]


def _keep(path: Path, states: Mapping[ClientId, State], client: ClientId) -> "Future[str]":
    """Write a client's state. One that is in a file is there already: all it needs is to be on the disk, and another name.

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
    """Bring a file, or a folder's entries, to disk, so that it, or a rename, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
