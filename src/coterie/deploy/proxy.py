"""Reverse proxy that exposes only Flower's Fleet API, and limits what unknown callers may use.

A SuperLink has one port for devices, for whoever submits runs, and for its own programs. Submitting
a run needs no login, and a run can be any program, on the server and on every device. So the
SuperLink listens on its own machine only, and this proxy passes on what devices may ask.

A SuperLink reads the whole body of a request before it looks at who sent it, has no limit for that,
and none for connections. So this looks at the signature in a request's header first: a caller
without one of a known key is a stranger, whose requests must be small, fast and few. HTTP is parsed
and written by h11, passed on by httpx, and TLS is asyncio's.

A device asks every three seconds whether there is a message for it, so that each exchange would
wait for up to three seconds. So the question is held here until there is one (long polling).
"""

import asyncio
import resource
import socket
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coterie.core.errors import Refused, extra
from coterie.core.strangers import Strangers
from coterie.deploy.connection import _HOP, Keys, Limits, _Connection, _Rejected

try:
    import h11
    import httpx
except ImportError:  # pragma: no cover - they come with Flower
    raise Refused("Flower is not installed", extra("flower")) from None


_AGAIN_S = 1.0  # seconds until what failed is tried again
_PROBLEMS = 10  # that are kept until they are reported
_LOOK_S = 0.05  # seconds between looks whether messages have been sent
# Seconds until the SuperLink is asked again for a held question, if nobody said that there are
# messages: as often as devices ask by themselves.
_ASK_S = 3.0
_DESCRIPTORS = 1 << 16  # the requested limit of open files; most systems allow it
# Devices behind one address, if there are no keys to tell them apart.
_OF_AN_ADDRESS = 16


@dataclass
class _Device:
    """The open connections of one device."""

    connections: int = 0
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


class Proxy:
    """A reverse proxy for Flower's Fleet API; `open_proxy` opens and closes it.

    Args:
        listener: A listening socket.
        behind: Where the SuperLink listens.
        outer: TLS settings towards callers; None: no TLS.
        inner: TLS settings towards the SuperLink; None: no TLS.
        keys: Public keys of the known devices; None: no keys, every caller counts as a device.
        limits: The limits of connections and requests.
        posted: A file that is touched once messages are there; None: no question is held.

    Attributes:
        keys: May be replaced at any time, from any thread.
        problems: Errors of the proxy itself, to be reported; not errors of callers.
    """

    def __init__(
        self,
        listener: socket.socket,
        behind: tuple[str, int],
        outer: ssl.SSLContext | None,
        inner: ssl.SSLContext | None,
        keys: Keys | None,
        limits: Limits,
        posted: Path | None = None,
    ) -> None:
        self._posted = posted
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
                self.problems.append(
                    f"The proxy failed and is started again. {type(error).__name__}: {error}"
                )
                self._closing.wait(_AGAIN_S)

    def close(self) -> None:
        """Tell `run`, in another thread, to end."""
        self._closing.set()
        if self._main is not None:
            loop, task = self._main
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    async def _live(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._strangers = Strangers[asyncio.Task[None]](
            self.limits.of_an_address, lambda task: task.cancel()
        )
        self._devices: dict[bytes, _Device] = {}
        self._asked = asyncio.Semaphore(self.limits.asked)
        self._sent = asyncio.Event()
        self._main = loop, task
        if self._closing.is_set():
            return
        async with self._client() as self._superlink:
            looking = asyncio.create_task(self._look())
            try:
                await self._accept(loop)
            finally:
                looking.cancel()

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        """Admit one connection after the other."""
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:  # the caller is gone already, or there are no descriptors left
                self._strangers.dismiss_oldest()
                await asyncio.sleep(0.05)
                continue
            self._admit(connection, str(address[0]))
            await asyncio.sleep(0)  # `sock_accept` never yields while callers are waiting

    def _client(self) -> httpx.AsyncClient:
        """Return the client that talks to the SuperLink. The SuperLink closes connections that
        were idle for five seconds, so idle ones are dropped earlier.
        """
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        return httpx.AsyncClient(
            verify=self._inner or False, timeout=self.limits.idle, limits=limits, trust_env=False
        )

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Serve a new connection; if there are too many unknown callers, close the oldest one."""
        task = asyncio.create_task(self._serve(connection, address))
        self._strangers.admit(task, address, self.limits.strangers)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._strangers.leave(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"A request failed. {type(error).__name__}: {error}")

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Serve one connection from its first byte to its last. A caller that disconnects, does
        not use TLS or breaks the protocol is not an error of the proxy.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = None if self._outer is None else self.limits.handshake
        transport: asyncio.Transport | None = None
        session: _Connection | None = None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._outer, ssl_handshake_timeout=patience
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            session = _Connection(self, reader, writer, address)
            await session.serve()
            writer.close()
            async with asyncio.timeout(self.limits.linger):
                await writer.wait_closed()
        except (OSError, TimeoutError, h11.ProtocolError, httpx.HTTPError):
            pass
        finally:
            if session is not None:
                session.leave()
            if transport is None:
                connection.close()
            else:
                transport.abort()

    def device(self, key: bytes) -> _Device:
        """Return the open connections of the device with this key."""
        return self._devices.setdefault(key, _Device())

    def enter(self, key: bytes) -> None:
        """Count the current connection for a device. Raises _Rejected if the device has too
        many.
        """
        device, task = self.device(key), asyncio.current_task()
        if device.connections >= self.limits.of_a_device * (
            _OF_AN_ADDRESS if self.keys is None else 1
        ):
            raise _Rejected(429, "Too many connections of this device")
        device.connections += 1
        if task is not None:
            self._strangers.leave(task)

    def leave(self, key: bytes) -> None:
        """Undo `enter`."""
        device = self.device(key)
        device.connections -= 1
        if not device.connections:
            del self._devices[key]

    async def forward(
        self, request: h11.Request, content: bytes | AsyncIterator[bytes], length: int
    ) -> httpx.Response:
        """Forward a request, rewritten so that nothing can hide in it; return the response, whose
        body is not read yet.
        """
        kept = [
            (name, value)
            for name, value in request.headers
            if name not in _HOP | {b"content-length"}
        ]
        url, headers = (
            self._behind + request.target.decode(),
            [*kept, (b"content-length", b"%d" % length)],
        )
        return await self._superlink.send(
            httpx.Request("POST", url, headers=headers, content=content), stream=True
        )

    async def held(
        self, request: h11.Request, content: bytes, gone: Callable[[], bool]
    ) -> httpx.Response:
        """Forward a device's question for messages; where there is none, wait for one.

        Args:
            request: The question.
            content: Its body.
            gone: Whether the device has hung up: it would not get the message.

        Raises:
            ConnectionAbortedError: It has.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + (0.0 if self._posted is None else self.limits.wait)
        while not gone():
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

    async def _look(self) -> None:
        """Tell those whose questions are held whenever messages have been sent."""
        seen = _changed(self._posted)
        while self._posted is not None:
            await asyncio.sleep(_LOOK_S)
            if (now := _changed(self._posted)) != seen:
                seen, sent, self._sent = now, self._sent, asyncio.Event()
                sent.set()

    @property
    def asked(self) -> asyncio.Semaphore:
        """Limits the simultaneous requests of unknown callers."""
        return self._asked


@contextmanager
def open_proxy(
    address: tuple[str, int],
    behind: tuple[str, int],
    certificate: Path | None,
    key: Path | None,
    ca: Path | None,
    limits: Limits | None = None,
    posted: Path | None = None,
) -> Iterator[Proxy]:
    """Open the proxy for as long as the block lasts.

    Args:
        address: The address to listen on.
        behind: Where the SuperLink listens.
        certificate: The server's certificate; None: no encryption and no keys.
        key: Its private key.
        ca: The certificate of the authority that made it.
        limits: The limits of connections; default: those of `Limits`.
        posted: See `Proxy`.

    Yields:
        The proxy. With a certificate it knows no device's key at first.

    Raises:
        OSError: The address cannot be listened on.
    """
    outer = inner = None
    if certificate is not None:
        outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        outer.load_cert_chain(certificate, key)
        inner = ssl.create_default_context(cafile=ca)
    _raise_descriptors()
    with socket.create_server(address, backlog=512) as listener:
        listener.setblocking(False)
        known: Keys | None = None if certificate is None else {}
        found = Proxy(listener, behind, outer, inner, known, limits or Limits(), posted)
        thread = threading.Thread(target=found.run, name="proxy", daemon=True)
        thread.start()
        try:
            yield found
        finally:
            found.close()
            thread.join()


def _changed(file: Path | None) -> int | None:
    """Return when a file was last changed, ns; None where there is none."""
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None


def _raise_descriptors() -> None:
    """Raise the limit of open files as far as allowed: many devices need more than the usual
    1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
