"""What a server lets nobody do: ask under another name, ask without the token, or be slow."""

import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coterie.personal.api.errors import ApiError, shown

_PORT = re.compile(r":\d{1,5}$")


@dataclass(frozen=True)
class Limits:
    """The limits of requests.

    Args:
        body: Bytes of a request's body.
        head_s: Seconds until a request's head is complete, from the connection or the last answer
            on.
        body_s: Seconds until its body is.
        write_s: Seconds until a caller who does not read what is sent is cut off.
        connections: Open at once.
    """

    body: int = 1 << 20
    head_s: float = 10.0
    body_s: float = 10.0
    write_s: float = 30.0
    connections: int = 512


def error_response(error: ApiError) -> JSONResponse:
    """Return an error as a response, after which the connection is closed: what is left of its
    request is not read.
    """
    return JSONResponse(error.body(), error.status, {"Connection": "close", **error.headers})


class Guard:
    """Middleware that lets a request through if it names this server and has the token.

    Args:
        app: What answers.
        host: The address that the server listens on.
        token: What callers must know.
    """

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app = app
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        try:
            self._check(Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        """Refuse a request to another server's name, or without the token."""
        host = headers.get("host", "")
        if not self._is_own(host):
            raise ApiError(
                403,
                f"This server is not called '{shown(host)}'. Use its address.",
                code="wrong_host",
            )
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.encode("latin-1"), self._token)  # takes always as long
        if scheme.lower() != "bearer" or not known:
            raise ApiError(
                401,
                "Incorrect API key provided. Send the server's token: Authorization: Bearer TOKEN.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_own(self, host: str) -> bool:
        """Whether a request was addressed to this server: by its address, or a name of its own.

        A page of a stranger can have its own name point to this machine (DNS rebinding), and then
        its requests carry that name. They cannot carry an address.
        """
        name = _PORT.sub("", host).removeprefix("[").removesuffix("]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


def protocol(limits: Limits) -> type[H11Protocol]:
    """Return uvicorn's protocol with limits that uvicorn has not: of connections, and of the time
    until a request's head is complete and until a caller reads on.
    """

    class Limited(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            self._expect_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(limits.write_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread.cancel()

        def _expect_head(self) -> None:
            self.loop.call_later(limits.head_s, self._close_unless_asked)

        def _close_unless_asked(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

    return Limited
