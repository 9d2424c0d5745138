"""The only door that devices have to a SuperLink, and what keeps strangers from blocking it.

A SuperLink has one port for devices, for whoever submits runs, and for its own programs. To submit a run no login is needed, and a run is
any program, on the server and on every device. So the SuperLink listens to its own machine alone, and this passes on what devices may ask.

A SuperLink reads the whole body of a request before it looks at who sent it, has no limit for that, and none for connections. So this
looks at the signature in a request's header first: who shows none of a known key is a stranger, whose requests are a few kilobytes, soon
there, and few at a time. HTTP is parsed and written by h11, passed on by httpx, and TLS is asyncio's.
"""

import asyncio
import base64
import re
import resource
import socket
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from coterie.errors import Refused, extra

try:
    import h11
    import httpx
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError:  # pragma: no cover - they come with Flower
    raise Refused("Flower is not installed", extra("flower")) from None

_MAY = re.compile(rb"/v1/fleet/[a-z-]+")  # Flower's Fleet API
_HOP = {b"connection", b"expect", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}  # RFC 9110, 7.6.1
_KEY, _SIGNATURE, _TIMESTAMP = b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"  # by which Flower knows a device
_FRESH_S = 330.0  # seconds for which a signature is taken: a little longer than by the SuperLink, which decides
_CHUNK = 1 << 18
_AGAIN_S = 1.0  # seconds until what failed is tried again
_PROBLEMS = 10  # that wait to be told
_DESCRIPTORS = 1 << 16  # that are asked for; most systems give as many
_OF_AN_ADDRESS = 16  # devices that may be behind one address, where there are no keys to tell them apart
_ONLY = "Devices may use the Fleet API only"

Keys = Mapping[bytes, ec.EllipticCurvePublicKey]  # by their PEM, as devices show them


@dataclass(frozen=True)
class Limits:
    """What connections may take.

    Args:
        strangers: Connections that have shown no known key, in all. Whoever comes beyond that takes the place of the one that came first.
        of_an_address: Of those, from one address; likewise.
        of_a_device: Connections that have shown one key.
        asked: Requests of strangers that are passed on at a time.
        handshake: Seconds for TLS.
        request: Seconds for a stranger's request; it then has as many again for the next one.
        idle: Seconds without a byte until a device's connection is closed.
        slowest: Bytes per second at which a device sends a body, after the first `idle` seconds.
        header: Bytes of a request's header.
        strange_body: Bytes of a stranger's body.
        body: Bytes of a device's body. Flower cuts arrays into parts of 5 MiB; of secure aggregation it sends a whole reply at once.
        large: Bytes of a body above which a device sends one at a time.
        linger: Seconds for which what somebody goes on sending is thrown away, so that the refusal reaches them.
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


@dataclass
class _Device:
    """What is open of one device."""

    connections: int = 0
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Rejected(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Front:
    """Passes on what devices may ask; see `front`, which opens and closes it.

    Args:
        listener: A socket that listens.
        behind: Where the SuperLink listens.
        outer: The server's part of TLS; None: without.
        inner: A client's part, towards the SuperLink; None: without.
        keys: Of the devices that are known; None: without keys, where everybody is a device.
        limits: For all of them.

    Attributes:
        keys: May be replaced at any time, from any thread.
        problems: What went wrong here, to be told; not what others did wrong.
    """

    def __init__(
        self,
        listener: socket.socket,
        behind: tuple[str, int],
        outer: ssl.SSLContext | None,
        inner: ssl.SSLContext | None,
        keys: Keys | None,
        limits: Limits,
    ) -> None:
        self.keys, self.limits, self.problems = keys, limits, deque[str](maxlen=_PROBLEMS)
        self._listener, self._outer, self._inner = listener, outer, inner
        self._behind = f"{'http' if inner is None else 'https'}://{behind[0]}:{behind[1]}"
        self._closing = threading.Event()
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def run(self) -> None:
        """Work until `close`, whatever happens."""
        while not self._closing.is_set():
            try:
                asyncio.run(self._live())
            except asyncio.CancelledError:
                return
            except Exception as error:
                self.problems.append(f"The front failed and is started again. {type(error).__name__}: {error}")
                self._closing.wait(_AGAIN_S)

    def close(self) -> None:
        """Have `run` end, in another thread."""
        self._closing.set()
        if self._main is not None:
            loop, task = self._main
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    async def _live(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._strangers: dict[asyncio.Task[None], str] = {}  # and their addresses, who came first before the others
        self._devices: dict[bytes, _Device] = {}
        self._asked = asyncio.Semaphore(self.limits.asked)
        self._main = loop, task
        if self._closing.is_set():
            return
        async with self._client() as self._superlink:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError:  # who came is gone already, or there are no descriptors left
                    self._dismiss(self._strangers)
                    await asyncio.sleep(0.05)
                    continue
                self._admit(connection, str(address[0]))
                await asyncio.sleep(0)  # `sock_accept` does not let others work while somebody is waiting

    def _client(self) -> httpx.AsyncClient:
        """Towards the SuperLink, which closes what was idle for five seconds: connections are not used again for as long as that."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        return httpx.AsyncClient(verify=self._inner or False, timeout=self.limits.idle, limits=limits, trust_env=False)

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Take in somebody who came; a stranger goes where there are too many."""
        alike = [task for task, where in self._strangers.items() if where == address]
        if len(alike) >= self.limits.of_an_address:
            self._dismiss(alike)
        elif len(self._strangers) >= self.limits.strangers:
            self._dismiss(self._strangers)
        task = asyncio.create_task(self._serve(connection, address))
        self._strangers[task] = address
        task.add_done_callback(self._left)

    def _dismiss(self, among: Iterable[asyncio.Task[None]]) -> None:
        """Close the connection of the stranger that came first."""
        if (task := next(iter(among), None)) is not None:
            del self._strangers[task]
            task.cancel()

    def _left(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"A request failed. {type(error).__name__}: {error}")

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """One connection, from its first byte to its last. Whoever goes away, speaks no TLS or sends nonsense is no problem of ours."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = None if self._outer is None else self.limits.handshake
        transport: asyncio.Transport | None = None
        visit: _Visit | None = None
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._outer, ssl_handshake_timeout=patience)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            visit = _Visit(self, reader, writer, address)
            await visit.last()
            writer.close()
            async with asyncio.timeout(self.limits.linger):
                await writer.wait_closed()
        except (OSError, TimeoutError, h11.ProtocolError, httpx.HTTPError):
            pass
        finally:
            if visit is not None:
                visit.leave()
            if transport is None:
                connection.close()
            else:
                transport.abort()

    def device(self, key: bytes) -> _Device:
        """What is open of the device with this key."""
        return self._devices.setdefault(key, _Device())

    def enter(self, key: bytes) -> None:
        """Note that the connection which is being served is of a device. Raises _Rejected where that has too many."""
        device, task = self.device(key), asyncio.current_task()
        if device.connections >= self.limits.of_a_device * (_OF_AN_ADDRESS if self.keys is None else 1):
            raise _Rejected(429, "Too many connections of this device")
        device.connections += 1
        if task is not None:
            self._strangers.pop(task, None)

    def leave(self, key: bytes) -> None:
        """The reverse of `enter`."""
        device = self.device(key)
        device.connections -= 1
        if not device.connections:
            del self._devices[key]

    async def forward(self, request: h11.Request, content: bytes | AsyncIterator[bytes], length: int) -> httpx.Response:
        """Pass a request on, written anew so that nothing can hide in it; returns the response, whose body was not read yet."""
        kept = [(name, value) for name, value in request.headers if name not in _HOP | {b"content-length"}]
        url, headers = self._behind + request.target.decode(), [*kept, (b"content-length", b"%d" % length)]
        return await self._superlink.send(httpx.Request("POST", url, headers=headers, content=content), stream=True)

    @property
    def asked(self) -> asyncio.Semaphore:
        """Of requests of strangers."""
        return self._asked


class _Visit:
    """One connection's requests, one after the other."""

    def __init__(self, front: Front, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self.front, self.limits, self.reader, self.writer, self.address = front, front.limits, reader, writer, address
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.header)
        self.device: bytes | None = None

    def leave(self) -> None:
        if self.device is not None:
            self.front.leave(self.device)

    async def last(self) -> None:
        """Answer requests until there are no more, or one is rejected."""
        try:
            while await self._one():
                self.http.start_next_cycle()
        except _Rejected as rejected:
            await self._reject(rejected)

    async def _one(self) -> bool:
        """Answer one request; whether another one may follow."""
        async with asyncio.timeout(self.limits.idle if self.device is not None else self.limits.request):
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
            async with self.front.asked:
                await self._pass_on(request, body, length)
        elif length > self.limits.large:
            async with self.front.device(self.device).large:
                await self._pass_on(request, self._body(length), length)
        else:
            await self._pass_on(request, self._body(length), length)
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE

    async def _request(self) -> h11.Request | None:
        """The header of the next request; None when there is none. Raises _Rejected for something else."""
        try:
            event = await self._event()
        except h11.RemoteProtocolError:
            raise _Rejected(403, _ONLY) from None
        return event if isinstance(event, h11.Request) else None

    async def _event(self) -> h11.Event | None:
        """The next part of a request; None where nothing more is read on this connection."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_CHUNK))
        return event if isinstance(event, h11.Event) else None

    def _recognise(self, request: h11.Request) -> None:
        """Find out whose connection this is, if that was not known yet. Raises _Rejected where a device has too many."""
        key = _signer(request, self.front.keys) if self.front.keys is not None else self.address.encode()
        if key != self.device:
            self.leave()
            self.device = None
            if key is not None:
                self.front.enter(key)
                self.device = key

    async def _body(self, length: int = 0) -> AsyncIterator[bytes]:
        """The body of a request, in pieces, of a device that sends neither nothing for long nor too slowly."""
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

    async def _pass_on(self, request: h11.Request, content: bytes | AsyncIterator[bytes], length: int) -> None:
        try:
            response = await self.front.forward(request, content, length)
        except httpx.TransportError:
            raise _Rejected(503, "The SuperLink does not answer") from None
        try:
            kept = [(name, value) for name, value in response.headers.raw if name.lower() not in _HOP]
            await self._send(h11.Response(status_code=response.status_code, headers=kept, reason=response.reason_phrase.encode()))
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
        headers = [("Content-Length", str(len(text))), ("Connection", "close"), ("Content-Type", "text/plain")]
        await self._send(h11.Response(status_code=rejected.status, headers=headers, reason=text))
        await self._send(h11.Data(data=text))
        await self._send(h11.EndOfMessage())
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger):
                while await self.reader.read(_CHUNK):
                    pass


def _length(request: h11.Request) -> int:
    """Bytes of the body. Raises _Rejected for what devices may not ask, and where two programs might not agree on the length."""
    lengths = [value for name, value in request.headers if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in request.headers)
    if request.method != b"POST" or not _MAY.fullmatch(request.target) or chunked or len(lengths) != 1 or not lengths[0].isdigit():
        raise _Rejected(403, _ONLY)
    return int(lengths[0])


def _signer(request: h11.Request, keys: Keys) -> bytes | None:
    """The known key by which a request is signed, as Flower has devices sign: the time of now. None for a stranger."""
    found = [[value for name, value in request.headers if name == wanted] for wanted in (_KEY, _SIGNATURE, _TIMESTAMP)]
    if any(len(values) != 1 for values in found):
        return None
    (shown,), (signature,), (timestamp,) = found
    try:
        pem = base64.b64decode(shown, validate=True)
        key = keys.get(pem)
        signed = datetime.fromisoformat(timestamp.decode())
        if key is None or signed.tzinfo is None or abs((datetime.now(UTC) - signed).total_seconds()) > _FRESH_S:
            return None
        key.verify(base64.b64decode(signature, validate=True), timestamp, ec.ECDSA(hashes.SHA256()))
    except (ValueError, OverflowError, InvalidSignature):
        return None
    return pem


@contextmanager
def front(
    address: tuple[str, int],
    behind: tuple[str, int],
    certificate: Path | None,
    key: Path | None,
    ca: Path | None,
    limits: Limits | None = None,
) -> Iterator[Front]:
    """Pass on what devices may ask, for as long as the block lasts.

    Args:
        address: To listen at.
        behind: Where the SuperLink listens.
        certificate: The server's; None: without encryption, and without keys.
        key: Its private key.
        ca: The certificate of the authority that made it.
        limits: For connections; default: those of `Limits`.

    Yields:
        What passes it on. With a certificate it knows no device's key at first.

    Raises:
        OSError: It cannot listen there.
    """
    outer = inner = None
    if certificate is not None:
        outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        outer.load_cert_chain(certificate, key)
        inner = ssl.create_default_context(cafile=ca)
    _raise_descriptors()
    with socket.create_server(address, backlog=512) as listener:
        listener.setblocking(False)
        found = Front(listener, behind, outer, inner, None if certificate is None else {}, limits or Limits())
        thread = threading.Thread(target=found.run, name="front", daemon=True)
        thread.start()
        try:
            yield found
        finally:
            found.close()
            thread.join()


def _raise_descriptors() -> None:
    """Ask for as many open files as this process may have: many devices need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
