"""The thread of the running batch: it takes continuations from many requests, and passes the
generated tokens to each request.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coterie.core.errors import CoterieError
from coterie.personal.many import ManyModels
from coterie.personal.running_batch import Continuation, Progress, RunningBatch


class Listener(Protocol):
    """A request that waits for its continuations. It is called in the scheduler's thread."""

    def progress(self, progress: Progress) -> bool:
        """Add a token; return whether it ends its text, by itself or by a stop text."""

    def failed(self, error: Exception) -> None:
        """Handle an error; no token follows it."""


class Full(CoterieError):
    """A server that has no room for more requests at the moment."""


@dataclass(eq=False)
class _Work:
    """A continuation, its listener, and the number of its unfinished texts."""

    continuation: Continuation
    listener: Listener
    left: int


class Scheduler:
    """The running batch of a server.

    Args:
        models: The models of all clients.
        rows: The number of texts that are continued at once.
        queue: The number of further texts that may wait.
        report: Called with one line about each internal error of the server.
    """

    def __init__(
        self, models: ManyModels, rows: int, queue: int, report: Callable[[str], None]
    ) -> None:
        self.models, self.rows, self.capacity = models, rows, rows + queue
        self._report = report
        self._changed = threading.Condition()
        self._work: dict[Continuation, _Work] = {}
        self._new: list[Continuation] = []
        self._gone: list[Continuation] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="batch", daemon=True)
        self._thread.start()

    def submit(self, continuations: Sequence[Continuation], listener: Listener) -> None:
        """Queue prompts to be continued, all or none of them. May be called from any thread.

        Raises:
            Full: There are too many unfinished texts.
        """
        works = [_Work(one, listener, max(one.choices, 1)) for one in continuations]
        with self._changed:
            texts = sum(work.left for work in self._work.values())
            if self._closing or texts + sum(work.left for work in works) > self.capacity:
                raise Full(f"{texts} texts are being written or wait", "Try again later.")
            self._work |= {work.continuation: work for work in works}
            self._new += continuations
            self._changed.notify()

    def cancel(self, continuations: Sequence[Continuation]) -> None:
        """Stop unfinished continuations; their listener is not called again. May be called from
        any thread.
        """
        with self._changed:
            cancelled = [one for one in continuations if self._work.pop(one, None) is not None]
            self._gone += cancelled
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
                self._tell(batch, progress)
        self._fail(Full("the server is stopping", "Start it again."))

    def _take_up(self, batch: RunningBatch) -> bool:
        """Wait for work, add new continuations to the batch and remove cancelled ones. Return
        False when the scheduler closes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._new or self._gone or batch.busy)
            for one in self._new:
                batch.add(one)
            for one in self._gone:
                batch.remove(one)
            self._new, self._gone = [], []
            return not self._closing

    def _tell(self, batch: RunningBatch, progress: Progress) -> None:
        """Pass a token to its request, and remove a finished text from the batch."""
        with self._changed:
            work = self._work.get(progress.of)
        if work is None:
            return
        try:
            if progress.error is not None:
                raise progress.error
            over = work.listener.progress(progress)
        # an error of one request, such as in decoding its tokens, must not affect the others
        except Exception as error:
            self._report(f"a request failed: {type(error).__name__}: {error}")
            work.listener.failed(error)
            self.cancel([w.continuation for w in self._works_of(work.listener)])
            return
        if over:
            batch.remove(progress.of, progress.choice)
            with self._changed:
                work.left -= 1
                if not work.left:
                    self._work.pop(progress.of, None)

    def _works_of(self, listener: Listener) -> list[_Work]:
        with self._changed:
            return [work for work in self._work.values() if work.listener is listener]

    def _fail(self, error: Exception) -> None:
        with self._changed:
            works, self._work = list(self._work.values()), {}
            self._new, self._gone = [], []
        for listener in {id(work.listener): work.listener for work in works}.values():
            listener.failed(error)
