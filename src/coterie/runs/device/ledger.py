"""The entries of a device's account, and the files that keep them.

Anchors beside the account and in the runs' folders record its number of entries and their spending:
restoring an older copy, or a loss, is detected by the first anchor that records more. It is not
detected if all of them are reset together, with the whole disk.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from coterie.core.errors import Refused, SaveError
from coterie.core.files import flush
from coterie.core.foreign import MOST_BYTES, json_of, read_text
from coterie.runs.device.limits import OWNERS

Turn = tuple[int, int]  # round, and number of the exchange in it


@dataclass(frozen=True)
class Cost:
    """The privacy that a reply spends."""

    # mu^2 of a Gaussian mechanism, the square of sensitivity over standard deviation of noise
    squared: float = 0.0
    # Rényi divergences, (orders,) over `ORDERS`, of any other mechanism; empty: none
    renyi: tuple[float, ...] = ()


class RunEntries(BaseModel):
    """The account of one run."""

    model_config = ConfigDict(extra="forbid")

    recipe: str
    masked: Turn | None = None  # the last exchange that was answered under masks
    left: dict[int, list[str]] = {}  # digests of the answers of each round


class Spent(BaseModel):
    """The common content of account and anchors."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=0, ge=0)  # entries
    accepted: int = Field(default=0, ge=0)  # times that it went on although entries were missing
    squared: FiniteFloat = Field(default=0.0, ge=0)
    renyi: list[FiniteFloat] = []
    orders: str = ""  # digest of the orders of `renyi`


class Anchor(Spent):
    """The content of an anchor; in a run's folder, with the account of that run."""

    run: RunEntries | None = None


class DeviceLedger(Spent):
    """The content of the account."""

    noised: list[str] = []  # digests of the replies that were charged
    summed: list[str] = []  # digests of the updates that left under masks
    runs: dict[str, RunEntries] = {}

    def charge(self, cost: Cost) -> None:
        """Add the cost of a reply. Raises Refused for an impossible cost."""
        self.squared += cost.squared
        if cost.renyi:
            from coterie.aggregation.accountant import ORDERS

            orders = sha256(ORDERS.tobytes()).hexdigest()
            if self.renyi and self.orders != orders:
                problem = "the account of this device was kept by another version of coterie"
                raise Refused(problem, "Install that version of coterie again.")
            before = np.array(self.renyi) if self.renyi else 0.0
            self.renyi, self.orders = (before + np.array(cost.renyi)).tolist(), orders
        if not all(map(math.isfinite, (self.squared, *self.renyi))):
            raise Refused("this reply would have no privacy at all", OWNERS)

    def epsilon(self, delta: float) -> float:
        """Return what has been spent. Raises Refused if it cannot be computed."""
        from coterie.aggregation.accountant import epsilon_of  # torch, which a start does without

        return epsilon_of(self.squared, np.array(self.renyi), delta)


S = TypeVar("S", bound=Spent)


@dataclass(frozen=True)
class LedgerFiles:
    """The files of an account, which survive process exit and power cuts. Beside `path`, the
    account, are a lock and an anchor; another anchor is in each run's folder.
    """

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the files against other readers and writers within the block."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield

    def read(self) -> DeviceLedger:
        """Return the newest account. Raises Refused if it is damaged, missing or older."""
        what = f"the account of this device, {self.path}, "
        anchors = {path: self._stored(path, Anchor) for path in self._anchors()}
        newest = max(anchors, key=lambda path: anchors[path].count, default=None)
        if not self.path.exists():
            if newest is None:
                return DeviceLedger()
            raise _refused(f"{what}is missing: {newest} counts {anchors[newest].count} entries")
        ledger = self._stored(self.path, DeviceLedger)
        if newest is not None and ledger.count < anchors[newest].count:
            raise _refused(
                f"{what}is an older copy: it has {ledger.count} entries, and {newest} counts "
                f"{anchors[newest].count}"
            )
        return ledger

    @property
    def _anchor(self) -> Path:
        return self.path.with_name(f"{self.path.name}.anchor")

    def _anchors(self) -> list[Path]:
        beside = [self._anchor] if self._anchor.exists() else []
        return beside + sorted(self.path.parent.glob(f"*/{self._anchor.name}"))

    def _stored(self, path: Path, kind: type[S]) -> S:
        """Return the content of the account or an anchor. Raises Refused if it is damaged."""
        try:
            digest, _, text = read_text(path, MOST_BYTES).partition("\n")
            if digest != sha256(text.encode()).hexdigest():
                raise ValueError("its checksum does not match")
            return kind.model_validate(json_of(text))
        except (OSError, ValueError) as error:
            which = "" if path == self.path else "an anchor of "
            problem = f"{which}the account of this device, {path}, is damaged"
            raise _refused(f"{problem} ({type(error).__name__})") from None

    def recover(self) -> None:
        """Rewrite the account with all that any undamaged file records. Raises SaveError."""
        anchors = {path: self._if_whole(path, Anchor) for path in self._anchors()}
        ledger = self._if_whole(self.path, DeviceLedger)
        for path, anchor in anchors.items():
            known = ledger.runs.get(path.parent.name)
            if anchor.run is not None and (known is None or anchor.count > ledger.count):
                ledger.runs[path.parent.name] = anchor.run
        newest: Spent = max((ledger, *anchors.values()), key=lambda copy: copy.count)
        for field in Spent.model_fields:
            setattr(ledger, field, getattr(newest, field))
        ledger.accepted += 1
        self.write(ledger)

    def _if_whole(self, path: Path, kind: type[S]) -> S:
        """Return `_stored`, or an empty content if it is damaged."""
        try:
            return self._stored(path, kind)
        except Refused:
            return kind()

    def write(self, ledger: DeviceLedger, run: str = "") -> None:
        """Write an account with one more entry, of this run, and only then all anchors: a process
        killed in between leaves an account ahead of them, which is harmless. Raises SaveError.
        """
        ledger.count += 1
        _store(self.path, ledger)
        spent = ledger.model_dump(include=set(Spent.model_fields))
        for path in {self._anchor, self.path.parent / run / self._anchor.name, *self._anchors()}:
            if path.parent.is_dir():
                entries = None if path == self._anchor else ledger.runs.get(path.parent.name)
                _store(path, Anchor(**spent, run=entries))


def _refused(problem: str) -> Refused:
    return Refused(
        f"{problem}; nothing is sent",
        "Put the newest account back. If it is lost, its owner can go on with what is known of it: "
        "coterie client --accept-account. Epsilon over all runs is then no longer a bound.",
    )


def _store(path: Path, content: BaseModel) -> None:
    """Write a file with its checksum and flush it to disk. Raises SaveError."""
    text = json.dumps(content.model_dump(mode="json"))
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(
            os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(f"{sha256(text.encode()).hexdigest()}\n{text}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        flush(path.parent)
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror}; nothing is sent"
        raise SaveError(problem, "Free some space.") from error
