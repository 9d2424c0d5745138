"""The account of what a device has sent so far, over all runs. It is on disk before anything is
sent, so it does not depend on what a server remembers.

What is counted: privacy that replies with noise have spent; exchanges of secure aggregation that
were answered, each of which is answered once; unlike answers in a round; and the recipe of each
run, which stays what it was when the run began.

Anchors beside it and in the runs' folders say how many entries it has had and what they spent: an
older copy that is put back, or a loss, is seen by the first that says more. Nothing is seen where
all of them go back together, with the whole disk.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
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
from coterie.runs.limits import OWNERS, Limits

ACCOUNT = ".account"  # its name in a device's folder: no run has one that begins with a dot
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


@dataclass(frozen=True)
class OutgoingReply:
    """A reply that is about to leave.

    Args:
        run: The run's name.
        recipe: Digest of what of its recipe must stay the same.
        turn: Round and number of the exchange.
        contents: Digest of the reply.
        cost: What it spends; None: it is not private, or needs no privacy.
        masked: Whether it goes under masks.
    """

    run: str
    recipe: str
    turn: Turn
    contents: str = ""
    cost: Cost | None = None
    masked: bool = False


class _Run(BaseModel):
    """The account of one run."""

    model_config = ConfigDict(extra="forbid")

    recipe: str
    masked: Turn | None = None  # the last exchange that was answered under masks
    left: dict[int, list[str]] = {}  # digests of the answers of each round


class _Spent(BaseModel):
    """What the account and its anchors both hold."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=0, ge=0)  # entries; 0 of an account that an earlier coterie wrote
    accepted: int = Field(default=0, ge=0)  # times that it went on although entries were missing
    squared: FiniteFloat = Field(default=0.0, ge=0)
    renyi: list[FiniteFloat] = []
    orders: str = ""  # digest of the orders of `renyi`


class _Anchor(_Spent):
    """The content of an anchor; of one in a run's folder with the account of that run."""

    run: _Run | None = None


class _Ledger(_Spent):
    """The content of the account."""

    noised: list[str] = []  # digests of the replies that were charged
    summed: list[str] = []  # digests of the updates that left under masks
    runs: dict[str, _Run] = {}

    def charge(self, cost: Cost) -> None:
        """Add what a reply spends. Raises Refused for a cost that is not finite, and for Rényi
        divergences of other orders.
        """
        self.squared += cost.squared
        if cost.renyi:
            orders = _digest_of_orders()
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


def _digest_of_orders() -> str:
    from coterie.aggregation.accountant import ORDERS

    return sha256(ORDERS.tobytes()).hexdigest()


_S = TypeVar("_S", bound=_Spent)


@dataclass(frozen=True)
class Account:
    """The account of a device, a file that outlives its process and a power cut. One that is
    damaged, missing or older than an anchor is refused, not begun afresh.

    Args:
        path: The file; beside it lie a lock and an anchor, and an anchor in the folder of each
            run that is there.
    """

    path: Path

    def verify(self) -> None:
        """Refuse an account that is damaged, missing or older than an anchor. Raises Refused."""
        with self._locked():
            self._read()

    def accept(self) -> None:
        """Go on with an account that `verify` refuses, as its owner wants. What it or any anchor
        knows to be spent stays spent; entries that are missing are not counted.

        Raises:
            Refused: There is nothing to accept.
            SaveError: It could not be written.
        """
        with self._locked():
            try:
                self._read()
            except Refused:
                self._recover()
            else:
                raise Refused(
                    f"the account of this device, {self.path}, is whole: nothing is to be accepted",
                    "Leave out --accept-account.",
                )

    def epsilon(self, delta: float) -> float:
        """Return the privacy spent over all runs. Raises Refused: see `verify`, or opacus is not
        installed.
        """
        with self._locked():
            return self._read().epsilon(delta)

    @property
    def incomplete(self) -> bool:
        """Whether its owner has accepted that entries are missing. Raises Refused as `verify`."""
        with self._locked():
            return self._read().accepted > 0

    def check(self, leaving: OutgoingReply, limits: Limits) -> None:
        """Refuse, before any work, what could not leave. Raises Refused."""
        with self._locked():
            _check(self._read(), leaving, limits)

    def record(self, leaving: OutgoingReply, limits: Limits, exchanges: int | None) -> None:
        """Record a reply before it is sent. An identical reply that was sent before costs nothing
        more; but with secure aggregation nothing is sent twice.

        Args:
            leaving: The reply.
            limits: Of the owner.
            exchanges: The most unlike answers in a round; None: any number.

        Raises:
            Refused: It may not be sent.
            SaveError: It could not be recorded, so it must not be sent.
        """
        with self._locked():
            ledger = self._read()
            before = ledger.model_copy(deep=True)
            _check(ledger, leaving, limits)
            run = ledger.runs.setdefault(leaving.run, _Run(recipe=leaving.recipe))
            _count(run, leaving, exchanges)
            if leaving.masked:
                _sum(ledger, run, leaving)
            if leaving.cost is not None and (
                leaving.masked or leaving.contents not in ledger.noised
            ):
                _charge(ledger, leaving, leaving.cost, limits)
            if ledger != before:
                self._write(ledger, [self._anchor, self._anchor_of(leaving.run)])

    @property
    def _anchor(self) -> Path:
        return self.path.with_name(f"{self.path.name}.anchor")

    def _anchor_of(self, run: str) -> Path:
        return self.path.parent / run / self._anchor.name

    def _anchors(self) -> list[Path]:
        """Return the anchors that there are."""
        beside = [self._anchor] if self._anchor.exists() else []
        return beside + sorted(self.path.parent.glob(f"*/{self._anchor.name}"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield

    def _read(self) -> _Ledger:
        """Return the newest account. Raises Refused: it is damaged, missing or older."""
        what = f"the account of this device, {self.path}, "
        anchors = {path: self._stored(path, _Anchor) for path in self._anchors()}
        newest = max(anchors, key=lambda path: anchors[path].count, default=None)
        if not self.path.exists():
            if newest is None:
                return _Ledger()
            raise _refused(f"{what}is missing: {newest} counts {anchors[newest].count} entries")
        ledger = self._stored(self.path, _Ledger)
        if newest is not None and ledger.count < anchors[newest].count:
            raise _refused(
                f"{what}is an older copy: it has {ledger.count} entries, and {newest} counts "
                f"{anchors[newest].count}"
            )
        return ledger

    def _stored(self, path: Path, kind: type[_S]) -> _S:
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

    def _recover(self) -> None:
        """Write the account anew, from what is whole of it and of its anchors. Raises SaveError."""
        anchors = {path: self._if_whole(path, _Anchor) for path in self._anchors()}
        ledger = self._if_whole(self.path, _Ledger)
        for path, anchor in anchors.items():
            known = ledger.runs.get(path.parent.name)
            if anchor.run is not None and (known is None or anchor.count > ledger.count):
                ledger.runs[path.parent.name] = anchor.run
        newest: _Spent = max((ledger, *anchors.values()), key=lambda copy: copy.count)
        for field in _Spent.model_fields:
            setattr(ledger, field, getattr(newest, field))
        ledger.accepted += 1
        self._write(ledger, [self._anchor, *anchors])

    def _if_whole(self, path: Path, kind: type[_S]) -> _S:
        """Return what `_stored` does, or an empty one where it is damaged."""
        try:
            return self._stored(path, kind)
        except Refused:
            return kind()

    def _write(self, ledger: _Ledger, anchors: Iterable[Path]) -> None:
        """Write the account with one entry more, and only then its anchors: whoever is killed in
        between has an account that is ahead of them, which is no harm. Raises SaveError.
        """
        ledger.count += 1
        _store(self.path, ledger)
        spent = ledger.model_dump(include=set(_Spent.model_fields))
        for path in anchors:
            if path.parent.is_dir():
                run = None if path == self._anchor else ledger.runs.get(path.parent.name)
                _store(path, _Anchor(**spent, run=run))


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


def accepted(home: Path) -> str:
    """Go on with a device's account, see `Account.accept`, and say what that means. Raises Refused
    and SaveError.
    """
    Account(home / ACCOUNT).accept()
    return (
        f"Accepted: {home / ACCOUNT} goes on with what was known of it. Entries that are missing "
        f"are not counted: epsilon over all runs is no longer a bound."
    )


def described(home: Path, limits: Limits) -> str:
    """Say what a device has sent so far. Raises Refused as `Account.epsilon`."""
    said = "This device enforces its owner's limits, whatever a run asks for."
    if not limits.noisy:
        return said
    account = Account(home / ACCOUNT)
    spent, allowed = (
        account.epsilon(limits.delta),
        "any amount" if limits.epsilon is None else f"{limits.epsilon:g}",
    )
    least = "at least, as entries of its account were lost, " if account.incomplete else ""
    return (
        f"{said} Privacy spent over all runs: {least}epsilon {spent:.3g} at delta "
        f"{limits.delta:g}; its owner allows {allowed}."
    )


def _check(ledger: _Ledger, leaving: OutgoingReply, limits: Limits) -> None:
    """Refuse what the account alone forbids. Raises Refused."""
    run = ledger.runs.get(leaving.run)
    if run is None and limits.runs is not None and len(ledger.runs) >= limits.runs:
        raise Refused(
            f"limits.runs: this device has already taken part in {limits.runs} runs, its limit",
            OWNERS,
        )
    if run is not None and run.recipe != leaving.recipe:
        raise Refused(
            "the recipe is not the one that the run began with",
            "Start a new run: the recipe of a run cannot change on a device.",
        )
    if leaving.masked and run is not None and run.masked is not None and leaving.turn <= run.masked:
        then, now = (
            f"exchange {number} of round {round + 1}"
            for round, number in (run.masked, leaving.turn)
        )
        problem = (
            f"{now} is not answered: this device has answered {then} under masks, and answers "
            f"each exchange once"
        )
        raise Refused(
            problem,
            "The difference of two sums would reveal its update. A resumed run continues "
            "with a later "
            "round.",
        )


def _count(run: _Run, leaving: OutgoingReply, exchanges: int | None) -> None:
    """Count the answers of a round. Raises Refused: there are too many."""
    if exchanges is None:
        return
    left = run.left.setdefault(leaving.turn[0], [])
    if leaving.contents in left:
        return
    if len(left) >= exchanges:
        problem = (
            f"limits.exchanges: this device has sent {len(left)} different answers in round "
            f"{leaving.turn[0] + 1}, its limit"
        )
        raise Refused(problem, OWNERS)
    left.append(leaving.contents)


def _sum(ledger: _Ledger, run: _Run, leaving: OutgoingReply) -> None:
    """Note an answer under masks. Raises Refused: the same update was in another sum."""
    if leaving.contents in ledger.summed:
        problem = (
            "this update was already sent under masks, in another run or exchange: the "
            "difference of two "
            "sums with it would reveal it"
        )
        raise Refused(problem, "Run the recipe with another seed, or resume the earlier run.")
    ledger.summed.append(leaving.contents)
    run.masked = leaving.turn


def _charge(ledger: _Ledger, leaving: OutgoingReply, cost: Cost, limits: Limits) -> None:
    """Add what a reply with noise spends. Raises Refused: it would be more than the owner
    allows.
    """
    ledger.charge(cost)
    ledger.noised.append(leaving.contents)
    if limits.epsilon is not None and (spent := ledger.epsilon(limits.delta)) > limits.epsilon:
        problem = (
            f"limits.epsilon: with this reply {spent:.3g} would be spent over all runs (delta "
            f"{limits.delta:g})"
        )
        raise Refused(f"{problem}; the owner allows {limits.epsilon:g}", OWNERS)
