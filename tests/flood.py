"""A stranger who holds silent connections, and opens each again that is closed."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection."""
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def flood(port: int, count: int, sent: bytes = b"") -> Iterator[None]:
    """Within the block `count` connections from this machine are held, as far as the server lets
    them be.

    Args:
        port: Of the server.
        count: Of connections.
        sent: What each says before it is silent.
    """
    held: list[socket.socket] = []
    done = threading.Event()

    def fill() -> None:
        while not done.is_set() and len(held) < count:
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=2)
                held.append(connection)
                connection.sendall(sent)
                connection.setblocking(False)

    def reopen() -> None:
        while not done.wait(0.05):
            for connection in [one for one in held if closed(one)]:
                held.remove(connection)
                connection.close()
            fill()

    fill()
    thread = threading.Thread(target=reopen)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for connection in held:
            connection.close()
