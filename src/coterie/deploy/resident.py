"""A process on a device that keeps the backbone loaded, and the way to hand it a request.

Flower starts a program for every message. Loading torch, transformers and a base each time takes
longer than most tasks: the program only hands the request on to this process, over a socket in a
private folder of the device.
"""

import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from coterie.core.errors import Refused, TensorError
from coterie.core.foreign import read_bytes

SOCKET = "resident.sock"
_KEY = "resident.key"  # whoever can read it may send requests
_LONGEST = 100  # bytes of the path of a socket; Linux takes 107, macOS 103
_MOST = 1 << 20  # bytes of a request or reply without its tensors

Answer = Callable[[str, bytes], tuple[str, bytes]]  # (request, tensors) -> (reply, tensors)


def serve(home: Path, answer: Answer, ready: Callable[[], None]) -> None:
    """Answer requests one after the other, for as long as the process lives. `home` is the device's
    folder, in which the socket and the key for callers are created; `ready` is called once requests
    are accepted. Raises Refused if another process serves it, or it cannot be made private.
    """
    private(home)
    if _alive(home):
        remedy = "Each client needs a separate folder: choose another --home, or stop that process."
        raise Refused(f"{home} is already served by another process", remedy)
    for name in (SOCKET, _KEY):
        (home / name).unlink(missing_ok=True)
    write_private(home / _KEY, key := os.urandom(32))
    with _address(home) as address, Listener(address, "AF_UNIX", authkey=key) as listener:
        (home / SOCKET).chmod(stat.S_IRUSR | stat.S_IWUSR)
        ready()
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # the caller did not know the key, or has hung up
            with connection:
                _serve_one(connection, answer)


def private(home: Path) -> None:
    """Create a folder that only its owner may enter, or restrict an existing one to its owner.
    Raises Refused if it belongs to another user, or all users share it, as they do `/tmp`.
    """
    try:
        home.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        mode = home.stat().st_mode
        if mode & stat.S_ISVTX:
            problem = f"{home} is shared by all users of this machine"
            raise Refused(problem, "Choose another --home.")
        if stat.S_IMODE(mode) & (stat.S_IRWXG | stat.S_IRWXO):
            home.chmod(stat.S_IRWXU)
    except OSError as error:
        problem = f"{home} cannot be made private: {error.strerror}"
        raise Refused(problem, "Choose another --home.") from None


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _serve_one(connection: Connection, answer: Answer) -> None:
    """Answer one request. The caller may have hung up; the state is on disk nevertheless."""
    try:
        text, body = connection.recv_bytes(_MOST).decode(), connection.recv_bytes()
        for part in answer(text, body):
            connection.send_bytes(part.encode() if isinstance(part, str) else part)
    except (OSError, EOFError, UnicodeDecodeError):
        return


def ask(home: Path, text: str, body: bytes) -> tuple[str, bytes]:
    """Hand a request on, and return the reply. Raises TensorError if no process serves this folder,
    it ended meanwhile, or it was just restarted with another key.
    """
    try:
        with (
            _address(home) as address,
            Client(address, "AF_UNIX", authkey=read_bytes(home / _KEY)) as connection,
        ):
            connection.send_bytes(text.encode())
            connection.send_bytes(body)
            return connection.recv_bytes(_MOST).decode(), connection.recv_bytes()
    except (OSError, EOFError, AuthenticationError) as error:
        problem = f"the process of this device does not answer: {error or 'it ended'}"
        raise TensorError(problem, "Start it again: coterie client ...") from None


@contextmanager
def _address(home: Path) -> Iterator[str]:
    """Yield the path of the socket, through a symbolic link if it is too long for the system."""
    if len(os.fsencode(home / SOCKET)) <= _LONGEST:
        yield str(home / SOCKET)
        return
    with tempfile.TemporaryDirectory(prefix="coterie-") as short:
        (Path(short) / "home").symlink_to(home.resolve())
        yield f"{short}/home/{SOCKET}"


def _alive(home: Path) -> bool:
    with _address(home) as address, socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
