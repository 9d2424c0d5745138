"""The account of what a device has sent so far, over all runs. It is on disk before anything is
sent, so it does not depend on what a server remembers.

What is counted: privacy that replies with noise have spent; exchanges of secure aggregation that
were answered, each of which is answered once; unlike answers in a round; and the recipe of each
run, which stays what it was when the run began.
"""

from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import Refused
from coterie.runs.device.ledger import Cost, DeviceLedger, LedgerFiles, RunEntries, Turn
from coterie.runs.device.limits import OWNERS, Limits

ACCOUNT = ".account"  # its name in a device's folder: no run has one that begins with a dot


@dataclass(frozen=True)
class OutgoingReply:
    """A reply that is about to leave.

    Args:
        run: The run's name.
        recipe: Digest of the part of the recipe that must stay the same.
        turn: Round and number of the exchange.
        contents: Digest of the reply.
        cost: The privacy that it spends; None: none.
        masked: Whether it leaves under masks.
    """

    run: str
    recipe: str
    turn: Turn
    contents: str = ""
    cost: Cost | None = None
    masked: bool = False


@dataclass(frozen=True)
class Account:
    """The account of a device, a file that outlives its process and a power cut. One that is
    damaged, missing or older than an anchor is refused, not begun afresh.

    Args:
        path: The file; see `LedgerFiles`.
    """

    path: Path

    @property
    def _files(self) -> LedgerFiles:
        return LedgerFiles(self.path)

    def verify(self) -> None:
        """Refuse an account that is damaged, missing or older than an anchor. Raises Refused."""
        with self._files.locked() as files:
            files.read()

    def accept(self) -> None:
        """Continue with an account that `verify` refuses, as its owner wants. What it or any anchor
        knows to be spent stays spent; missing entries are not counted. Raises SaveError, and
        Refused if there is nothing to accept.
        """
        with self._files.locked() as files:
            try:
                files.read()
            except Refused:
                files.recover()
                return
        raise Refused(
            f"the account of this device, {self.path}, is whole: nothing is to be accepted",
            "Leave out --accept-account.",
        )

    def epsilon(self, delta: float) -> float:
        """Return the privacy spent over all runs. Raises Refused."""
        with self._files.locked() as files:
            return files.read().epsilon(delta)

    @property
    def incomplete(self) -> bool:
        """Whether its owner has accepted that entries are missing. Raises Refused as `verify`."""
        with self._files.locked() as files:
            return files.read().accepted > 0

    def check(self, leaving: OutgoingReply, limits: Limits) -> None:
        """Refuse, before any work, what could not leave. Raises Refused."""
        with self._files.locked() as files:
            _check(files.read(), leaving, limits)

    def record(self, leaving: OutgoingReply, limits: Limits, exchanges: int | None) -> None:
        """Record a reply before it is sent: one of so many different answers in a round (None: any
        number). An identical reply that was sent before costs nothing more; but with secure
        aggregation nothing is sent twice. Raises Refused and SaveError: it must not be sent.
        """
        with self._files.locked() as files:
            ledger = files.read()
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
                files.write(ledger, leaving.run)


def accepted(home: Path) -> str:
    """Do what `Account.accept` does for a device, and say what that means."""
    Account(home / ACCOUNT).accept()
    return (
        f"Accepted: {home / ACCOUNT} goes on with what was known of it. Entries that are missing "
        f"are not counted: epsilon over all runs is no longer a bound."
    )


def described(home: Path, limits: Limits) -> str:
    """Say what a device has spent so far. Raises Refused as `Account.epsilon`."""
    sentence = "This device enforces its owner's limits, whatever a run asks for."
    if not limits.noisy:
        return sentence
    account = Account(home / ACCOUNT)
    spent = f"epsilon {account.epsilon(limits.delta):.3g} at delta {limits.delta:g}"
    allowed = "any amount" if limits.epsilon is None else f"{limits.epsilon:g}"
    least = "at least, as entries of its account were lost, " if account.incomplete else ""
    return f"{sentence} Privacy spent over all runs: {least}{spent}; its owner allows {allowed}."


def _check(ledger: DeviceLedger, leaving: OutgoingReply, limits: Limits) -> None:
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
        raise Refused(
            f"{now} is not answered: this device has answered {then} under masks, and answers each "
            f"exchange once",
            "The difference of two sums would reveal its update. A resumed run continues with a "
            "later round.",
        )


def _count(run: RunEntries, leaving: OutgoingReply, exchanges: int | None) -> None:
    """Count the answers of a round. Raises Refused: there are too many."""
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
    """Note an answer under masks. Raises Refused: the same update was in another sum."""
    if leaving.contents in ledger.summed:
        raise Refused(
            "this update was already sent under masks, in another run or exchange: the difference "
            "of two sums with it would reveal it",
            "Run the recipe with another seed, or resume the earlier run.",
        )
    ledger.summed.append(leaving.contents)
    run.masked = leaving.turn


def _charge(ledger: DeviceLedger, leaving: OutgoingReply, cost: Cost, limits: Limits) -> None:
    """Add what a reply with noise spends. Raises Refused: the owner does not allow so much."""
    ledger.charge(cost)
    ledger.noised.append(leaving.contents)
    if limits.epsilon is not None and (spent := ledger.epsilon(limits.delta)) > limits.epsilon:
        raise Refused(
            f"limits.epsilon: with this reply {spent:.3g} would be spent over all runs (delta "
            f"{limits.delta:g}); the owner allows {limits.epsilon:g}",
            OWNERS,
        )
