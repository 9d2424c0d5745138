"""A request whose answers are being generated, and their pieces as they come."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from coterie.personal.api.errors import ApiError
from coterie.personal.api.preparation import Prepared
from coterie.personal.api.scheduler import Full, Scheduler
from coterie.personal.api.texts import Answer, Piece, spoken
from coterie.personal.running_batch import Continuation, Progress
from coterie.personal.vocabulary import Vocabulary

RETRY_S = 1  # seconds after which a caller may try again if the server is full


@dataclass(frozen=True)
class Said:
    """A piece of one of a request's answers.

    Args:
        index: The number of the answer; those of the first prompt come first.
        piece: The new text and tokens.
        generated: The number of tokens that were generated for the piece.
    """

    index: int
    piece: Piece
    generated: int


class Job:
    """A request whose answers are being generated. Created and read in the event loop.

    Args:
        prepared: The prompts of the request.
        vocabulary: The vocabulary of their tokens.
        scheduler: The scheduler that continues the prompts.
    """

    def __init__(self, prepared: Prepared, vocabulary: Vocabulary, scheduler: Scheduler) -> None:
        self.prepared, self.vocabulary, self.scheduler = prepared, vocabulary, scheduler
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[Said | Exception] = asyncio.Queue()
        self._answers: dict[tuple[Continuation, int], _Place] = {}
        for one, echo in zip(prepared.continuations, prepared.echoes, strict=True):
            for choice in range(one.choices):
                answer = Answer(vocabulary, prepared.stops, len(echo))
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

    async def pieces(self) -> AsyncGenerator[Said, None]:
        """Yield pieces until all answers have ended. Raises ApiError if the batch failed."""
        left = len(self._answers)
        while left:
            update = await self._said.get()
            if isinstance(update, Exception):
                raise ApiError(500, "The server failed to answer.", kind="server_error") from update
            left -= update.piece.finish is not None
            yield update

    def progress(self, progress: Progress) -> bool:
        """Add a token to its answer; see `Listener`."""
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
        self._put(Said(place.index, piece, int(progress.token is not None)))
        return place.over

    def failed(self, error: Exception) -> None:
        """Pass an error on to the reader; see `Listener`."""
        self._put(error)

    def _put(self, update: Said | Exception) -> None:
        # the event loop is closed if the server has stopped
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._said.put_nowait, update)


@dataclass
class _Place:
    """The state of one of a request's answers."""

    index: int
    echo: str
    answer: Answer
    begun: bool = False
    over: bool = False
