"""What devices may reach of a server: the Fleet API, whole and unchanged, and nothing else,
however it is asked for.
"""

import base64
import http.client
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from coterie.core.errors import Refused
from coterie.deploy import keys
from coterie.deploy.connection import Limits
from coterie.deploy.keys import Link, free_port, listening
from coterie.deploy.proxy import Proxy, open_proxy

LIMITS = Limits(
    strangers=40,
    of_an_address=20,
    of_a_device=4,
    handshake=2,
    request=2,
    idle=3,
    slowest=1 << 20,
    body=4 << 20,
    large=1 << 20,
)


PULL = "/v1/fleet/pull-messages"


class Behind(BaseHTTPRequestHandler):
    """Answers with what it was asked, and remembers it."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen.append((self.path, self.headers.get("X-Signature", ""), body))
        self.send_response(201)
        self.send_header("X-Answer", "yes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

    do_GET = do_DELETE = do_POST  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys")
    keys.make(made, [], ["ann"])
    keys.make(made / "other", [], ["eve"])
    return made


def signed(private: Path, at: datetime | None = None) -> dict[str, str]:
    """The headers by which Flower's devices show who they are."""
    key, timestamp = (
        load_ssh_private_key(private.read_bytes(), None),
        (at or datetime.now(UTC)).isoformat(),
    )
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    shown = {
        "public-key": pem(key.public_key()),
        "signature": key.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256())),
    }
    return {f"flwr-{name}": base64.b64encode(value).decode() for name, value in shown.items()} | {
        "flwr-timestamp": timestamp
    }


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def known(private: Path) -> dict[bytes, ec.EllipticCurvePublicKey]:
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return {pem(key.public_key()): key.public_key()}


@pytest.fixture
def seen() -> list[tuple[str, str, bytes]]:
    Behind.seen.clear()
    return Behind.seen


@contextmanager
def opened(
    folder: Path, limits: Limits | None = None, posted: Path | None = None
) -> Iterator[tuple[int, Proxy]]:
    """A proxy with TLS, which knows ann's device, before `Behind`, with TLS too: its port, and
    itself.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / keys.CERTIFICATE, folder / keys.KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), Behind) as behind:
        behind.socket = context.wrap_socket(behind.socket, server_side=True)
        threading.Thread(target=behind.serve_forever, daemon=True).start()
        found, own = free_port(), (folder / keys.CERTIFICATE, folder / keys.KEY, folder / keys.CA)
        with open_proxy(
            ("127.0.0.1", found), ("127.0.0.1", behind.server_address[1]), *own, limits, posted
        ) as door:
            door.keys = known(folder / "clients/ann")
            yield found, door
        behind.shutdown()


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with opened(folder) as (found, _):
        yield found


@pytest.fixture
def door(folder: Path) -> Iterator[tuple[int, Proxy]]:
    """With small limits; what went wrong there would be its own fault."""
    with opened(folder, LIMITS) as (found, proxy):
        yield found, proxy
        assert not proxy.problems


def connected(port: int, folder: Path) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(
        "127.0.0.1", port, context=ssl.create_default_context(cafile=folder / keys.CA), timeout=10
    )


def test_what_devices_ask_passes_unchanged_both_ways(
    port: int, folder: Path, seen: list[tuple[str, str, bytes]]
) -> None:
    connection, body = connected(port, folder), bytes(range(256)) * 3000
    for _ in range(2):  # on one connection
        connection.request(
            "POST",
            "/v1/fleet/push-object",
            body,
            {"X-Signature": "abc="} | signed(folder / "clients/ann"),
        )
        response = connection.getresponse()
        assert (response.status, response.headers["X-Answer"], response.read()) == (
            201,
            "yes",
            body[::-1],
        )
    assert seen == [("/v1/fleet/push-object", "abc=", body)] * 2


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/runtime/pull-task"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet//v1/control/start-run"),
        ("POST", "https://127.0.0.1/v1/control/start-run"),
        ("POST", "/v1/fleet/get-run?x=/v1/control"),
        ("GET", "/v1/fleet/get-run"),
        ("POST", "/v1/fleet/" + "a" * 41),  # would be logged
        ("GET", "/docs"),
        ("DELETE", "/v1/fleet/get-run"),
    ],
)
def test_nothing_else_passes(
    port: int, folder: Path, seen: list[object], method: str, path: str
) -> None:
    connection = connected(port, folder)
    connection.request(method, path, b"")
    assert connection.getresponse().status in (403, 501)
    assert seen == []


@pytest.mark.parametrize(
    "lengths",
    [
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 4\r\nContent-Length: 90\r\n",
        "",
        "Content-Length: +4\r\n",
    ],
)
def test_a_request_cannot_hide_in_another(
    port: int, folder: Path, seen: list[object], lengths: str
) -> None:
    hidden = "POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        context = ssl.create_default_context(cafile=folder / keys.CA)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as link:
            head = f"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n{lengths}\r\n"
            link.sendall(f"{head}0\r\n\r\n{hidden}".encode())
            answer = b""
            while piece := link.recv(4096):
                answer += piece
    assert answer.startswith(b"HTTP/1.1 403")
    assert answer.count(b"HTTP/1.1") == 1
    assert seen == []


def test_somebody_who_never_says_anything_delays_nobody(port: int, folder: Path) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        assert Link(f"127.0.0.1:{port}", folder / keys.CA).answers("fleet")


def test_a_server_that_is_another_one_is_refused_and_the_remedy_named(
    port: int, folder: Path
) -> None:
    with pytest.raises(Refused, match=r"signed by .*: .*\n?.*--host 127\.0\.0\.1") as refused:
        Link(f"127.0.0.1:{port}", folder / "other" / keys.CA).answers("fleet")
    assert "ca.crt" in refused.value.remedy
    with pytest.raises(Refused, match="is the port for devices"):
        Link(f"127.0.0.1:{port}", folder / keys.CA).answers("control")
    with pytest.raises(Refused, match="requires TLS"):
        Link(f"127.0.0.1:{port}", None).answers("fleet")


def test_a_front_without_encryption_and_a_superlink_that_is_gone(folder: Path) -> None:
    here, gone = free_port(), free_port()
    with open_proxy(("127.0.0.1", here), ("127.0.0.1", gone), None, None, None):
        assert not Link(f"127.0.0.1:{here}", None).answers("fleet")
        with pytest.raises(Refused, match="does not use TLS"):
            Link(f"127.0.0.1:{here}", folder / keys.CA).answers("fleet")
        connection = http.client.HTTPConnection("127.0.0.1", here, timeout=10)
        connection.request("POST", "/v1/fleet/get-run", b"x")
        assert connection.getresponse().status == 503


# Strangers.


def answered(
    port: int,
    folder: Path,
    body: bytes = b"",
    within: float = 10,
    client: str = "clients/ann",
    **headers: str,
) -> int:
    """The status with which a device's request comes back."""
    connection = connected(port, folder)
    connection.timeout = within
    connection.request("POST", "/v1/fleet/push-object", body, signed(folder / client) | headers)
    return connection.getresponse().status


def gone(link: socket.socket, within: float) -> bool:
    """Whether the other side has closed a connection, with or without a word."""
    link.settimeout(within)
    try:
        while link.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def tls(port: int, folder: Path, plain: socket.socket | None = None) -> ssl.SSLSocket:
    plain = plain or socket.create_connection(("127.0.0.1", port), timeout=10)
    return ssl.create_default_context(cafile=folder / keys.CA).wrap_socket(
        plain, server_hostname="127.0.0.1"
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


ALONE = """
import json, resource, socket, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from coterie.deploy.proxy import open_proxy
folder, here, behind = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = folder / "server.crt", folder / "server.key", folder / "ca.crt"
with open_proxy(("127.0.0.1", here), ("127.0.0.1", behind), *files):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["same-address", "others"])
def test_more_silent_connections_than_descriptors_delay_nobody(folder: Path, source: str) -> None:
    """A front of its own, in a process that may open fewer files than strangers come; then they
    go, and nothing of them is left.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 900:
        pytest.skip("this process may not open as many connections")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / keys.CERTIFICATE, folder / keys.KEY)
    with ExitStack() as stack:
        behind = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Behind))
        behind.socket = context.wrap_socket(behind.socket, server_side=True)
        threading.Thread(target=behind.serve_forever, daemon=True).start()
        here = free_port()
        command = [
            sys.executable,
            "-c",
            ALONE,
            str(folder),
            str(here),
            str(behind.server_address[1]),
        ]
        alone = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert alone.stdout is not None
        assert alone.stdout.readline() == "ready\n"
        before = usage(alone.pid)
        silent: list[socket.socket] = []
        for _ in range(700):
            with suppress(OSError):
                silent.append(
                    stack.enter_context(
                        socket.create_connection(("127.0.0.1", here), 3, (source, 0))
                    )
                )
        started = time.monotonic()
        assert Link(f"127.0.0.1:{here}", folder / keys.CA).answers("fleet")
        assert time.monotonic() - started < 15
        during = usage(alone.pid)
        assert during["fd"] < 350
        assert during["threads"] <= before["threads"] + 2
        assert during["mb"] < before["mb"] + 150
        for link in silent:
            link.close()
        end = time.monotonic() + 10
        while usage(alone.pid)["fd"] > before["fd"] + 4 and time.monotonic() < end:
            time.sleep(0.1)
        assert usage(alone.pid)["fd"] <= before["fd"] + 4
        behind.shutdown()
        alone.kill()


def usage(process: int) -> dict[str, int]:
    """Open files, threads, and resident megabytes."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    return {
        "fd": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
        "mb": int(status["VmRSS"].split()[0]) // 1024,
    }


@pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["one-address", "many-addresses"])
def test_strangers_are_no_more_than_the_limit_and_a_device_is_heard_among_them(
    door: tuple[int, Proxy], folder: Path, address: str
) -> None:
    port, _ = door
    assert answered(port, folder) == 201  # it has begun
    before = descriptors()
    with ExitStack() as stack:
        links = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", port), 3, (address or f"127.0.1.{k}", 0))
            )
            for k in range(3 * LIMITS.strangers)
        ]
        assert answered(port, folder, b"x" * 100_000) == 201
        most = LIMITS.of_an_address if address else LIMITS.strangers
        assert descriptors() <= before + len(links) + most + 8
        assert gone(links[0], 1)  # who came first has gone first
    assert until(lambda: descriptors() <= before + 4)


def until(true: Callable[[], bool], within: float = 10) -> bool:
    end = time.monotonic() + within
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


@pytest.mark.parametrize(
    "said",
    [
        None,
        b"",
        b"POST /v1/fleet/hello HTTP/1.1\r\nX: ",
        b"POST /v1/fleet/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\nabc",
    ],
    ids=["no handshake", "nothing", "half a header", "half a body"],
)
def test_who_says_half_of_something_is_cut_off(
    door: tuple[int, Proxy], folder: Path, said: bytes | None
) -> None:
    port, _ = door
    with socket.create_connection(("127.0.0.1", port)) as plain:
        link = plain if said is None else tls(port, folder, plain)
        link.sendall(said or b"")
        started = time.monotonic()
        assert gone(link, 20)
        assert 1.5 < time.monotonic() - started < 15


@pytest.mark.parametrize("what", ["handshake", "header", "body"])
def test_who_trickles_is_cut_off_though_there_is_always_something_more(
    door: tuple[int, Proxy], folder: Path, what: str
) -> None:
    """A byte now and then: no wait for the next byte is long."""
    port, _ = door
    started, closed = time.monotonic(), False
    header = b"POST /v1/fleet/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n"
    hello = b"\x16\x03\x01\x02\x00"  # the beginning of a client's first record
    with socket.create_connection(("127.0.0.1", port)) as plain:
        link = plain if what == "handshake" else tls(port, folder, plain)
        if what == "body":
            link.sendall(header)
        sent = {
            "handshake": hello + b"\1" * 500,
            "header": header[:30] + b"a" * 4000,
            "body": b"b" * 4000,
        }[what]
        link.settimeout(0.1)
        for byte in sent:
            try:
                link.sendall(bytes([byte]))
                closed = not link.recv(100)
            except TimeoutError:
                continue
            except OSError:
                closed = True
            if closed or time.monotonic() - started > 20:
                break
    assert closed
    assert 1 < time.monotonic() - started < 15


def test_a_device_that_trickles_a_body_is_cut_off_too(folder: Path) -> None:
    limits = Limits(idle=1, slowest=1 << 20)
    with opened(folder, limits) as (port, proxy), tls(port, folder) as link:
        headers = "".join(
            f"{name}: {value}\r\n" for name, value in signed(folder / "clients/ann").items()
        )
        link.sendall(
            f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n"
            f"{headers}\r\n".encode()
        )
        started, closed = time.monotonic(), False
        link.settimeout(0.2)
        while not closed and time.monotonic() - started < 20:
            try:
                link.sendall(b"x")
                closed = not link.recv(100)
            except TimeoutError:
                continue
            except OSError:
                closed = True
        assert closed
        assert time.monotonic() - started < 12
        assert not proxy.problems


@pytest.mark.parametrize("headers", ["", "Expect: 100-continue\r\n"])
def test_a_large_body_of_a_stranger_is_refused_by_its_header(
    door: tuple[int, Proxy], folder: Path, seen: list[object], headers: str
) -> None:
    """A gigabyte is announced; nothing of it reaches the SuperLink, and the proxy keeps nothing
    of it.
    """
    port, _ = door
    before = usage(os.getpid())["mb"]
    with tls(port, folder) as link:
        link.sendall(
            f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: "
            f"{1 << 30}\r\n\r\n".encode()
        )
        sent, chunk = 0, b"x" * (1 << 16)
        with suppress(OSError):
            while sent < 1 << 30:
                link.sendall(chunk)
                sent += len(chunk)
        assert sent < 1 << 30
    assert seen == []
    assert usage(os.getpid())["mb"] < before + 30
    with tls(port, folder) as link:  # who waits for the answer gets one
        link.sendall(
            f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: 5000\r\n"
            f"\r\n".encode()
        )
        assert link.recv(1000).startswith(b"HTTP/1.1 413")
    assert seen == []


def test_who_is_a_device_is_told_by_a_fresh_signature_of_a_known_key(
    door: tuple[int, Proxy], folder: Path, seen: list[object]
) -> None:
    """A public key is no secret: to show it is not enough."""
    port, proxy = door
    body, ann = b"x" * 100_000, folder / "clients/ann"
    assert answered(port, folder, body) == 201
    for headers in (
        {"flwr-signature": ""},
        {"flwr-signature": "????"},
        {"flwr-signature": signed(folder / "other/clients/eve")["flwr-signature"]},
        {"flwr-timestamp": datetime.now(UTC).isoformat()},
        {"flwr-timestamp": "yesterday"},
        {"flwr-public-key": signed(folder / "other/clients/eve")["flwr-public-key"]},
        signed(ann, datetime.now(UTC) - timedelta(hours=1)),
        signed(ann, datetime.now(UTC) + timedelta(hours=1)),
        signed(ann, datetime.now()),
    ):
        assert answered(port, folder, body, **headers) == 413
    assert answered(port, folder, body, client="other/clients/eve") == 413
    assert len(seen) == 1
    proxy.keys = {}  # she is removed
    assert answered(port, folder, body) == 413
    assert (
        answered(port, folder, b"x" * 100) == 201
    )  # what the SuperLink says of her is for it to say


def test_a_device_has_limits_too(folder: Path) -> None:
    limits = Limits(of_a_device=4, body=4 << 20, large=1 << 20)
    with opened(folder, limits) as (port, _):
        assert answered(port, folder, b"x" * (limits.body + 1)) == 413
        assert answered(port, folder, b"x" * limits.body) == 201
        held = []
        for _ in range(limits.of_a_device):
            connection = connected(port, folder)
            connection.request("POST", "/v1/fleet/hello", b"", signed(folder / "clients/ann"))
            assert connection.getresponse().read() == b""
            held.append(connection)
        assert answered(port, folder) == 429
        held[0].close()
        assert until(lambda: answered(port, folder) == 201)


def test_a_device_that_stops_signing_is_a_stranger_again(folder: Path) -> None:
    with opened(folder, Limits(of_a_device=4, of_an_address=4)) as (port, proxy):
        held = []
        for _ in range(6):
            held.append(connected(port, folder))
            for headers in (signed(folder / "clients/ann"), {}):
                held[-1].request("POST", "/v1/fleet/hello", b"", headers)
                assert held[-1].getresponse().read() == b""
        assert until(lambda: len(proxy._callers.strangers) == 4)


def test_devices_are_heard_while_strangers_keep_the_superlink_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of strangers go to it a few at a time."""
    busy, most, lock, answer = [0], [0], threading.Lock(), Behind.do_POST

    def slow(handler: Any) -> None:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        if handler.headers["flwr-signature"] is None:
            time.sleep(0.3)
        with lock:
            busy[0] -= 1
        answer(handler)

    monkeypatch.setattr(Behind, "do_POST", slow)
    with opened(folder, Limits(at_once=2)) as (port, _), ExitStack() as stack:
        for _ in range(12):
            link = stack.enter_context(tls(port, folder))
            link.sendall(b"POST /v1/fleet/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        time.sleep(0.2)
        assert answered(port, folder, within=2) == 201
        assert most[0] <= 3


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], list[float]]:
    """Messages that the SuperLink has, each of which it gives away once, and when it was asked."""
    messages: list[bytes] = []
    asked: list[float] = []

    def answer(handler: Any) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        asked.append(time.monotonic())
        message = messages.pop() if messages else b""
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(message)))
        handler.end_headers()
        handler.wfile.write(message)

    monkeypatch.setattr(Behind, "do_POST", answer)
    return messages, asked


def test_a_question_for_messages_waits_until_there_is_one(
    folder: Path, tmp_path: Path, mailbox: tuple[list[bytes], list[float]]
) -> None:
    (messages, asked), posted = mailbox, tmp_path / "posted"
    with opened(folder, None, posted) as (port, _):
        for message in (b"first", b"second" * 99):
            connection = connected(port, folder)
            connection.request("POST", PULL, b"me", signed(folder / "clients/ann"))
            before = len(asked)
            assert until(lambda before=before: len(asked) > before)  # and there was none
            messages.append(message)
            posted.touch()
            touched = time.monotonic()
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, message)
            assert asked[-1] - touched < 1  # a device asks by itself every three seconds
        assert len(asked) == 4


def test_a_question_for_messages_is_held_for_so_long_and_strangers_questions_not_at_all(
    folder: Path, tmp_path: Path, mailbox: tuple[list[bytes], list[float]]
) -> None:
    _, asked = mailbox

    def seconds(headers: dict[str, str]) -> float:
        connection, begun = connected(port, folder), time.monotonic()
        connection.request("POST", PULL, b"me", headers)
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        return time.monotonic() - begun

    with opened(folder, Limits(wait=1.5), tmp_path / "posted") as (port, _):
        assert seconds({}) < 1
        assert seconds(signed(folder / "clients/ann")) >= 1.5
    with opened(folder, Limits(wait=1.5)) as (port, _):  # nobody would say that there is one
        assert seconds(signed(folder / "clients/ann")) < 1
    assert len(asked) == 4


def test_who_has_hung_up_is_given_no_message(
    folder: Path, tmp_path: Path, mailbox: tuple[list[bytes], list[float]]
) -> None:
    (messages, asked), posted = mailbox, tmp_path / "posted"
    with opened(folder, None, posted) as (port, proxy):
        connection = connected(port, folder)
        connection.request("POST", PULL, b"me", signed(folder / "clients/ann"))
        assert until(lambda: len(asked) == 1)
        connection.close()
        time.sleep(0.3)
        messages.append(b"hers")
        posted.touch()
        time.sleep(0.5)
        assert len(asked) == 1
        assert messages == [b"hers"]
        assert not proxy.problems


def test_a_front_that_fails_goes_on_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([RuntimeError("broken")])
    admit = Proxy._admit

    def broken(proxy: Proxy, connection: socket.socket, address: str) -> None:
        for failure in failures:
            connection.close()
            raise failure
        admit(proxy, connection, address)

    monkeypatch.setattr(Proxy, "_admit", broken)
    with opened(folder) as (port, proxy):
        with suppress(OSError), tls(port, folder):
            pass
        assert Link(f"127.0.0.1:{port}", folder / keys.CA).answers("fleet")
        assert list(proxy.problems) == [
            "The proxy failed and is started again. RuntimeError: broken"
        ]


def test_the_documented_haproxy_before_the_front(folder: Path, tmp_path: Path) -> None:
    """What docs/deploy.md gives for floods: it turns away whoever has too many connections or
    does not use TLS, and lets devices through.
    """
    program = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("haproxy is not installed")
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    (config,) = re.findall(r"^```haproxy\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    with opened(folder, Limits(of_an_address=200)) as (behind, _), ExitStack() as stack:
        here = free_port()
        config = (
            config.replace(":9502", f":{behind}")
            .replace("bind :9500", f"bind 127.0.0.1:{here}")
            .replace("inspect-delay 10s", "inspect-delay 1s")
        )
        (tmp_path / "haproxy.cfg").write_text(config)
        proxy = stack.enter_context(
            subprocess.Popen([program, "-f", str(tmp_path / "haproxy.cfg")])
        )
        stack.callback(proxy.terminate)
        assert until(lambda: listening(f"127.0.0.1:{here}"))
        assert answered(here, folder, b"x" * 100_000) == 201
        links = []
        for _ in range(60):
            with suppress(ConnectionResetError):  # turned away at once
                links.append(
                    stack.enter_context(
                        socket.create_connection(("127.0.0.1", here), 3, ("127.0.0.9", 0))
                    )
                )
        assert sum(not gone(link, 0.02) for link in links) <= 32
        assert answered(here, folder, b"x" * 100_000) == 201
        assert until(lambda: all(gone(link, 0.05) for link in links))  # who has said nothing
        with socket.create_connection(("127.0.0.1", here), 3) as plain:
            plain.sendall(b"POST /v1/fleet/hello HTTP/1.1\r\n\r\n")
            assert gone(plain, 5)
