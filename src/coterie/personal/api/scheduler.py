"""The thread of the running batch, and the requests that wait for its tokens."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from coterie.core.errors import CoterieError
from coterie.personal.api.answers import Answer, Piece, spoken
from coterie.personal.api.preparation import Prepared
from coterie.personal.api.requests import ApiError
from coterie.personal.loading import ManyModels
from coterie.personal.running_batch import Continuation, Progress, RunningBatch
from coterie.personal.text_inference import Vocabulary

RETRY_S = 1  # seconds after which a caller may try again if the server is full


class Full(CoterieError):
    """A server that has no room for more requests at the moment."""


@dataclass(eq=False)
class _Work:
    """A continuation, its request, and the number of its unfinished texts."""

    continuation: Continuation
    job: "Job"
    left: int


class Scheduler:
    """The running batch of a server: `rows` texts are continued at once, `queue` more may wait, and
    `report` is called with one line about each internal error of the server.
    """

    def __init__(
        self, models: ManyModels, rows: int, queue: int, report: Callable[[str], None]
    ) -> None:
        self.models, self.rows, self.capacity = models, rows, rows + queue
        self._report = report
        self._changed = threading.Condition()
        self._work: dict[Continuation, _Work] = {}
        self._new: list[Continuation] = []
        self._cancelled: list[Continuation] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="batch", daemon=True)
        self._thread.start()

    def submit(self, continuations: Sequence[Continuation], job: "Job") -> None:
        """Queue prompts to be continued, all or none of them, from any thread. Raises Full."""
        with self._changed:
            texts = self.texts
            if self._closing or texts + sum(one.choices for one in continuations) > self.capacity:
                raise Full(f"{texts} texts are being written or wait", "Try again later.")
            self._work |= {one: _Work(one, job, one.choices) for one in continuations}
            self._new += continuations
            self._changed.notify()

    @property
    def texts(self) -> int:
        """The number of texts that are being written or wait."""
        return sum(work.left for work in self._work.copy().values())

    def cancel(self, continuations: Sequence[Continuation]) -> None:
        """Stop unfinished continuations, from any thread; their request gets no further token."""
        with self._changed:
            self._cancelled += [one for one in continuations if self._work.pop(one, None)]
            self._changed.notify()

    def close(self) -> None:
        """Stop all texts, and wait for the thread to end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        batch = RunningBatch(self.models, self.rows)
        while self._take_up(batch):
            try:
                updates = batch.step()
            # a failed computation, such as out of memory, must not stop the server
            except Exception as error:
                self._report(f"a batch failed: {type(error).__name__}: {error}")
                batch = RunningBatch(self.models, self.rows)
                self._fail(error)
                continue
            for progress in updates:
                self._pass_on(batch, progress)
        self._fail(Full("the server is stopping", "Start it again."))

    def _take_up(self, batch: RunningBatch) -> bool:
        """Wait for work, add and remove continuations. Return False when the scheduler closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._new or self._cancelled or batch.busy
            )
            for one in self._new:
                batch.add(one)
            for one in self._cancelled:
                batch.remove(one)
            self._new, self._cancelled = [], []
            return not self._closing

    def _pass_on(self, batch: RunningBatch, progress: Progress) -> None:
        """Pass a token to its request, and remove a finished text from the batch."""
        with self._changed:
            work = self._work.get(progress.of)
        if work is None:
            return
        try:
            if progress.error is not None:
                raise progress.error
            over = work.job.progress(progress)
        # an error of one request, such as in decoding its tokens, must not affect the others
        except Exception as error:
            self._report(f"a request failed: {type(error).__name__}: {error}")
            work.job.failed(error)
            work.job.cancel()
            return
        if over:
            batch.remove(progress.of, progress.choice)
            with self._changed:
                work.left -= 1
                if not work.left:
                    self._work.pop(progress.of, None)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            jobs = dict.fromkeys(work.job for work in self._work.values())
            self._work, self._new, self._cancelled = {}, [], []
        for job in jobs:
            job.failed(error)


@dataclass(frozen=True)
class Update:
    """A new piece of one of a request's answers."""

    index: int  # of the answer; those of the first prompt come first
    piece: Piece
    generated: int  # tokens that were generated for the piece


@dataclass
class _Place:
    """The state of one of a request's answers."""

    index: int
    echo: str
    answer: Answer
    begun: bool = False
    over: bool = False


class Job:
    """A request whose answers are being generated. Created and read in the event loop; the
    scheduler calls `progress` and `failed` in its own thread.
    """

    def __init__(self, prepared: Prepared, vocabulary: Vocabulary, scheduler: Scheduler) -> None:
        self.prepared, self.vocabulary, self.scheduler = prepared, vocabulary, scheduler
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._answers: dict[tuple[Continuation, int], _Place] = {}
        for one, echo in zip(prepared.continuations, prepared.echoes, strict=True):
            for choice in range(one.choices):
                answer = Answer(vocabulary, prepared.stops, len(echo), prepared.chat)
                self._answers[one, choice] = _Place(len(self._answers), echo, answer)

    @property
    def count(self) -> int:
        """The number of answers."""
        return len(self._answers)

    def start(self) -> None:
        """Submit the prompts to the scheduler. Raises ApiError if it is full."""
        try:
            self.scheduler.submit(self.prepared.continuations, self)
        except Full:
            raise ApiError(
                429,
                "Too many requests are being answered or wait. Try again later.",
                code="rate_limit_exceeded",
                kind="rate_limit_error",
                headers={"Retry-After": str(RETRY_S)},
            ) from None

    def cancel(self) -> None:
        """Stop the unfinished answers."""
        self.scheduler.cancel(self.prepared.continuations)

    async def pieces(self) -> AsyncGenerator[Update, None]:
        """Yield pieces until all answers have ended. Raises ApiError if the batch failed."""
        left = self.count
        while left:
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise ApiError(500, "The server failed to answer.", kind="server_error") from update
            left -= update.piece.finish is not None
            yield update

    def progress(self, progress: Progress) -> bool:
        """Add a token; return whether it ends its text, by itself or by a stop text."""
        place = self._answers[progress.of, progress.choice]
        if place.over:
            return False
        piece = Piece("", (), progress.finish)
        if progress.token is not None:
            piece = place.answer.add(progress.token, progress.finish)
        if not place.begun:
            prompt = spoken(self.vocabulary, progress.of.scored)
            piece = Piece(place.echo + piece.text, prompt + piece.tokens, piece.finish)
        place.begun, place.over = True, piece.finish is not None
        if place.over and (text := progress.of.text):
            model = self.scheduler.models.models[progress.of.client]
            model.observe(text + place.answer.text, generated=True)
        self._put(Update(place.index, piece, int(progress.token is not None)))
        return place.over

    def failed(self, error: Exception) -> None:
        """Pass an error on to the reader; no token follows it."""
        self._put(error)

    def _put(self, update: Update | Exception) -> None:
        # the event loop is closed if the server has stopped
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
