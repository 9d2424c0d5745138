"""What a run writes while it goes on: metrics, TensorBoard events, checkpoints. Everything is whole or not there."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.engines.states import Stored, link
from coterie.errors import CheckpointError, Refused, SaveError
from coterie.protocol import ClientId, State
from coterie.tensors import check_file, load, save, write_atomically

KEPT = 2  # checkpoints: the newest, and the one before it


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically. Raises SaveError."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def make_folder(path: Path) -> None:
    """Make a folder for results, and those above it. Raises Refused where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"cannot make the folder {path}: {error.strerror}", "Choose another --out.") from None


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "Is this the folder of a run? See `coterie run --out`.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})", "It was not written by coterie, or was changed by hand.") from None


class MetricsFile:
    """`metrics.jsonl`, one JSON object a line, and the same figures as TensorBoard events.

    Args:
        folder: The run's folder.
        position: Bytes of metrics.jsonl that belong to the checkpoint resumed from; what follows is cut off.
        step: Local iterations done at that checkpoint; later TensorBoard events are marked void.
    """

    def __init__(self, folder: Path, position: int = 0, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = open(folder / "metrics.jsonl", "ab")  # noqa: SIM115
        self._file.truncate(position)
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if position else None)

    def write(self, kind: str, round: int, step: int, client: ClientId, values: Mapping[str, Any]) -> None:
        """One line, and one TensorBoard scalar for every number in `values`."""
        line = {"kind": kind, "round": round, "iteration": step, "client": client, **values}
        try:
            self._file.write((json.dumps(line) + "\n").encode())
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}/{client}", value, step)
        except OSError as error:
            raise SaveError(f"cannot write {self._file.name}: {error.strerror}", "Free some space and resume.") from error

    def flush(self) -> int:
        """Bring everything to disk; returns the length of metrics.jsonl in bytes."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._events.flush()
        except OSError as error:
            raise SaveError(f"cannot write {self._file.name}: {error.strerror}", "Free some space and resume.") from error
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        self._events.close()


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
        """Read what left in a round or later: round, phase, content (a hash), and of how many clients how many were drawn."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [found for line in lines if (found := json.loads(line))["round"] >= round]

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


class Checkpoints:
    """The folder `checkpoints/` of a run: `round-00007/` each, of which the two newest are kept.

    A checkpoint is written under another name, brought to disk, and renamed: it is whole, or it is not there.
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
            save(new / "server.safetensors", checkpoint.server)
            for client in checkpoint.clients:
                _keep(new / "clients" / f"{client}.safetensors", checkpoint.clients, client)
            if checkpoint.clients:
                _sync(new / "clients")
            about = {"round": checkpoint.round, "clients": list(checkpoint.clients), "recipe": self.recipe, "progress": checkpoint.progress}
            write_json(new / "checkpoint.json", about)
            if final.exists():
                shutil.rmtree(final)
            new.rename(final)
            _sync(self.folder)
        except (OSError, SaveError) as error:
            shutil.rmtree(new, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else error.problem
            raise SaveError(
                f"cannot save the checkpoint of round {checkpoint.round}: {reason}",
                "The checkpoint before it is good: free some space and run again with --resume.",
            ) from error
        for old in self._all()[:-KEPT]:
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
        about = read_json(folder / "checkpoint.json")
        self._check_recipe(folder, about["recipe"])
        try:
            server = load(folder / "server.safetensors")[0]
            clients = {i: folder / "clients" / f"{i}.safetensors" for i in about["clients"]}
            for path in clients.values():
                check_file(path)
        except CheckpointError as error:
            former = f"Delete {folder} to resume from {found[-2].name}." if len(found) > 1 else "Start the run afresh, with another --out."
            raise CheckpointError(f"checkpoint {folder.name}: {error.problem}", former) from None
        return Checkpoint(about["round"], server, Stored(clients), about["progress"])

    def _check_recipe(self, folder: Path, found: Mapping[str, Any]) -> None:
        if differing := sorted(_differences(self.recipe, found)):
            field, ours, theirs = differing[0]
            raise CheckpointError(
                f"checkpoint {folder} is from another recipe: {field} was {theirs}, now {ours}"
                + (f" ({len(differing)} fields differ)" if len(differing) > 1 else ""),
                "Resume with the same recipe and options, or choose another --out.",
            )


def _differences(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = ours.keys() | theirs.keys()
        return [d for key in keys for d in _differences(ours.get(key), theirs.get(key), f"{prefix}.{key}" if prefix else str(key))]
    return [] if ours == theirs else [(prefix, repr(ours), repr(theirs))]


def _keep(path: Path, states: Mapping[ClientId, State], client: ClientId) -> None:
    """Write a client's state. One that is in a file is there already: all it needs is to be on the disk, and another name."""
    file = states.file(client) if isinstance(states, Stored) else None
    if file is None:
        save(path, states[client])
    else:
        link(file, path)
        _sync(path)


def _sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to disk, so that it, or a rename, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
