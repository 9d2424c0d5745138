"""The process of a device that keeps the base loaded: who may ask, one per folder, and that it
outlives whoever asks.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from coterie.core.errors import Refused, TensorError
from coterie.deploy import resident

ECHO = """
import os, sys, time
from pathlib import Path
from coterie.deploy import resident

def answer(text, body):
    if text == "die":
        os._exit(1)
    if text == "slow":
        time.sleep(1)
    return text.upper(), body[::-1]

resident.serve(Path(sys.argv[1]), answer, lambda: print("ready", flush=True))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a process that serves `tmp_path/home`, or another folder there."""
    all_of_them: list[subprocess.Popen[str]] = []

    def start(home: str = "home") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", ECHO, str(tmp_path / home)], stdout=subprocess.PIPE, text=True
        )
        all_of_them.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in all_of_them:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def home(tmp_path: Path, started: Callable[[], object]) -> Path:
    started()
    return tmp_path / "home"


def test_a_request_comes_back_answered(home: Path) -> None:
    body = os.urandom(3_000_000)
    assert resident.ask(home, "hello", body) == ("HELLO", body[::-1])
    assert resident.ask(home, "again", b"") == ("AGAIN", b"")


def test_only_its_owner_may_enter(home: Path) -> None:
    assert home.stat().st_mode & 0o777 == 0o700
    assert {(home / name).stat().st_mode & 0o777 for name in ("resident.sock", "resident.key")} == {
        0o600
    }


def test_who_does_not_know_the_key_is_not_answered_and_others_are(home: Path) -> None:
    with pytest.raises(AuthenticationError):
        Client(str(home / resident.SOCKET), "AF_UNIX", authkey=b"wrong")
    assert resident.ask(home, "hello", b"") == ("HELLO", b"")


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!i", 1 << 30), struct.pack("!i", 3) + b"abc"],
)
def test_nonsense_ends_nothing(home: Path, nonsense: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.connect(str(home / resident.SOCKET))
        somebody.sendall(nonsense)
    assert resident.ask(home, "hello", b"") == ("HELLO", b"")


def test_who_asks_may_go_away(home: Path) -> None:
    for said in ([], [b"slow"], [b"slow", b"abc"], [b"\xff", b"no text"]):
        known = (home / "resident.key").read_bytes()
        with (
            Client(str(home / resident.SOCKET), "AF_UNIX", authkey=known) as somebody,
            suppress(BrokenPipeError),
        ):  # no text: no more is read
            for part in said:
                somebody.send_bytes(part)
    assert resident.ask(home, "hello", b"") == ("HELLO", b"")


def test_who_knows_the_key_but_says_nothing_does_not_keep_others_waiting_for_good(
    home: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.connect(str(home / resident.SOCKET))
        answered = threading.Event()
        threading.Thread(
            target=lambda: (resident.ask(home, "hello", b""), answered.set()), daemon=True
        ).start()
        time.sleep(0.3)
        somebody.close()
        assert answered.wait(10)


def test_a_folder_may_have_a_long_path(
    tmp_path: Path, started: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    """Longer than the path of a socket may be."""
    home = "a-folder-that-is-far-from-the-root/" * 5
    first = started(home)
    assert resident.ask(tmp_path / home, "hello", b"") == ("HELLO", b"")
    with pytest.raises(Refused, match="already served by another process"):
        resident.serve(tmp_path / home, lambda text, body: (text, body), lambda: None)
    first.kill()
    first.wait(10)
    started(home)
    assert resident.ask(tmp_path / home, "hello", b"") == ("HELLO", b"")


def test_one_process_per_folder(home: Path) -> None:
    with pytest.raises(Refused, match="already served by another process"):
        resident.serve(home, lambda text, body: (text, body), lambda: None)
    assert resident.ask(home, "hello", b"") == ("HELLO", b"")


def test_a_process_that_dies_is_told_of_and_another_one_takes_its_place(
    tmp_path: Path, started: Callable[[], "subprocess.Popen[str]"]
) -> None:
    home = tmp_path / "home"
    with pytest.raises(TensorError, match="does not answer"):
        resident.ask(home, "hello", b"")
    first = started()
    with pytest.raises(TensorError, match="does not answer"):
        resident.ask(home, "die", b"")
    assert first.wait(10) == 1
    second = started()  # its predecessor's socket is still there
    assert resident.ask(home, "hello", b"") == ("HELLO", b"")
    second.send_signal(signal.SIGKILL)
    second.wait(10)
    with pytest.raises(TensorError, match="coterie client"):
        resident.ask(home, "hello", b"")
