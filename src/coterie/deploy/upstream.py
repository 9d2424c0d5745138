"""The way from the proxy to the SuperLink, and the questions for messages that wait there."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from coterie.core.errors import Refused, extra

try:
    import h11
    import httpx
except ImportError:  # pragma: no cover - they come with Flower
    raise Refused("Flower is not installed", extra("flower")) from None

HOP = {
    b"connection",
    b"expect",
    b"host",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}  # RFC 9110, 7.6.1
_LOOK_S = 0.05  # seconds between looks whether messages have been sent
# Seconds until the SuperLink is asked again for a held question, if nobody said that there are
# messages: as often as devices ask by themselves.
_ASK_S = 3.0


class Upstream:
    """A client of the SuperLink, which forwards the requests of devices.

    Args:
        url: Where the SuperLink listens.
        tls: TLS settings; None: no TLS.
        idle: Seconds without a byte until a request is given up.
        wait: Seconds for which a question for messages is held.
        posted: A file that is touched once messages are there; None: no question is held.
    """

    def __init__(
        self, url: str, tls: ssl.SSLContext | None, idle: float, wait: float, posted: Path | None
    ) -> None:
        self._url, self._wait_s, self._posted = url, wait, posted
        self._sent = asyncio.Event()
        # The SuperLink closes connections that were idle for five seconds, so idle ones are
        # dropped earlier.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self._client = httpx.AsyncClient(
            verify=tls or False, timeout=idle, limits=limits, trust_env=False
        )

    async def close(self) -> None:
        """Close the connections to the SuperLink."""
        await self._client.aclose()

    async def forward(
        self, request: h11.Request, content: bytes | AsyncIterator[bytes], length: int
    ) -> httpx.Response:
        """Forward a request, rewritten so that nothing can hide in it; return the response, whose
        body is not read yet.
        """
        headers = [
            (name, value)
            for name, value in request.headers
            if name not in HOP | {b"content-length"}
        ]
        headers.append((b"content-length", b"%d" % length))
        url = self._url + request.target.decode()
        return await self._client.send(
            httpx.Request("POST", url, headers=headers, content=content), stream=True
        )

    async def held(
        self, request: h11.Request, content: bytes, has_left: Callable[[], bool]
    ) -> httpx.Response:
        """Forward a device's question for messages; where there is none, wait for one.

        Args:
            request: The question.
            content: Its body.
            has_left: Whether the device has hung up: it would not get the message.

        Raises:
            ConnectionAbortedError: It has.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + (0.0 if self._posted is None else self._wait_s)
        while not has_left():
            sent = self._sent  # of what is sent from now on
            response = await self.forward(request, content, len(content))
            nothing = response.is_success and response.headers.get("content-length") == "0"
            left = end - loop.time()
            if not nothing or left <= 0:
                return response
            await response.aclose()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _ASK_S)):
                    await sent.wait()
        raise ConnectionAbortedError

    async def look(self) -> None:
        """Tell those whose questions are held whenever messages have been sent."""
        seen = _changed(self._posted)
        while self._posted is not None:
            await asyncio.sleep(_LOOK_S)
            if (now := _changed(self._posted)) != seen:
                seen, sent, self._sent = now, self._sent, asyncio.Event()
                sent.set()


def _changed(file: Path | None) -> int | None:
    """Return when a file was last changed, ns; None where there is none."""
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None
