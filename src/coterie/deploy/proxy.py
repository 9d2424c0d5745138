"""Reverse proxy that exposes only Flower's Fleet API, and limits what unknown callers may use.

A SuperLink has one port for devices, for whoever submits runs, and for its own programs. Submitting
a run needs no login, and a run can be any program, on the server and on every device. So the
SuperLink listens on its own machine only, and this proxy passes on what devices may ask.

A SuperLink reads the whole body of a request before it looks at who sent it, and has no limits for
that and for connections. So the proxy looks at the signature in a request's header first: a caller
without one of a known key is a stranger, whose requests must be small, fast and few. HTTP is parsed
and written by h11, passed on by httpx, and TLS is asyncio's.

A device asks every three seconds whether there is a message for it, so that each exchange would
wait for up to three seconds. So the request is held here until there is one (long polling).
"""

import asyncio
import resource
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h11
import httpx

from coterie.deploy.connection import Callers, Connection, Keys, Limits, Upstream

_AGAIN_S = 1.0  # seconds until what failed is tried again
_PROBLEMS = 10  # that are kept until they are reported
_DESCRIPTORS = 1 << 16  # the requested limit of open files; most systems allow it


class Proxy:
    """A reverse proxy for Flower's Fleet API; `open_proxy` opens and closes it.

    `keys` are the public keys of the known devices; None: every caller counts as a device. They may
    be replaced at any time, from any thread. `problems` are the proxy's own errors.
    """

    def __init__(
        self,
        listener: socket.socket,
        behind: tuple[str, int],
        outer: ssl.SSLContext | None,
        inner: ssl.SSLContext | None,
        limits: Limits,
        posted: Path | None,
    ) -> None:
        self.keys: Keys | None = None if outer is None else {}
        self.limits, self.problems = limits, deque[str](maxlen=_PROBLEMS)
        self._listener, self._outer, self._inner, self._posted = listener, outer, inner, posted
        self._behind = f"{'http' if inner is None else 'https'}://{behind[0]}:{behind[1]}"
        self._closing = threading.Event()
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def run(self) -> None:
        """Serve until `close`, whatever happens."""
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
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._callers = Callers(self.limits, lambda: self.keys)
        self._main = loop, task
        if self._closing.is_set():
            return
        self._upstream = Upstream(
            self._behind, self._inner, self.limits.idle, self.limits.wait, self._posted
        )
        looking = asyncio.create_task(self._upstream.look())
        try:
            await self._accept(loop)
        finally:
            looking.cancel()
            await self._upstream.close()

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError:  # the caller is gone already, or there are no descriptors left
                self._callers.strangers.dismiss_oldest()
                await asyncio.sleep(0.05)
                continue
            self._admit(connection, str(address[0]))
            await asyncio.sleep(0)  # `sock_accept` never yields while callers are waiting

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Serve a new connection; if there are too many unknown callers, close the oldest one."""
        task = asyncio.create_task(self._serve(connection, address))
        self._callers.strangers.admit(task, address, self.limits.strangers)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._callers.strangers.leave(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"A request failed. {type(error).__name__}: {error}")

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Serve one connection; one that disconnects or breaks the protocol is no error."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = None if self._outer is None else self.limits.handshake
        transport: asyncio.Transport | None = None
        session: Connection | None = None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._outer, ssl_handshake_timeout=patience
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            session = Connection(self._callers, self._upstream, reader, writer, address)
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
    """Open the proxy at an address while the block runs, before the one at which the SuperLink
    listens, with the server's certificate, its key and the authority's certificate, or without
    encryption and keys. It knows no device's key at first. Requests for messages are held only with
    `posted`, a file that is touched once these are there. Raises OSError.
    """
    outer = inner = None
    if certificate is not None:
        outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        outer.load_cert_chain(certificate, key)
        inner = ssl.create_default_context(cafile=ca)
    _raise_descriptors()
    with socket.create_server(address, backlog=512) as listener:
        listener.setblocking(False)
        # accepted connections inherit it; asyncio sets it only where a protocol's number is given
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proxy = Proxy(listener, behind, outer, inner, limits or Limits(), posted)
        thread = threading.Thread(target=proxy.run, name="proxy", daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.close()
            thread.join()


def _raise_descriptors() -> None:
    """Raise the limit of open files as far as allowed: many devices need more than usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
