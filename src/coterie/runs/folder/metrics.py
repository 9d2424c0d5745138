"""`metrics.jsonl`, TensorBoard's events, `released.jsonl`, and what observers of a run saw."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.errors import CheckpointError, SaveError
from coterie.core.files import load, save, write_atomically, writing
from coterie.core.foreign import json_of, opened
from coterie.core.importing import available
from coterie.core.protocol import ClientId
from coterie.core.tensors import Named, Tensors, prefixed, under

METRICS = "metrics.jsonl"


def check_metrics(folder: Path, position: int, digest: str | None) -> None:
    """Refuse missing or changed metrics up to a checkpoint's position. Raises CheckpointError."""
    path = folder / METRICS
    remedy = "Restore the file, or continue without what is lost: --resume-changed."
    try:
        with opened(path) as file:
            content = file.read(position)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", remedy) from None
    if len(content) < position:
        raise CheckpointError(
            f"{path} has {len(content):,} bytes, but had {position:,} when the checkpoint was "
            f"written: metrics of the rounds before it are lost",
            remedy,
        )
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        problem = f"{path} is damaged: its first {position:,} bytes are not those that were written"
        raise CheckpointError(problem, remedy)


class MetricsFile:
    """`metrics.jsonl`, one JSON object per line, and TensorBoard events if that is installed.
    Behind `position`, its bytes at the resumed checkpoint, the file is cut off; events after
    `step`, the local iterations done then, are marked void.
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
            problem = f"cannot write {error.filename or self._path}: {error.strerror}"
            raise SaveError(problem, _WRITABLE) from error

    def write(
        self, kind: str, round: int, step: int, client: ClientId, values: Mapping[str, Any]
    ) -> None:
        """Write a line, and a TensorBoard scalar for every number in `values`."""
        line = {"kind": kind, "round": round, "iteration": step, "client": client, **values}
        text = json.dumps(line, ensure_ascii=False) + "\n"
        written = text.encode(errors="backslashreplace")  # as JSON escapes halves of pairs
        with writing(self._path, _RESUME):
            self._file.write(written)
            self._digest.update(written)
            for name, value in values.items() if self._events is not None else ():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}/{client}", value, step)

    def flush(self) -> tuple[int, str]:
        """Flush all to disk; return the length of metrics.jsonl in bytes and its SHA-256."""
        with writing(self._path, _RESUME):
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._events is not None:
                self._events.flush()
        return self._file.tell(), self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


_RESUME = "Free some space and resume."
_WRITABLE = "Check the permissions of that folder, and that the disk is not full."


def _events(folder: Path, purge: int | None) -> Any:
    """Return TensorBoard's writer; None if it is not installed. Raises OSError."""
    if not available("tensorboard"):
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge)


@dataclass(frozen=True)
class Released:
    """`released.jsonl`: the noisy results that may have left a server, each recorded beforehand.

    A server that goes back to a checkpoint repeats rounds. The same result with the same noise
    reveals nothing new; a different one does, and counts in addition to the earlier one.
    """

    path: Path

    def since(self, round: int) -> list[dict[str, Any]]:
        """Return the results since a round: round, phase, content (a hash), number of clients and
        of those drawn; or, if single examples are protected, each client's number of them and
        steps, `windows` and `steps`. Raises CheckpointError if the file is damaged.
        """
        if not self.path.exists():
            return []
        try:
            with opened(self.path) as lines:
                return [result for line in lines if (result := json_of(line))["round"] >= round]
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"{self.path} is damaged ({error}): it is unknown what this run has sent"
            raise CheckpointError(problem, "Start a new run, with another --out.") from None

    def add(self, result: Mapping[str, Any], since: int) -> bool:
        """Record a result unless it is one of `since`; return whether it is new. Results before the
        first round that may be repeated are dropped. Raises SaveError.
        """
        known = self.since(since)
        if result in known:
            return False
        lines = "".join(json.dumps(line) + "\n" for line in [*known, result])
        write_atomically(self.path, lines.encode())
        return True


Messages = Mapping[ClientId, Named]


@dataclass(frozen=True)
class Exchange:
    """The observations of one training exchange: tensors `to/<client>/<name>` and
    `from/<client>/<name>`, with `*` as client if all are equal.
    """

    round: int
    tensors: Named

    def to(self, client: ClientId) -> Tensors:
        """Return what was sent to a client; {} if it was not asked."""
        return under("to/*", self.tensors) or under(f"to/{client}", self.tensors)

    def sent(self, client: ClientId) -> Tensors:
        """Return what a client sent, or the mean if only a sum was received; {} without answer."""
        return under("from/*", self.tensors) or under(f"from/{client}", self.tensors)


class Observations:
    """The folder `audit/` of a run: what was sent in the last `most` training exchanges (None: in
    all), for `coterie audit`. It never leaves this machine.
    """

    def __init__(self, folder: Path, most: int | None) -> None:
        self.folder, self._most = folder, most

    def keep(self, round: int, phase: int, to: Messages, received: Messages) -> None:
        """Write what was sent in one exchange, and delete the oldest. Raises SaveError."""
        tensors = _packed("to", to) | _packed("from", received)
        save(self.folder / f"round-{round:05d}-{phase:03d}.safetensors", tensors, lasting=False)
        for old in self._all()[: -self._most] if self._most is not None else ():
            old.unlink(missing_ok=True)

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("round-*-*.safetensors"), key=lambda p: (len(p.name), p))

    def before(self, round: int) -> list[Exchange]:
        """Return the exchanges before this round, the oldest first. Raises CheckpointError."""
        exchanges = [Exchange(int(path.name.split("-")[1]), load(path)[0]) for path in self._all()]
        return [exchange for exchange in exchanges if exchange.round < round]


def _packed(direction: str, messages: Messages) -> Tensors:
    """Return the messages of one direction; one that is the same for all clients is stored once."""
    first, *others = list(messages.values()) or [Tensors()]
    if others and all(
        one.keys() == first.keys() and all(one[name] is first[name] for name in one)
        for one in others
    ):
        return prefixed(f"{direction}/*", first)
    packed = Tensors()
    for i, message in messages.items():
        packed |= prefixed(f"{direction}/{i}", message)
    return packed
