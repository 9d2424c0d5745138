"""The account of what a device has sent so far, over all runs. It is on disk before anything is
sent, so it does not depend on what a server remembers.

What is counted: privacy that replies with noise have spent; exchanges of secure aggregation that
were answered, each of which is answered once; unlike answers in a round; and the recipe of each
run, which stays what it was when the run began.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from coterie.aggregation.accountant import ORDERS, epsilon_of
from coterie.core.errors import Refused, SaveError
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


class _Ledger(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")

    squared: FiniteFloat = Field(default=0.0, ge=0)
    renyi: list[FiniteFloat] = []
    orders: str = ""  # digest of the orders of `renyi`
    noised: list[str] = []  # digests of the replies that were charged
    summed: list[str] = []  # digests of the updates that left under masks
    runs: dict[str, _Run] = {}

    def charge(self, cost: Cost) -> None:
        """Add what a reply spends. Raises Refused for a cost that is not finite, and for Rényi
        divergences of other orders.
        """
        self.squared += cost.squared
        if cost.renyi:
            if self.renyi and self.orders != _ORDERS:
                raise Refused(
                    "the account of this device was kept by another version of coterie",
                    "Install that version of coterie again.",
                )
            before = np.array(self.renyi) if self.renyi else np.zeros(len(ORDERS))
            self.renyi, self.orders = (before + np.array(cost.renyi)).tolist(), _ORDERS
        if not all(map(math.isfinite, (self.squared, *self.renyi))):
            raise Refused("this reply would have no privacy at all", OWNERS)

    def epsilon(self, delta: float) -> float:
        """Return what has been spent. Raises Refused where nothing can count it."""
        return epsilon_of(self.squared, np.array(self.renyi), delta)


_ORDERS = sha256(ORDERS.tobytes()).hexdigest()


@dataclass(frozen=True)
class Account:
    """The account of a device, a file that outlives its process and a power cut. One that is
    damaged is refused, not begun afresh.

    Args:
        path: The file; beside it lies a lock.
    """

    path: Path

    def epsilon(self, delta: float) -> float:
        """Return the privacy spent over all runs. Raises Refused: the file is damaged, or opacus is
        not installed.
        """
        with self._locked():
            return self._read().epsilon(delta)

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
                self._write(ledger)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield

    def _read(self) -> _Ledger:
        try:
            digest, _, text = self.path.read_text(encoding="utf-8").partition("\n")
            if digest != sha256(text.encode()).hexdigest():
                raise ValueError("its checksum does not match")
            return _Ledger.model_validate_json(text)
        except FileNotFoundError:
            return _Ledger()
        except (OSError, ValueError, ValidationError) as error:
            remedy = (
                "Restore a copy of it. Or its owner deletes it to start again: then nobody "
                "knows what was sent before."
            )
            raise Refused(
                f"the account of this device, {self.path}, is damaged ({type(error).__name__}); "
                f"nothing is sent",
                remedy,
            ) from None

    def _write(self, ledger: _Ledger) -> None:
        text = json.dumps(ledger.model_dump(mode="json"))
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            with os.fdopen(
                os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(f"{sha256(text.encode()).hexdigest()}\n{text}")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise SaveError(
                f"cannot write {self.path}: {error.strerror}; nothing is sent", "Free some space."
            ) from error


def described(home: Path, limits: Limits) -> str:
    """Say what a device has sent so far. Raises Refused as `Account.epsilon`."""
    said = "This device enforces its owner's limits, whatever a run asks for."
    if not limits.noisy:
        return said
    spent, allowed = (
        Account(home / ACCOUNT).epsilon(limits.delta),
        "any amount" if limits.epsilon is None else f"{limits.epsilon:g}",
    )
    return (
        f"{said} Privacy spent over all runs: epsilon {spent:.3g} at delta {limits.delta:g}; its "
        f"owner allows {allowed}."
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
