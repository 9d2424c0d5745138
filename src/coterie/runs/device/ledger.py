"""The entries of a device's account, and the files that keep them.

Anchors beside the account and in the runs' folders say how many entries it has had and what they
spent: an older copy that is put back, or a loss, is seen by the first that says more. Nothing is
seen where all of them go back together, with the whole disk.
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
from coterie.core.foreign import MOST_BYTES, json_of, read_text
from coterie.runs.device.limits import OWNERS

Turn = tuple[int, int]  # round, and number of the exchange in it


@dataclass(frozen=True)
class Cost:
    """The privacy that a reply spends.

    Args:
        squared: Of a Gaussian mechanism mu^2, the square of the sensitivity over the standard
            deviation of the noise.
        renyi: Of any other mechanism its Rényi divergences, (orders,) over `ORDERS`; empty: none.
    """

    squared: float = 0.0
    renyi: tuple[float, ...] = ()


class RunEntries(BaseModel):
    """The account of one run."""

    model_config = ConfigDict(extra="forbid")

    recipe: str
    masked: Turn | None = None  # the last exchange that was answered under masks
    left: dict[int, list[str]] = {}  # digests of the answers of each round


class Spent(BaseModel):
    """What the account and its anchors both hold."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=0, ge=0)  # entries
    accepted: int = Field(default=0, ge=0)  # times that it went on although entries were missing
    squared: FiniteFloat = Field(default=0.0, ge=0)
    renyi: list[FiniteFloat] = []
    orders: str = ""  # digest of the orders of `renyi`


class Anchor(Spent):
    """The content of an anchor; of one in a run's folder with the account of that run."""

    run: RunEntries | None = None


class DeviceLedger(Spent):
    """The content of the account."""

    noised: list[str] = []  # digests of the replies that were charged
    summed: list[str] = []  # digests of the updates that left under masks
    runs: dict[str, RunEntries] = {}

    def charge(self, cost: Cost) -> None:
        """Add what a reply spends. Raises Refused for an impossible cost."""
        self.squared += cost.squared
        if cost.renyi:
            from coterie.aggregation.accountant import ORDERS

            orders = sha256(ORDERS.tobytes()).hexdigest()
            if self.renyi and self.orders != orders:
                raise Refused(
                    "the account of this device was kept by another version of coterie",
                    "Install that version of coterie again.",
                )
            before = np.array(self.renyi) if self.renyi else 0.0
            self.renyi, self.orders = (before + np.array(cost.renyi)).tolist(), orders
        if not all(map(math.isfinite, (self.squared, *self.renyi))):
            raise Refused("this reply would have no privacy at all", OWNERS)

    def epsilon(self, delta: float) -> float:
        """Return what has been spent. Raises Refused where nothing can count it."""
        from coterie.aggregation.accountant import epsilon_of  # torch, which a start does without

        return epsilon_of(self.squared, np.array(self.renyi), delta)


S = TypeVar("S", bound=Spent)


@dataclass(frozen=True)
class LedgerFiles:
    """The files of an account, which outlive their process and a power cut.

    Args:
        path: Of the account; beside it lie a lock and an anchor, and an anchor in the folder of
            each run that is there.
    """

    path: Path

    @contextmanager
    def locked(self) -> Iterator["LedgerFiles"]:
        """Within the block nobody else reads or writes them."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield self

    def read(self) -> DeviceLedger:
        """Return the newest account. Raises Refused: it is damaged, missing or older."""
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
        """Return the anchors that there are."""
        beside = [self._anchor] if self._anchor.exists() else []
        return beside + sorted(self.path.parent.glob(f"*/{self._anchor.name}"))

    def _stored(self, path: Path, kind: type[S]) -> S:
        """Return the content of the account or of an anchor. Raises Refused: it is damaged."""
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
        """Write the account again, with all that any undamaged file knows. Raises SaveError."""
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
        """Return what `_stored` does, or an empty one where it is damaged."""
        try:
            return self._stored(path, kind)
        except Refused:
            return kind()

    def write(self, ledger: DeviceLedger, run: str = "") -> None:
        """Write an account with one more entry, of this run, and only then all anchors, so that a
        process killed in between leaves an account ahead of them, which is no harm. Raises
        SaveError.
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
    """Write a file with its checksum, to the disk. Raises SaveError."""
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
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise SaveError(
            f"cannot write {path}: {error.strerror}; nothing is sent", "Free some space."
        ) from error
