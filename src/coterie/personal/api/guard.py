"""The port and thread of the API and of the web pages, and their protection against requests to
other host names, from foreign pages or without the token, and against slow or too many connections.
"""

import errno
import gc
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coterie.core.errors import Refused
from coterie.core.strangers import Strangers
from coterie.personal.api.requests import ApiError, shown

_HEAD = 1 << 15  # most bytes of a request's head
_WAITING = 1024  # connections that the system queues until they are accepted
_ACCEPTED = 8  # at a time: fewer are slow; with more, new ones replace one that just came
HEALTH = "/health"
CLOSED = 499  # as nginx has it: the caller has closed the connection
_STRANGE = (401, 403, 404, 405)  # of requests whose path and method a stranger may have made up
_access = logging.getLogger("coterie.access")
_PORT = re.compile(r":\d{1,5}$")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # a link may contain the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """The limits of requests."""

    body: int = 1 << 20  # the largest body of a request, in bytes
    head_s: float = 10.0  # to receive a request's head, from the connection or the last answer on
    body_s: float = 10.0  # to receive a request's body
    write_s: float = 30.0  # until a caller who does not read the answer is disconnected
    # open connections; another one replaces the oldest whose caller has not sent the token
    connections: int = 512
    of_an_address: int = 64  # those from one address whose callers have not sent the token


def new_token() -> str:
    """Return a new random token of 192 bits."""
    return secrets.token_urlsafe(24)


def error_response(error: ApiError) -> JSONResponse:
    """Return an error as a response that closes the connection, so that the rest is not read."""
    return JSONResponse(error.body(), error.status, {"Connection": "close", **error.headers})


class Traffic:
    """The requests that a server has answered, by path and status; as it is asked to, each is a
    line of the log `coterie.access`, with neither texts nor who asked.
    """

    def __init__(self, log: bool = False) -> None:
        self._log, self._answers, self._seconds = log, Counter[tuple[str, int]](), 0.0

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an answer. Paths that are not this server's are counted as one."""
        path = "other" if status in _STRANGE else path
        self._answers[path, status] += 1
        self._seconds += seconds
        if self._log:
            figures = {"method": method, "path": path, "status": status, "seconds": seconds}
            _access.info("%s %s %d %.3f s", method, path, status, seconds, extra=figures)

    def metrics(self, texts: int) -> str:
        """Return the figures in the text format of Prometheus, with the number of texts at work."""
        lines = ["# TYPE coterie_requests_total counter"]
        for (path, status), count in sorted(self._answers.items()):
            labels = f'path="{path}",status="{status}"'
            lines.append(f"coterie_requests_total{{{labels}}} {count}")
        lines += [
            "# TYPE coterie_request_seconds_total counter",
            f"coterie_request_seconds_total {self._seconds:.6f}",
            "# TYPE coterie_texts gauge",
            f"coterie_texts {texts}",
        ]
        return "\n".join(lines) + "\n"


class Guard:
    """Middleware that accepts requests to this server, from no foreign page, with the token."""

    # the Content-Security-Policy of every answer
    policy = "default-src 'none'; frame-ancestors 'none'"

    def __init__(self, app: ASGIApp, host: str, token: str, traffic: Traffic | None = None) -> None:
        self.app, self._traffic = app, traffic or Traffic()
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        app, statuses, begun = self.app, [CLOSED], time.monotonic()
        request, send = Request(scope), self._marked(send, statuses)
        try:
            self._check(request)
        except ApiError as error:
            app = self.refusal(error)
        try:
            await app(scope, receive, send)
        finally:
            took = time.monotonic() - begun
            self._traffic.count(request.method, request.url.path, statuses[-1], took)

    def refusal(self, error: ApiError) -> ASGIApp:
        """Return the application that answers a refused request."""
        return error_response(error)

    def token_of(self, request: Request) -> str:
        """Return the token of a request; "" if it has none."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else ""

    def _marked(self, send: Send, statuses: list[int]) -> Send:
        """Return `send` with the security headers added to every answer, whose status is noted."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Content-Security-Policy", self.policy)
            await send(message)

        return marked

    def _check(self, request: Request) -> None:
        """Refuse a request to another server's name, from a foreign page, or without the token."""
        host = request.headers.get("host", "")
        if not self._is_own(host):
            remedy = f"This server is not called '{shown(host)}'. Use its address."
            raise ApiError(403, remedy, code="wrong_host")
        if _is_foreign(request):
            raise ApiError(403, "Pages of others may not use this server.", code="wrong_origin")
        if request.url.path == HEALTH:  # probes have no token, and learn nothing
            return
        given = self.token_of(request).encode("latin-1", "replace")
        # a comparison in constant time reveals nothing about the token
        if not hmac.compare_digest(given, self._token):
            raise ApiError(
                401,
                "Incorrect API key provided. Send the server's token: Authorization: Bearer TOKEN.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request.state.recognised()

    def _is_own(self, host: str) -> bool:
        """Return whether a request's Host is an address or a name of this server. The requests of a
        page that has its name resolve to this machine (DNS rebinding) carry that name.
        """
        name = _PORT.sub("", host).removeprefix("[").removesuffix("]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


def _is_foreign(request: Request) -> bool:
    """Return whether the browser's headers name another server's page as a request's source.
    Following a link from such a page is allowed: it opens this server's own page.
    """
    headers = request.headers
    if (origin := headers.get("origin")) is not None:
        return origin.partition("://")[2] != headers["host"]
    site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode")
    return site not in ("none", "same-origin") and mode != "navigate"


class PageGuard(Guard):
    """The guard of the API with the token in the page's link, and after that in a cookie."""

    policy = (
        "default-src 'self'; img-src 'self' data: blob:; script-src 'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    def __init__(self, page: ASGIApp, host: str, port: int, token: str) -> None:
        super().__init__(self._answer, host, token)
        # browsers send a cookie to every port of a host, so its name contains the port
        self._page, self._cookie = page, f"coterie-{port}"

    @property
    def link(self) -> str:
        """The path and query of the page's link."""
        return f"/?token={self._token.decode()}"

    def refusal(self, error: ApiError) -> ASGIApp:
        text = str(error)
        if error.status == HTTPStatus.UNAUTHORIZED:
            text = "Open the whole link that coterie serve has printed: it has a token in it."
        return PlainTextResponse(text, error.status, {"Connection": "close"})

    def token_of(self, request: Request) -> str:
        return _linked(request) or request.cookies.get(self._cookie, "")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (token := _linked(request := Request(scope))):
            await self._welcome(request, token)(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    def _welcome(self, request: Request, token: str) -> Response:
        """Return the answer to the link: a cookie, and a redirect to the page without the token."""
        # If the link is on a foreign page, browsers attribute a redirect to that page and do not
        # send the cookie; a refresh is attributed to this page.
        foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        response = (
            Response(headers={"Refresh": "0; url=/"})
            if foreign
            else Response(status_code=303, headers={"Location": "/"})
        )
        response.set_cookie(self._cookie, token, httponly=True, samesite="strict")
        return response


def _linked(request: Request) -> str:
    """Return the token of a request to the page's link; "" for other requests."""
    return request.query_params.get("token", "") if request.url.path == "/" else ""


def protocol(limits: Limits) -> type[H11Protocol]:
    """Return uvicorn's protocol with limits on connections, and on the time to send a request's
    head and to read the answer. A connection counts as a stranger's until the app has called
    `recognised` of a request's state.
    """

    class Limited(H11Protocol):
        strangers: ClassVar[Strangers["Limited"]] = Strangers(
            limits.of_an_address, lambda connection: connection.transport.abort()
        )
        known: ClassVar[set["Limited"]] = set()

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Otherwise an answer waits until the caller acknowledges its head: 40 ms on a kept
            # connection. asyncio does this for sockets with the number of a protocol alone.
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.app_state = {**self.app_state, "recognised": self._recognise}
            address, _ = self.client or ("", 0)
            self.strangers.admit(self, address, limits.connections - len(self.known))
            self._waiting = self.loop.call_later(limits.head_s, self._close_unless_asked)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.strangers.leave(self)
            self.known.discard(self)
            self._waiting.cancel()

        def _recognise(self) -> None:
            self.strangers.leave(self)
            if self in self.connections:  # it may have been closed meanwhile
                self.known.add(self)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._waiting.cancel()
            self._waiting = self.loop.call_later(limits.head_s, self._close_unless_asked)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(limits.write_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread.cancel()

        def _close_unless_asked(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

    return Limited


@contextmanager
def running(guard: Guard, listener: socket.socket, limits: Limits) -> Iterator[None]:
    """Answer requests, by an application behind its guard, while the block runs."""
    # without any log of texts or callers
    configuration = uvicorn.Config(
        guard,
        http=protocol(limits),
        ws="none",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=_HEAD,
        backlog=_ACCEPTED,
    )
    server = uvicorn.Server(configuration)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    listener.listen(_WAITING)
    gc.freeze()  # else every full collection goes through libraries and models: 0.2 s and more
    try:
        yield
    finally:
        gc.unfreeze()
        server.should_exit = True
        thread.join()


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens while the block runs; port 0: any free one. Raises Refused if the
    port is taken, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_WAITING)
    except socket.gaierror:
        raise Refused(f"--host {host!r} is no address", "For example 127.0.0.1.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {port} is taken"
            raise Refused(problem, f"Give another one, for example --port {port + 1}.") from None
        remedy = "Give an address of this machine, for example --host 127.0.0.1."
        raise Refused(f"cannot listen on {host} port {port}: {error.strerror}", remedy) from None
    with listener:
        yield listener
