"""How long a method will still take."""

import time

from coterie.reports.tables import clock


class RoundTimer:
    """The progress of one method's rounds in this session, and the time that the rest will take.

    The current round counts as the share of its clients' replies that have arrived, of as many as
    the round before had; in the first round, of as many as were asked. The time left follows from
    the mean round of this session, scoring and checkpoints included, as of the last reply. The time
    until the first reply is left out, as it warms up. During the first tenth of the rounds, the
    estimate from before the start, `expected`, counts as well: seconds for all rounds, and
    everything between and after them.
    """

    def __init__(self, rounds: int, done: int, expected: float | None = None) -> None:
        self.rounds, self.done, self.expected = rounds, done, expected
        self.started = time.monotonic()
        # the time of the first reply, and the rounds done by then
        self._warm: tuple[float, float] | None = None
        self._first, self._usual = done, 0
        self._replies = self._expected = self.clients = self.got = 0
        # the time of the estimate, and the seconds left then
        self._estimate: tuple[float, float] | None = None
        self._exchange = self.started

    def ask(self, clients: int, training: bool) -> None:
        """Note the start of an exchange, in a round or outside of one."""
        self.clients, self.got, self._exchange = clients, 0, time.monotonic()
        if training:
            self._expected = max(self._usual, self._replies + clients)

    def reply(self) -> None:
        """Note a client's reply to an exchange of a round."""
        self.got += 1
        self._replies += 1
        self._guess()

    def score(self) -> None:
        """Note a client's reply to any other exchange."""
        self.got += 1
        if self.rounds_done >= self.rounds:  # only this exchange is left
            now = time.monotonic()
            self._estimate = (
                now,
                (now - self._exchange) / self.got * max(self.clients - self.got, 0),
            )

    def round(self, done: int) -> None:
        self.done, self._usual = done, self._replies
        self._replies = self._expected = self.clients = self.got = 0
        self._guess()

    @property
    def rounds_done(self) -> float:
        """The completed rounds, and the share of the current one."""
        return min(self.done + self._replies / max(self._expected, self._replies, 1), self.rounds)

    def _guess(self) -> None:
        now, done = time.monotonic(), self.rounds_done
        if self._warm is None:
            self._warm = now, done
        since, warm = self._warm
        rest = self.rounds - done
        if done > warm:
            left = (now - since) / (done - warm) * rest
            weight = min(10 * (done - warm) / max(self.rounds, 1), 1.0)
            prior = left if self.expected is None else self.expected * rest / max(self.rounds, 1)
            self._estimate = now, weight * left + (1 - weight) * prior

    @property
    def resumed(self) -> bool:
        return self._first > 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """The seconds left; None while there is no estimate."""
        if self._estimate is None and self.expected is None:
            return None
        share = (self.rounds - self._first) / max(self.rounds, 1)
        estimated_at, seconds = self._estimate or (
            self.started,
            (self.expected or 0.0) * (share if self.rounds else 1.0),
        )
        return max(seconds - (time.monotonic() - estimated_at), 0.0)

    def __str__(self) -> str:
        return f"{clock(self.elapsed)} so far" if self.left is None else f"{clock(self.left)} left"
