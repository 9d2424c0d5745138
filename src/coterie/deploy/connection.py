"""One connection to the proxy: whose it is, how much known devices and others may use, and which
requests are forwarded to the SuperLink, those for messages once there are any.
"""

import asyncio
import base64
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import h11
import httpx
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.core.strangers import Strangers

Keys = Mapping[bytes, ec.EllipticCurvePublicKey]  # by their PEM, as devices show them
_OF_AN_ADDRESS = 16  # Devices behind one address, if there are no keys to tell them apart.


@dataclass(frozen=True)
class Limits:
    """Limits of connections, in seconds and bytes. Strangers are callers without a known key."""

    strangers: int = 256  # connections in all; a further one replaces the oldest
    of_an_address: int = 64  # such connections from one address
    of_a_device: int = 16  # connections with the same key
    at_once: int = 8  # simultaneous requests of strangers that are passed on
    handshake: float = 10.0  # of TLS
    request: float = 10.0  # for a request of a stranger, and again for its next one
    idle: float = 120.0  # without a byte until a device's connection is closed
    slowest: int = 1 << 14  # bytes per second of a device's body, after the first `idle` seconds
    header: int = 1 << 14  # of a request
    strange_body: int = 1 << 12  # of a stranger
    # of a device; Flower cuts arrays into parts of 5 MiB, but not those of secure aggregation
    body: int = 256 << 20
    large: int = 8 << 20  # a device sends larger bodies one at a time
    # further bytes of a refused caller are discarded, so that the refusal reaches it
    linger: float = 1.0
    wait: float = 20.0  # for a message that a device requests; devices give up after 30


class Rejected(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


@dataclass
class _Device:
    """The open connections of one device."""

    connections: int = 0
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


class Callers:
    """The open connections of devices and of unknown callers, within the limits. `keys` returns the
    keys of the devices known now; None: every caller counts as a device.
    """

    def __init__(self, limits: Limits, keys: Callable[[], Keys | None]) -> None:
        self.limits, self.keys = limits, keys
        self.strangers = Strangers[asyncio.Task[None]](
            limits.of_an_address, lambda task: task.cancel()
        )
        self.strangers_at_once = asyncio.Semaphore(limits.at_once)
        self._devices: dict[bytes, _Device] = {}

    def device(self, key: bytes) -> _Device:
        """Return the open connections of the device with this key."""
        return self._devices.setdefault(key, _Device())

    def enter(self, key: bytes) -> None:
        """Count the current connection for a device. Raises Rejected if the device has too many."""
        device, task = self.device(key), asyncio.current_task()
        devices = _OF_AN_ADDRESS if self.keys() is None else 1
        if device.connections >= self.limits.of_a_device * devices:
            raise Rejected(429, "Too many connections of this device")
        device.connections += 1
        if task is not None:
            self.strangers.leave(task)

    def leave(self, key: bytes) -> None:
        """Undo `enter`."""
        device = self.device(key)
        device.connections -= 1
        if not device.connections:
            del self._devices[key]


_MAY = re.compile(rb"/v1/fleet/[a-z-]{1,40}")  # Flower's Fleet API
_MESSAGES = b"/v1/fleet/pull-messages"  # by which a device asks whether there is one for it
# the headers by which Flower knows a device: its key, a signature, and the time that is signed
_CREDENTIALS = (b"flwr-public-key", b"flwr-signature", b"flwr-timestamp")
# headers of one connection only: RFC 9110, 7.6.1
_HOP = frozenset(b"connection expect host keep-alive te trailer transfer-encoding upgrade".split())
# seconds for which a signature is taken: a little longer than by the SuperLink, which decides
_FRESH_S = 330.0
_CHUNK = 1 << 18
_ONLY = "Devices may use the Fleet API only"
_LOOK_S = 0.05  # seconds between looks whether messages have been sent
# Seconds until the SuperLink is asked again for a held question, if nobody said that there are
# messages: as often as devices ask by themselves.
_ASK_S = 3.0


class Upstream:
    """A client of the SuperLink at `url`, by TLS if given, which forwards the requests of devices,
    and gives one up after `idle` seconds without a byte. One for messages is held for `wait`
    seconds, if there is a file, `posted`, that is touched once messages are there.
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
        """Forward a request, rewritten so that it hides nothing; return the unread response."""
        dropped = _HOP | {b"content-length"}
        headers = [(name, value) for name, value in request.headers if name not in dropped]
        headers.append((b"content-length", b"%d" % length))
        url = self._url + request.target.decode()
        return await self._client.send(
            httpx.Request("POST", url, headers=headers, content=content), stream=True
        )

    async def held(
        self, request: h11.Request, content: bytes, has_left: Callable[[], bool]
    ) -> httpx.Response:
        """Forward a device's request for messages; if there are none, wait for one. Raises
        ConnectionAbortedError if the device has left: it would not get the message.
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
        """Wake those whose requests are held whenever messages have been sent."""
        seen = _changed(self._posted)
        while self._posted is not None:
            await asyncio.sleep(_LOOK_S)
            if (now := _changed(self._posted)) != seen:
                seen, sent, self._sent = now, self._sent, asyncio.Event()
                sent.set()


def _changed(file: Path | None) -> int | None:
    """Return when a file was last changed, in ns; None if it is missing."""
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None


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
        strange = self.device is None
        try:
            async with asyncio.timeout(self.limits.request if strange else self.limits.idle):
                request = await self._event()
        except h11.RemoteProtocolError:
            raise Rejected(403, _ONLY) from None
        if not isinstance(request, h11.Request):
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
                await self._answer(self.upstream.forward(request, body, length))
        elif request.target == _MESSAGES and length <= self.limits.strange_body:
            body = b"".join([part async for part in self._body()])
            await self._answer(self.upstream.held(request, body, self._has_left))
        elif length > self.limits.large:
            async with self.callers.device(self.device).large:
                await self._answer(self.upstream.forward(request, self._body(length), length))
        else:
            await self._answer(self.upstream.forward(request, self._body(length), length))
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE

    def _has_left(self) -> bool:
        return self.reader.at_eof() or self.reader.exception() is not None

    async def _event(self) -> h11.Event | None:
        """Return the next part of a request; None if no more is read on this connection."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_CHUNK))
        return event if isinstance(event, h11.Event) else None

    def _recognise(self, request: h11.Request) -> None:
        """Identify the caller. Raises Rejected if a device has too many connections."""
        keys = self.callers.keys()
        key = self.address.encode() if keys is None else _signer(request, keys)
        if key != self.device:
            self.leave()
            self.device = None
            if key is None and (task := asyncio.current_task()) is not None:  # a stranger again
                self.callers.strangers.admit(task, self.address, self.limits.strangers)
            elif key is not None:
                self.callers.enter(key)
                self.device = key

    async def _body(self, length: int = 0) -> AsyncIterator[bytes]:
        """Yield the body of a request in pieces. A device that is too slow is cut off."""
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

    async def _answer(self, forwarded: Awaitable[httpx.Response]) -> None:
        """Answer with the SuperLink's response."""
        try:
            response = await forwarded
        except httpx.TransportError:
            raise Rejected(503, "The SuperLink does not answer") from None
        try:
            headers = [pair for pair in response.headers.raw if pair[0].lower() not in _HOP]
            status, reason = response.status_code, response.reason_phrase.encode()
            await self._send(h11.Response(status_code=status, headers=headers, reason=reason))
            async for part in response.aiter_raw(_CHUNK):
                await self._send(h11.Data(data=part))
            await self._send(h11.EndOfMessage())
        finally:
            await response.aclose()

    async def _send(self, event: h11.Event) -> None:
        if data := self.http.send(event):
            self.writer.write(data)
            async with asyncio.timeout(self.limits.idle):
                await self.writer.drain()

    async def _reject(self, rejected: Rejected) -> None:
        """Answer why a request is rejected, and discard the rest of it."""
        text = rejected.reason.encode()
        headers = {"Content-Length": len(text), "Connection": "close", "Content-Type": "text/plain"}
        pairs = [(name, str(value)) for name, value in headers.items()]
        await self._send(h11.Response(status_code=rejected.status, headers=pairs, reason=text))
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
    allowed = request.method == b"POST" and _MAY.fullmatch(request.target) is not None
    if odd or not allowed or len(lengths) != 1 or not lengths[0].isdigit():
        raise Rejected(403, _ONLY)
    return int(lengths[0])


def _signer(request: h11.Request, keys: Keys) -> bytes | None:
    """Return the known key that signed the time of a request; None for unknown callers."""
    credentials = [
        [value for name, value in request.headers if name == header] for header in _CREDENTIALS
    ]
    if any(len(values) != 1 for values in credentials):
        return None
    (shown,), (signature,), (timestamp,) = credentials
    try:
        pem = base64.b64decode(shown, validate=True)
        key = keys.get(pem)
        signed = datetime.fromisoformat(timestamp.decode())
        if key is None or signed.tzinfo is None:
            return None
        if abs((datetime.now(UTC) - signed).total_seconds()) > _FRESH_S:
            return None
        key.verify(base64.b64decode(signature, validate=True), timestamp, ec.ECDSA(hashes.SHA256()))
    except (ValueError, OverflowError, InvalidSignature):
        return None
    return pem
