"""One connection to the proxy: whose it is, and which requests are passed on. HTTP is parsed and
written by h11.
"""

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from datetime import UTC, datetime

from coterie.core.errors import Refused, extra
from coterie.deploy.callers import Callers, Keys, Rejected
from coterie.deploy.upstream import HOP, Upstream

try:
    import h11
    import httpx
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError:  # pragma: no cover - they come with Flower
    raise Refused("Flower is not installed", extra("flower")) from None


_MAY = re.compile(rb"/v1/fleet/[a-z-]+")  # Flower's Fleet API
_MESSAGES = b"/v1/fleet/pull-messages"  # by which a device asks whether there is one for it
_KEY, _SIGNATURE, _TIMESTAMP = (
    b"flwr-public-key",
    b"flwr-signature",
    b"flwr-timestamp",
)  # by which Flower knows a device
# seconds for which a signature is taken: a little longer than by the SuperLink, which decides
_FRESH_S = 330.0
_CHUNK = 1 << 18
_ONLY = "Devices may use the Fleet API only"


class Connection:
    """One connection to the proxy, which answers its requests one after the other."""

    def __init__(
        self,
        callers: Callers,
        upstream: Upstream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
    ) -> None:
        self.callers, self.limits, self.upstream = callers, callers.limits, upstream
        self.reader, self.writer, self.address = reader, writer, address
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.header)
        self.device: bytes | None = None

    def leave(self) -> None:
        if self.device is not None:
            self.callers.leave(self.device)

    async def serve(self) -> None:
        """Answer requests until there are no more, or one is rejected."""
        try:
            while await self._one():
                self.http.start_next_cycle()
        except Rejected as rejected:
            await self._reject(rejected)

    async def _one(self) -> bool:
        """Answer one request; return whether another may follow."""
        async with asyncio.timeout(
            self.limits.idle if self.device is not None else self.limits.request
        ):
            request = await self._request()
        if request is None:
            return False
        length = _length(request)
        self._recognise(request)
        if length > (self.limits.strange_body if self.device is None else self.limits.body):
            raise Rejected(413, "Too large")
        if self.http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        if self.device is None:
            async with asyncio.timeout(self.limits.request):
                body = b"".join([part async for part in self._body()])
            async with self.callers.strangers_at_once:
                await self._pass_on(request, body, length)
        elif request.target == _MESSAGES and length <= self.limits.strange_body:
            body = b"".join([part async for part in self._body()])
            await self._answer(self.upstream.held(request, body, self._has_left))
        elif length > self.limits.large:
            async with self.callers.device(self.device).large:
                await self._pass_on(request, self._body(length), length)
        else:
            await self._pass_on(request, self._body(length), length)
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE

    def _has_left(self) -> bool:
        """Return whether the caller has hung up."""
        return self.reader.at_eof() or self.reader.exception() is not None

    async def _request(self) -> h11.Request | None:
        """Return the header of the next request; None when there is none. Raises Rejected for
        something else.
        """
        try:
            event = await self._event()
        except h11.RemoteProtocolError:
            raise Rejected(403, _ONLY) from None
        return event if isinstance(event, h11.Request) else None

    async def _event(self) -> h11.Event | None:
        """Return the next part of a request; None if no more is read on this connection."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_CHUNK))
        return event if isinstance(event, h11.Event) else None

    def _recognise(self, request: h11.Request) -> None:
        """Find out whose connection this is, if that was not known yet. Raises Rejected if a
        device has too many.
        """
        keys = self.callers.keys()
        key = self.address.encode() if keys is None else _signer(request, keys)
        if key != self.device:
            self.leave()
            self.device = None
            if key is not None:
                self.callers.enter(key)
                self.device = key

    async def _body(self, length: int = 0) -> AsyncIterator[bytes]:
        """Yield the body of a request in pieces. A device that pauses for long, or sends too
        slowly, is cut off.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self.limits.idle + length / self.limits.slowest
        while True:
            async with asyncio.timeout_at(min(end, loop.time() + self.limits.idle)):
                event = await self._event()
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise ConnectionAbortedError
            yield bytes(event.data)

    async def _pass_on(
        self, request: h11.Request, content: bytes | AsyncIterator[bytes], length: int
    ) -> None:
        await self._answer(self.upstream.forward(request, content, length))

    async def _answer(self, forwarded: Awaitable[httpx.Response]) -> None:
        """Answer with the SuperLink's response."""
        try:
            response = await forwarded
        except httpx.TransportError:
            raise Rejected(503, "The SuperLink does not answer") from None
        try:
            headers = [
                (name, value) for name, value in response.headers.raw if name.lower() not in HOP
            ]
            await self._send(
                h11.Response(
                    status_code=response.status_code,
                    headers=headers,
                    reason=response.reason_phrase.encode(),
                )
            )
            async for part in response.aiter_raw(_CHUNK):
                await self._send(h11.Data(data=part))
            await self._send(h11.EndOfMessage())
        finally:
            await response.aclose()

    async def _send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            self.writer.write(data)
            async with asyncio.timeout(self.limits.idle):
                await self.writer.drain()

    async def _reject(self, rejected: Rejected) -> None:
        """Say why a request is not passed on, and discard the rest of it."""
        text = rejected.reason.encode()
        headers = [
            ("Content-Length", str(len(text))),
            ("Connection", "close"),
            ("Content-Type", "text/plain"),
        ]
        await self._send(h11.Response(status_code=rejected.status, headers=headers, reason=text))
        await self._send(h11.Data(data=text))
        await self._send(h11.EndOfMessage())
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger):
                while await self.reader.read(_CHUNK):
                    pass


def _length(request: h11.Request) -> int:
    """Return the bytes of the body. Raises Rejected for requests that devices may not send, that
    come from a web page, or whose length two programs might read differently.
    """
    lengths = [value for name, value in request.headers if name == b"content-length"]
    odd = any(name in (b"transfer-encoding", b"origin") for name, _ in request.headers)
    if (
        request.method != b"POST"
        or not _MAY.fullmatch(request.target)
        or odd
        or len(lengths) != 1
        or not lengths[0].isdigit()
    ):
        raise Rejected(403, _ONLY)
    return int(lengths[0])


def _signer(request: h11.Request, keys: Keys) -> bytes | None:
    """Return the known key that signed a request, or None for an unknown caller. Flower has
    devices sign the current time.
    """
    credentials = [
        [value for name, value in request.headers if name == header]
        for header in (_KEY, _SIGNATURE, _TIMESTAMP)
    ]
    if any(len(values) != 1 for values in credentials):
        return None
    (shown,), (signature,), (timestamp,) = credentials
    try:
        pem = base64.b64decode(shown, validate=True)
        key = keys.get(pem)
        signed = datetime.fromisoformat(timestamp.decode())
        if (
            key is None
            or signed.tzinfo is None
            or abs((datetime.now(UTC) - signed).total_seconds()) > _FRESH_S
        ):
            return None
        key.verify(base64.b64decode(signature, validate=True), timestamp, ec.ECDSA(hashes.SHA256()))
    except (ValueError, OverflowError, InvalidSignature):
        return None
    return pem
