"""The account of all that a device has sent, over all runs. It is on disk before anything is sent,
so it does not depend on a server's memory.

It counts the privacy spent by replies with noise, the answered exchanges of secure aggregation,
each of which is answered once, and different answers in a round. It also fixes each run's recipe.
"""

from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import Refused
from coterie.runs.device.ledger import Cost, DeviceLedger, LedgerFiles, RunEntries, Turn
from coterie.runs.device.limits import OWNERS, Limits

ACCOUNT = ".account"  # its name in a device's folder: no run has one that begins with a dot


@dataclass(frozen=True)
class OutgoingReply:
    """A reply that is about to be sent."""

    run: str  # the run's name
    recipe: str  # digest of the part of the recipe that must stay the same
    turn: Turn  # round and number of the exchange
    contents: str = ""  # digest of the reply
    cost: Cost | None = None  # the privacy that it spends
    masked: bool = False  # whether it is sent under masks


@dataclass(frozen=True)
class Account(LedgerFiles):
    """The account of a device, a file that survives process exit and power cuts. A damaged or
    missing one, or one older than an anchor, is refused, not replaced.
    """

    def verify(self) -> None:
        """Refuse an account that is damaged, missing or older than an anchor. Raises Refused."""
        with self.locked():
            self.read()

    def accept(self) -> None:
        """Continue, as its owner decided, with an account that `verify` refuses. All spending known
        to it or any anchor still counts; missing entries do not. Raises SaveError, or Refused if
        nothing is to be accepted.
        """
        with self.locked():
            try:
                self.read()
            except Refused:
                self.recover()
                return
        problem = f"the account of this device, {self.path}, is whole: nothing is to be accepted"
        raise Refused(problem, "Leave out --accept-account.")

    def epsilon(self, delta: float) -> float:
        """Return the privacy spent over all runs. Raises Refused."""
        with self.locked():
            return self.read().epsilon(delta)

    @property
    def incomplete(self) -> bool:
        """Whether its owner has accepted missing entries. Raises Refused as `verify`."""
        with self.locked():
            return self.read().accepted > 0

    def check(self, leaving: OutgoingReply, limits: Limits) -> None:
        """Refuse, before any work, what could not be sent. Raises Refused."""
        with self.locked():
            _check(self.read(), leaving, limits)

    def record(self, leaving: OutgoingReply, limits: Limits, exchanges: int | None) -> None:
        """Record a reply before it is sent, one of at most `exchanges` different answers in a round
        (None: no limit). Repeating an identical reply costs nothing, except under secure
        aggregation, where nothing is sent twice. Raises Refused or SaveError if it must not be
        sent.
        """
        with self.locked():
            ledger = self.read()
            before = ledger.model_copy(deep=True)
            _check(ledger, leaving, limits)
            run = ledger.runs.setdefault(leaving.run, RunEntries(recipe=leaving.recipe))
            _count(run, leaving, exchanges)
            if leaving.masked:
                _sum(ledger, run, leaving)
            if leaving.cost is not None and (
                leaving.masked or leaving.contents not in ledger.noised
            ):
                _charge(ledger, leaving, leaving.cost, limits)
            if ledger != before:
                self.write(ledger, leaving.run)


def accepted(home: Path) -> str:
    """Call `Account.accept` for a device, and return its meaning in words."""
    Account(home / ACCOUNT).accept()
    return (
        f"Accepted: {home / ACCOUNT} goes on with what was known of it. Entries that are missing "
        f"are not counted: epsilon over all runs is no longer a bound."
    )


def described(home: Path, limits: Limits) -> str:
    """Return, in words, what a device has spent so far. Raises Refused as `Account.epsilon`."""
    sentence = "This device enforces its owner's limits, whatever a run asks for."
    if not limits.noisy:
        return sentence
    account = Account(home / ACCOUNT)
    spent = f"epsilon {account.epsilon(limits.delta):.3g} at delta {limits.delta:g}"
    allowed = "any amount" if limits.epsilon is None else f"{limits.epsilon:g}"
    least = "at least, as entries of its account were lost, " if account.incomplete else ""
    return f"{sentence} Privacy spent over all runs: {least}{spent}; its owner allows {allowed}."


def _check(ledger: DeviceLedger, leaving: OutgoingReply, limits: Limits) -> None:
    """Refuse a reply that the account forbids. Raises Refused."""
    run = ledger.runs.get(leaving.run)
    if run is None and limits.runs is not None and len(ledger.runs) >= limits.runs:
        raise Refused(
            f"limits.runs: this device has already taken part in {limits.runs} runs, its limit",
            OWNERS,
        )
    if run is not None and run.recipe != leaving.recipe:
        problem = "the recipe is not the one that the run began with"
        raise Refused(problem, "Start a new run: the recipe of a run cannot change on a device.")
    if leaving.masked and run is not None and run.masked is not None and leaving.turn <= run.masked:
        then, now = (f"exchange {n} of round {r + 1}" for r, n in (run.masked, leaving.turn))
        raise Refused(
            f"{now} is not answered: this device has answered {then} under masks, and answers each "
            f"exchange once",
            "The difference of two sums would reveal its update. A resumed run continues with a "
            "later round.",
        )


def _count(run: RunEntries, leaving: OutgoingReply, exchanges: int | None) -> None:
    """Count the answers of a round. Raises Refused if there are too many."""
    if exchanges is None:
        return
    left = run.left.setdefault(leaving.turn[0], [])
    if leaving.contents in left:
        return
    if len(left) >= exchanges:
        raise Refused(
            f"limits.exchanges: this device has sent {len(left)} different answers in round "
            f"{leaving.turn[0] + 1}, its limit",
            OWNERS,
        )
    left.append(leaving.contents)


def _sum(ledger: DeviceLedger, run: RunEntries, leaving: OutgoingReply) -> None:
    """Record an answer under masks. Raises Refused if the same update was in another sum."""
    if leaving.contents in ledger.summed:
        raise Refused(
            "this update was already sent under masks, in another run or exchange: the difference "
            "of two sums with it would reveal it",
            "Run the recipe with another seed, or resume the earlier run.",
        )
    ledger.summed.append(leaving.contents)
    run.masked = leaving.turn


def _charge(ledger: DeviceLedger, leaving: OutgoingReply, cost: Cost, limits: Limits) -> None:
    """Add the privacy spent by a reply with noise. Raises Refused beyond the owner's limit."""
    ledger.charge(cost)
    ledger.noised.append(leaving.contents)
    if limits.epsilon is not None and (spent := ledger.epsilon(limits.delta)) > limits.epsilon:
        raise Refused(
            f"limits.epsilon: with this reply {spent:.3g} would be spent over all runs (delta "
            f"{limits.delta:g}); the owner allows {limits.epsilon:g}",
            OWNERS,
        )
