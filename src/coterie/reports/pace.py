"""How fast clients train, and how long a method will still take."""

import time
from collections import deque

from coterie.reports.tables import clock

WINDOW = 60.0  # seconds of training that predictions per second are of


class Throughput:
    """Predictions per second while clients train, over the last `WINDOW` seconds of that:
    scoring and checkpoints are no part of it.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, int]] = deque()  # seconds of training, predictions
        self._seconds, self._predictions = 0.0, 0

    def add(self, seconds: float, predictions: int) -> None:
        self._spans.append((seconds, predictions))
        self._seconds, self._predictions = self._seconds + seconds, self._predictions + predictions
        while self._seconds - self._spans[0][0] >= WINDOW:
            seconds, predictions = self._spans.popleft()
            self._seconds, self._predictions = (
                self._seconds - seconds,
                self._predictions - predictions,
            )

    @property
    def known(self) -> bool:
        return bool(self._spans)

    @property
    def per_second(self) -> float:
        return self._predictions / max(self._seconds, 1e-9)


class RoundTimer:
    """How far the rounds of one method have come in this session, and how long the rest will take.

    A round is as far as the share of its clients' replies that are there, of as many as the round
    before had; of the first one, as many as have been asked. Time left is by the mean round of this
    session, scoring and checkpoints included, as of the last reply. What goes on until the first
    reply is left out, as it warms up; and a tenth of the rounds long, what was expected before the
    start counts as well.

    Args:
        rounds: Of the method.
        done: Of them, before this session.
        expected: Seconds for all rounds, and all that is done between and after them; None where
            nobody knows.
    """

    def __init__(self, rounds: int, done: int, expected: float | None = None) -> None:
        self.rounds, self.done, self.expected = rounds, done, expected
        self.started = time.monotonic()
        self._warm: tuple[float, float] | None = (
            None  # when the first reply was there, and how far the rounds were then
        )
        self._first, self._usual = done, 0
        self._replies = self._expected = self.asked = self.got = 0
        self._estimate: tuple[float, float] | None = None  # when it was made, seconds left then
        self._exchange = self.started

    def ask(self, clients: int, training: bool) -> None:
        """Note that an exchange begins, of a round or outside of one."""
        self.asked, self.got, self._exchange = clients, 0, time.monotonic()
        if training:
            self._expected = max(self._usual, self._replies + clients)

    def reply(self) -> None:
        """Note that a client's reply to an exchange of a round is there."""
        self.got += 1
        self._replies += 1
        self._guess()

    def score(self) -> None:
        """Note that a client's reply to something else is there."""
        self.got += 1
        if self.rounds_done >= self.rounds:  # what is left is this
            now = time.monotonic()
            self._estimate = now, (now - self._exchange) / self.got * max(self.asked - self.got, 0)

    def round(self, done: int) -> None:
        self.done, self._usual = done, self._replies
        self._replies = self._expected = self.asked = self.got = 0
        self._guess()

    @property
    def rounds_done(self) -> float:
        """With the share of the round that is going on."""
        return min(self.done + self._replies / max(self._expected, self._replies, 1), self.rounds)

    def _guess(self) -> None:
        now, here = time.monotonic(), self.rounds_done
        if self._warm is None:
            self._warm = now, here
        since, warm = self._warm
        rest = self.rounds - here
        if here > warm:
            left, known = (
                (now - since) / (here - warm) * rest,
                min(10 * (here - warm) / max(self.rounds, 1), 1.0),
            )
            prior = left if self.expected is None else self.expected * rest / max(self.rounds, 1)
            self._estimate = now, known * left + (1 - known) * prior

    @property
    def resumed(self) -> bool:
        return self._first > 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds; None as long as nobody can know."""
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
