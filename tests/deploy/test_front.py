"""What devices may reach of a server: the Fleet API, whole and unchanged, and nothing else, however it is asked for."""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from coterie import keys
from coterie.deploy import Link, free_port
from coterie.errors import Refused
from coterie.front import front


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
    keys.make(made, [], [])
    keys.make(made / "other", [], [])
    return made


@pytest.fixture
def seen() -> list[tuple[str, str, bytes]]:
    Behind.seen.clear()
    return Behind.seen


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Of a front with TLS before `Behind`, with TLS too."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / keys.CERTIFICATE, folder / keys.KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), Behind) as behind:
        behind.socket = context.wrap_socket(behind.socket, server_side=True)
        threading.Thread(target=behind.serve_forever, daemon=True).start()
        found = free_port()
        with front(("127.0.0.1", found), behind.server_address[:2], folder / keys.CERTIFICATE, folder / keys.KEY, folder / keys.CA):  # type: ignore[arg-type]
            yield found
        behind.shutdown()


def connected(port: int, folder: Path) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(cafile=folder / keys.CA), timeout=10)


def test_what_devices_ask_passes_unchanged_both_ways(port: int, folder: Path, seen: list[tuple[str, str, bytes]]) -> None:
    connection, body = connected(port, folder), bytes(range(256)) * 3000
    for _ in range(2):  # on one connection
        connection.request("POST", "/v1/fleet/push-object", body, {"X-Signature": "abc="})
        response = connection.getresponse()
        assert (response.status, response.headers["X-Answer"], response.read()) == (201, "yes", body[::-1])
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
        ("GET", "/docs"),
        ("DELETE", "/v1/fleet/get-run"),
    ],
)
def test_nothing_else_passes(port: int, folder: Path, seen: list[object], method: str, path: str) -> None:
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
def test_a_request_cannot_hide_in_another(port: int, folder: Path, seen: list[object], lengths: str) -> None:
    hidden = "POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        context = ssl.create_default_context(cafile=folder / keys.CA)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as link:
            link.sendall(f"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n{lengths}\r\n0\r\n\r\n{hidden}".encode())
            answer = b""
            while piece := link.recv(4096):
                answer += piece
    assert answer.startswith(b"HTTP/1.1 403")
    assert answer.count(b"HTTP/1.1") == 1
    assert seen == []


def test_somebody_who_never_says_anything_delays_nobody(port: int, folder: Path) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        assert Link(f"127.0.0.1:{port}", folder / keys.CA).answers("fleet")


def test_a_server_that_is_another_one_is_refused_and_the_remedy_named(port: int, folder: Path) -> None:
    with pytest.raises(Refused, match=r"vouches for: .*\n?.*--host 127\.0\.0\.1") as refused:
        Link(f"127.0.0.1:{port}", folder / "other" / keys.CA).answers("fleet")
    assert "ca.crt" in refused.value.remedy
    with pytest.raises(Refused, match="is for devices"):
        Link(f"127.0.0.1:{port}", folder / keys.CA).answers("control")
    with pytest.raises(Refused, match="wants TLS"):
        Link(f"127.0.0.1:{port}", None).answers("fleet")


def test_a_front_without_encryption_and_a_superlink_that_is_gone(folder: Path) -> None:
    here, gone = free_port(), free_port()
    with front(("127.0.0.1", here), ("127.0.0.1", gone), None, None, None):
        assert not Link(f"127.0.0.1:{here}", None).answers("fleet")
        with pytest.raises(Refused, match="speaks no TLS"):
            Link(f"127.0.0.1:{here}", folder / keys.CA).answers("fleet")
        connection = http.client.HTTPConnection("127.0.0.1", here, timeout=10)
        connection.request("POST", "/v1/fleet/get-run", b"x")
        assert connection.getresponse().status == 503
