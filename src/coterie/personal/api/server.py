"""The API server: its routes on one port, one thread for requests, and one for the batch."""

import asyncio
import ipaddress
import re
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from coterie.core.errors import DataError, Refused
from coterie.personal.api.answers import Answers, ChatAnswers, Piece, sse
from coterie.personal.api.guard import (
    CLOSED,
    HEALTH,
    Guard,
    Limits,
    Traffic,
    error_response,
    listening,
    new_token,
    running,
)
from coterie.personal.api.preparation import Preparation, Prepared
from coterie.personal.api.requests import ApiError, ChatRequest, CompletionRequest, parsed, shown
from coterie.personal.api.scheduler import Job, Scheduler
from coterie.personal.loading import ManyModels
from coterie.personal.model import PersonalModel
from coterie.personal.running_batch import ROWS

CONTEXT = 4096  # most tokens of a prompt and its answer if the base's context is longer
QUEUE = 64
# printable ASCII, as a header allows, and not too short to resist guessing
_TOKEN = re.compile(r"[!-~]{8,200}")
# a body of up to so many times the largest size is read and discarded before the error is sent
_DRAIN_FACTOR = 16
_R = TypeVar("_R", bound=BaseModel)
_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    port: int
    host: str = "127.0.0.1"
    token: str = field(default_factory=new_token, repr=False)  # what callers must send
    rows: int = ROWS  # texts that are generated at once
    queue: int = QUEUE  # further texts that may wait
    # most tokens of a prompt and its answer; None: the base's context, at most `CONTEXT`
    context: int | None = None
    access_log: bool = False  # whether requests are logged, without texts
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.token):
            raise Refused(
                "the token is unusable",
                "Give 8 to 200 letters, digits or signs of ASCII without spaces, or leave it out: "
                "then one is made.",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@contextmanager
def served(
    models: Mapping[str, PersonalModel], settings: Settings, report: Callable[[str], None]
) -> Iterator[str]:
    """Serve the models of clients, on one backbone, while the block runs; yield the API's address.
    `report` is called with one line about each internal error of the server. Raises Refused if the
    port is taken, the host is not an address of this machine, or the context is longer than the
    base's; ModelError if the base has no tokenizer.
    """
    together = ManyModels(models)
    with listening(settings.host, settings.port) as listener:
        api = Api(together, settings, report)
        guard = Guard(api.app(), settings.host, settings.token, api.traffic)
        with running(guard, listener, settings.limits), closing(api):
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield f"http://{host}:{listener.getsockname()[1]}/v1"


class Service:
    """An application with its routes; `report` gets one line about each internal error."""

    known: ClassVar[str]  # the routes, for who asks for another one

    def __init__(self, limits: Limits, report: Callable[[str], None]) -> None:
        self.limits, self._report = limits, report
        # a thread of its own, so that a large request delays neither the event loop nor the batch
        self._worker = ThreadPoolExecutor(1, "worker")

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Stop the work of the thread, as far as it can be stopped."""

    def close(self) -> None:
        """Stop all work."""
        self.interrupt()

    def app(self) -> Starlette:
        """Return the application with its routes and error handlers."""
        handlers: dict[Any, Any] = {
            ApiError: _error_answer,
            DataError: _data_error,
            HTTPException: self._no_route,
            ClientDisconnect: _no_answer,
            Exception: self._unexpected,
        }
        return Starlette(routes=self.routes(), exception_handlers=handlers)

    async def parsed(self, request: Request, kind: type[_R]) -> _R:
        """Return the parsed body of a request. Raises ApiError."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(
                415,
                f"The content type must be application/json, and is '{shown(content_type)}'. Send "
                "the header Content-Type: application/json.",
            )
        return parsed(kind, await self.body(request))

    async def body(self, request: Request) -> bytes:
        """Read the body. Raises ApiError if it is too large or too slow."""
        most, body, size = self.limits.body, bytearray(), 0
        length = request.headers.get("content-length", "")
        drained = most * _DRAIN_FACTOR
        try:
            async with asyncio.timeout(self.limits.body_s):
                if not (length.isdecimal() and int(length) > drained):
                    async for chunk in request.stream():
                        size += len(chunk)
                        if size <= most:
                            body += chunk
                        elif size > drained:
                            break
        except TimeoutError:
            raise ApiError(408, "The body of the request did not come in time.") from None
        if size > most or (length.isdecimal() and int(length) > most):
            raise ApiError(413, f"The body has more than {most:,} bytes. Send less at once.")
        return _plain(bytes(body), request.headers.get("content-encoding", ""), most)

    async def worked(self, request: Request, work: Callable[[_A], _B], parameters: _A) -> _B:
        """Return the thread's result. Raises ClientDisconnect, and stops it, if the caller goes."""
        working = self._worker.submit(work, parameters)
        future = asyncio.wrap_future(working)
        if await _disconnects_before(request, future):
            future.cancel()
            # work that already runs can only be interrupted
            if not working.cancel():
                self.interrupt()
            raise ClientDisconnect
        return future.result()

    async def _unexpected(self, request: Request, error: Exception) -> Response:
        """Report an internal error to the operator, and send the caller no details of it."""
        self._report(f"a request failed: {type(error).__name__}: {error}")
        return error_response(ApiError(500, "The server failed.", kind="server_error"))

    async def _no_route(self, request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {shown(request.url.path)}"
        return error_response(
            ApiError(error.status_code, f"There is no {where} here. There are: {self.known}.")
        )


class Api(Service):
    """OpenAI's completions, chat completions and models, for the models of clients. Raises Refused
    if the context is longer than the base's, and ModelError if the base has no tokenizer.
    """

    known = (
        "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
    )

    def __init__(
        self, models: ManyModels, settings: Settings, report: Callable[[str], None]
    ) -> None:
        super().__init__(settings.limits, report)
        limit = models.backbone.context_limit
        if settings.context is not None and settings.context > limit:
            problem = f"--context {settings.context} is longer than the base's, {limit} tokens"
            raise Refused(problem, f"Give at most {limit}.")
        context = settings.context or min(limit, CONTEXT)
        rows, queue = settings.rows, settings.queue
        self.preparation = Preparation(models, context, rows + queue, rows)
        self.scheduler = Scheduler(models, rows, queue, report)
        self.traffic = Traffic(settings.access_log)
        self._begun = int(time.time())

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model}", self.model),
            Route(HEALTH, self.health),
            Route("/metrics", self.metrics),
        ]

    def interrupt(self) -> None:
        self.preparation.interrupt()

    def close(self) -> None:
        super().close()
        self.scheduler.close()

    async def health(self, request: Request) -> Response:
        """Answer probes, which send no token."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Return the counts of requests and texts for Prometheus."""
        return PlainTextResponse(self.traffic.metrics(self.scheduler.texts))

    async def models(self, request: Request) -> Response:
        """List the clients."""
        data = [self._about(client) for client in self.preparation.models.models]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Describe a client's model."""
        return JSONResponse(self._about(self.preparation.client(request.path_params["model"])))

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        parameters = await self.parsed(request, CompletionRequest)
        prepared = await self.worked(request, self.preparation.completion, parameters)
        return await self._answer(request, parameters, prepared, Answers)

    async def chat(self, request: Request) -> Response:
        """Answer the last message of a chat."""
        parameters = await self.parsed(request, ChatRequest)
        prepared = await self.worked(request, self.preparation.chat, parameters)
        return await self._answer(request, parameters, prepared, ChatAnswers)

    def _about(self, client: str) -> dict[str, Any]:
        about = {"id": client, "object": "model", "created": self._begun, "owned_by": "coterie"}
        shares = self.preparation.models.models[client].shares
        return about | ({"weights": shares} if shares else {})

    def begun(self, prepared: Prepared, shapes: type[Answers]) -> tuple[Job, Answers]:
        """Start the answers to prompts, and return them with their format. Raises ApiError."""
        job = Job(prepared, self.preparation.vocabulary, self.scheduler)
        with_logprobs = prepared.continuations[0].sampling.logprobs is not None
        answers = shapes(prepared.client, self.preparation.vocabulary, with_logprobs)
        job.start()
        return job, answers

    async def _answer(
        self,
        request: Request,
        parameters: CompletionRequest | ChatRequest,
        prepared: Prepared,
        shapes: type[Answers],
    ) -> Response:
        """Generate and return the answer, whole or as a stream, unless the caller disconnects."""
        job, answers = self.begun(prepared, shapes)
        if parameters.stream:
            return Stream(job, answers, parameters.stream_options.include_usage)
        work = asyncio.ensure_future(_whole(job, answers))
        try:
            if await _disconnects_before(request, work):
                return await _no_answer()
            return JSONResponse(work.result())
        finally:
            job.cancel()
            work.cancel()


class Stream(StreamingResponse):
    """A stream whose job is cancelled when the caller stops reading."""

    def __init__(self, job: Job, answers: Answers, with_usage: bool = False) -> None:
        events = _events(job, answers, with_usage)
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self.job = job

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.cancel()


def _plain(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without gzip. Raises ApiError: another kind, damaged, or beyond `most`."""
    if encoding.strip().lower() in ("", "identity"):
        return body
    if encoding.strip().lower() != "gzip":
        raise ApiError(415, f"Content-Encoding '{shown(encoding)}': send gzip, or leave it out.")
    unpacked = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = unpacked.decompress(body, most + 1)
    except zlib.error:
        raise ApiError(400, "The body is not gzip, which its Content-Encoding says.") from None
    if len(plain) > most:
        raise ApiError(413, f"The body has more than {most:,} bytes. Send less at once.")
    if not unpacked.eof:
        raise ApiError(400, "The body's gzip ends too early.")
    return plain


async def _whole(job: Job, answers: Answers) -> dict[str, Any]:
    pieces: dict[int, list[Piece]] = {}
    generated = 0
    async for update in job.pieces():
        pieces.setdefault(update.index, []).append(update.piece)
        generated += update.generated
    return answers.response([pieces[index] for index in sorted(pieces)], _usage(job, generated))


async def _events(job: Job, answers: Answers, with_usage: bool) -> AsyncIterator[bytes]:
    generated = 0
    try:
        for event in answers.begin(job.count):
            yield event
        async with aclosing(job.pieces()) as pieces:
            async for update in pieces:
                generated += update.generated
                if encoded := answers.event(update.index, update.piece):
                    yield encoded
        yield answers.end(_usage(job, generated) if with_usage else None)
    except ApiError as error:
        yield sse(error.body())


def _usage(job: Job, generated: int) -> dict[str, int]:
    prompt = job.prepared.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


async def _disconnects_before(request: Request, work: "asyncio.Future[Any]") -> bool:
    """Wait for some work, and return whether the caller disconnects before it is done."""
    # the body has been read, so the next message can only be the disconnect
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return not work.done()
    finally:
        disconnect.cancel()


async def _no_answer(*_: Any) -> Response:
    """Return the answer to a caller who has closed the connection."""
    return Response(status_code=CLOSED)


async def _error_answer(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _data_error(request: Request, error: DataError) -> Response:
    return error_response(ApiError(400, str(error)))
