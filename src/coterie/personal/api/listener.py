"""The port and the server thread of the API and of the web pages."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from coterie.core.errors import Refused
from coterie.personal.api.guard import Guard, Limits, protocol

_HEAD = 1 << 15  # most bytes of a request's head
_WAITING = 1024  # connections that the system queues until they are accepted
# connections accepted at a time, so that many new ones do not delay the requests of others
_ACCEPTED = 1


@contextmanager
def running(guard: Guard, listener: socket.socket, limits: Limits) -> Iterator[None]:
    """Answer requests while the block runs.

    Args:
        guard: The application, behind its guard.
        listener: A listening socket.
        limits: The limits of connections and requests.
    """
    server = uvicorn.Server(_configuration(guard, limits))
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    listener.listen(_WAITING)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _configuration(guard: Guard, limits: Limits) -> uvicorn.Config:
    """Return uvicorn's settings, without any log of texts or callers."""
    return uvicorn.Config(
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


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens while the block runs.

    Args:
        host: The address to listen on.
        port: The port to listen on; 0: any free one.

    Raises:
        Refused: The port is taken, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_WAITING)
    except socket.gaierror:
        raise Refused(f"--host {host!r} is no address", "For example 127.0.0.1.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(
                f"port {port} is taken", f"Give another one, for example --port {port + 1}."
            ) from None
        raise Refused(
            f"cannot listen on {host} port {port}: {error.strerror}",
            "Give an address of this machine, for example --host 127.0.0.1.",
        ) from None
    with listener:
        yield listener
