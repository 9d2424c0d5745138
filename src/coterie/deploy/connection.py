"""One connection to the proxy: whose it is, and which requests are passed on. HTTP is parsed and
written by h11.
"""

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from coterie.core.errors import Refused, extra

if TYPE_CHECKING:
    from coterie.deploy.proxy import Proxy

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
_HOP = {
    b"connection",
    b"expect",
    b"host",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}  # RFC 9110, 7.6.1
_KEY, _SIGNATURE, _TIMESTAMP = (
    b"flwr-public-key",
    b"flwr-signature",
    b"flwr-timestamp",
)  # by which Flower knows a device
# seconds for which a signature is taken: a little longer than by the SuperLink, which decides
_FRESH_S = 330.0
_CHUNK = 1 << 18
_ONLY = "Devices may use the Fleet API only"
Keys = Mapping[bytes, ec.EllipticCurvePublicKey]  # by their PEM, as devices show them


@dataclass(frozen=True)
class Limits:
    """The limits of connections to the proxy.

    Args:
        strangers: Connections without a known key, in all. A further one replaces the oldest.
        of_an_address: The same for connections from one address.
        of_a_device: Connections with the same key.
        asked: Simultaneous requests of unknown callers that are passed on.
        handshake: Seconds for the TLS handshake.
        request: Seconds for a request of an unknown caller, and again for its next one.
        idle: Seconds without a byte until a device's connection is closed.
        slowest: Minimal bytes per second of a device's body, after the first `idle` seconds.
        header: Bytes of a request's header.
        strange_body: Bytes of an unknown caller's body.
        body: Bytes of a device's body. Flower cuts arrays into parts of 5 MiB; of secure
            aggregation it sends a whole reply at once.
        large: Bytes of a body above which a device sends one at a time.
        linger: Seconds for which further bytes of a refused caller are discarded, so that the
            refusal reaches it.
        wait: Seconds for which a device's question for messages waits for one. Devices give up
            after 30.
    """

    strangers: int = 256
    of_an_address: int = 64
    of_a_device: int = 16
    asked: int = 8
    handshake: float = 10.0
    request: float = 10.0
    idle: float = 120.0
    slowest: int = 1 << 14
    header: int = 1 << 14
    strange_body: int = 1 << 12
    body: int = 256 << 20
    large: int = 8 << 20
    linger: float = 1.0
    wait: float = 20.0


class _Rejected(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class _Connection:
    """One connection to the proxy, which answers its requests one after the other."""

    def __init__(
        self,
        proxy: "Proxy",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
    ) -> None:
        self.proxy, self.limits, self.reader, self.writer, self.address = (
            proxy,
            proxy.limits,
            reader,
            writer,
            address,
        )
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.header)
        self.device: bytes | None = None

    def leave(self) -> None:
        if self.device is not None:
            self.proxy.leave(self.device)

    async def serve(self) -> None:
        """Answer requests until there are no more, or one is rejected."""
        try:
            while await self._one():
                self.http.start_next_cycle()
        except _Rejected as rejected:
            await self._reject(rejected)

    async def _one(self) -> bool:
        """Answer one request; whether another one may follow."""
        async with asyncio.timeout(
            self.limits.idle if self.device is not None else self.limits.request
        ):
            request = await self._request()
        if request is None:
            return False
        length = _length(request)
        self._recognise(request)
        if length > (self.limits.strange_body if self.device is None else self.limits.body):
            raise _Rejected(413, "Too large")
        if self.http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        if self.device is None:
            async with asyncio.timeout(self.limits.request):
                body = b"".join([part async for part in self._body()])
            async with self.proxy.asked:
                await self._pass_on(request, body, length)
        elif request.target == _MESSAGES and length <= self.limits.strange_body:
            body = b"".join([part async for part in self._body()])
            await self._answer(self.proxy.held(request, body, self._gone))
        elif length > self.limits.large:
            async with self.proxy.device(self.device).large:
                await self._pass_on(request, self._body(length), length)
        else:
            await self._pass_on(request, self._body(length), length)
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE

    def _gone(self) -> bool:
        """Whether the caller has hung up."""
        return self.reader.at_eof() or self.reader.exception() is not None

    async def _request(self) -> h11.Request | None:
        """Return the header of the next request; None when there is none. Raises _Rejected for
        something else.
        """
        try:
            event = await self._event()
        except h11.RemoteProtocolError:
            raise _Rejected(403, _ONLY) from None
        return event if isinstance(event, h11.Request) else None

    async def _event(self) -> h11.Event | None:
        """Return the next part of a request; None where nothing more is read on this connection."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_CHUNK))
        return event if isinstance(event, h11.Event) else None

    def _recognise(self, request: h11.Request) -> None:
        """Find out whose connection this is, if that was not known yet. Raises _Rejected where a
        device has too many.
        """
        key = (
            _signer(request, self.proxy.keys)
            if self.proxy.keys is not None
            else self.address.encode()
        )
        if key != self.device:
            self.leave()
            self.device = None
            if key is not None:
                self.proxy.enter(key)
                self.device = key

    async def _body(self, length: int = 0) -> AsyncIterator[bytes]:
        """Return the body of a request, in pieces, of a device that sends neither nothing for long
        nor too slowly.
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
        await self._answer(self.proxy.forward(request, content, length))

    async def _answer(self, forwarded: Awaitable[httpx.Response]) -> None:
        """Answer with what the SuperLink answers."""
        try:
            response = await forwarded
        except httpx.TransportError:
            raise _Rejected(503, "The SuperLink does not answer") from None
        try:
            kept = [
                (name, value) for name, value in response.headers.raw if name.lower() not in _HOP
            ]
            await self._send(
                h11.Response(
                    status_code=response.status_code,
                    headers=kept,
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

    async def _reject(self, rejected: _Rejected) -> None:
        """Say why a request is not passed on, and throw away what still comes of it."""
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
    """Bytes of the body. Raises _Rejected for what devices may not ask, where a web page asks, and
    where two programs might not agree on the length.
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
        raise _Rejected(403, _ONLY)
    return int(lengths[0])


def _signer(request: h11.Request, keys: Keys) -> bytes | None:
    """Return the known key by which a request is signed, as Flower has devices sign: the time of
    now. None for a stranger.
    """
    found = [
        [value for name, value in request.headers if name == wanted]
        for wanted in (_KEY, _SIGNATURE, _TIMESTAMP)
    ]
    if any(len(values) != 1 for values in found):
        return None
    (shown,), (signature,), (timestamp,) = found
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
