"""The only door that devices have to a SuperLink.

A SuperLink has one port for devices, for whoever submits runs, and for its own programs. To submit a run no login is needed, and a run is
any program, on the server and on every device. So the SuperLink listens to its own machine alone, and this passes on what devices may ask.
"""

import http.client
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

_MAY = re.compile(r"/v1/fleet/[a-z-]+")  # Flower's Fleet API
_HOP = {"connection", "content-length", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}  # RFC 9110, 7.6.1
_CHUNK = 1 << 16
_IDLE_S = 120.0  # seconds without a byte until a connection is closed


class _Front(ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 128

    def __init__(self, address: tuple[str, int], behind: tuple[str, int], outer: ssl.SSLContext | None, inner: ssl.SSLContext | None):
        self.behind, self.outer, self.inner = behind, outer, inner
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever went away, spoke no TLS or sent nonsense is not a thing to tell anybody."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a device; of each request, what is passed on is written anew, so that nothing can hide in it."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S  # type: ignore[assignment]  # typeshed's base class has None
    server: _Front

    def setup(self) -> None:
        if self.server.outer is not None:  # in this connection's own thread: one that is slow delays nobody
            self.request.settimeout(_IDLE_S)
            self.request = self.server.outer.wrap_socket(self.request, server_side=True)
        super().setup()

    def do_POST(self) -> None:
        length = self.headers.get_all("Content-Length", [])
        if not _MAY.fullmatch(self.path) or "Transfer-Encoding" in self.headers or len(length) != 1 or not length[0].isdecimal():
            self.close_connection = True  # its body is not read
            self.send_error(403, "Devices may use the Fleet API only")
            return
        passed_on = False
        behind = self._behind()
        try:
            self._pass_on(behind, int(length[0]))
            response = behind.getresponse()
            passed_on = True
            self._pass_back(response)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            if not passed_on:
                self.send_error(503, "The SuperLink does not answer")
        finally:
            behind.close()

    def _behind(self) -> http.client.HTTPConnection:
        host, port = self.server.behind
        if self.server.inner is None:
            return http.client.HTTPConnection(host, port, timeout=_IDLE_S)
        return http.client.HTTPSConnection(host, port, timeout=_IDLE_S, context=self.server.inner)

    def _pass_on(self, behind: http.client.HTTPConnection, length: int) -> None:
        behind.putrequest("POST", self.path, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP:
                behind.putheader(name, value)
        behind.putheader("Content-Length", str(length))
        behind.endheaders()
        while length:
            chunk = self.rfile.read(min(length, _CHUNK))
            if not chunk:
                raise ConnectionAbortedError
            behind.send(chunk)
            length -= len(chunk)

    def _pass_back(self, response: http.client.HTTPResponse) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if response.length is None:  # sent in pieces
            whole = response.read()
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole)
            return
        self.send_header("Content-Length", str(response.length))
        self.end_headers()
        while chunk := response.read(_CHUNK):
            self.wfile.write(chunk)

    def log_message(self, format: str, *args: Any) -> None:
        """The SuperLink has a log."""


@contextmanager
def front(address: tuple[str, int], behind: tuple[str, int], certificate: Path | None, key: Path | None, ca: Path | None) -> Iterator[None]:
    """Pass on what devices may ask, for as long as the block lasts.

    Args:
        address: To listen at.
        behind: Where the SuperLink listens.
        certificate: The server's; None: without encryption.
        key: Its private key.
        ca: The certificate of the authority that made it.

    Raises:
        OSError: It cannot listen there.
    """
    outer = inner = None
    if certificate is not None:
        outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        outer.load_cert_chain(certificate, key)
        inner = ssl.create_default_context(cafile=ca)
    with _Front(address, behind, outer, inner) as server:
        thread = threading.Thread(target=server.serve_forever, name="front", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
