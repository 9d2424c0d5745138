"""What surrounds a server and devices: a web proxy, names without an address, kept connections."""

import http.client
import http.server
import socket
import statistics
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.deploy import process
from coterie.deploy.keys import unknown
from coterie.deploy.proxy import open_proxy


def test_what_goes_from_this_machine_to_itself_goes_to_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    variables = process.environment(tmp_path)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):  # Python, others, gRPC
        assert variables[name].split(",") == ["example.org", "127.0.0.1", "localhost", "::1"]
    assert variables["https_proxy"] == "http://127.0.0.1:1"  # the way to a server may need it


def test_names_without_an_address_are_said(tmp_path: Path) -> None:
    assert unknown("127.0.0.1:9500") == unknown("localhost:1") == ""
    assert "no-such-name.invalid has no address" in unknown("no-such-name.invalid:9500")
    done = CliRunner().invoke(app, ["keys", str(tmp_path / "keys"), "--host", "nowhere.invalid"])
    assert done.exit_code == 0
    assert "nowhere.invalid has no address" in done.stderr
    assert (tmp_path / "keys" / "ca.crt").exists()


class _Behind(http.server.BaseHTTPRequestHandler):
    """A SuperLink that answers anything."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None: ...


def test_a_kept_connection_to_the_port_for_devices_is_answered_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behind = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Behind)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    try:
        with open_proxy(("127.0.0.1", port), behind.server_address[:2], None, None, None):  # type: ignore[arg-type]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            seconds, sockets = [], set()
            for _ in range(9):
                begin = time.perf_counter()
                connection.request("POST", "/v1/fleet/push-messages", b"x")
                assert connection.getresponse().read() == b"ok"
                seconds.append(time.perf_counter() - begin)
                sockets.add(connection.sock)
            assert len(sockets) == 1
            print(f"median {1e3 * statistics.median(seconds):.1f} ms")
            assert statistics.median(seconds) < 0.03
    finally:
        behind.shutdown()
        behind.server_close()
