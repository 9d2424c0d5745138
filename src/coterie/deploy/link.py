"""Address and certificate of a server."""

import http.client
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import Refused

_ANSWER_S = 10.0  # seconds for a server to show that it is there
LAST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class Link:
    """The address and certificate of a server."""

    address: str  # `host:port`
    ca: Path | None  # the certificate of its authority; None: without encryption

    @property
    def flags(self) -> list[str]:
        tls = ["--insecure"] if self.ca is None else ["--root-certificates", str(self.ca)]
        return ["--superlink", self.address, *tls]

    def check(self) -> None:
        """Refuse an invalid address or certificate. Raises Refused."""
        host, sign, port = self.address.rpartition(":")
        if not sign or not host or not port.isdigit():
            raise Refused(
                f"{self.address!r} is not the address of a server",
                "The form is HOST:PORT, for instance example.org:9500.",
            )
        if self.ca is not None:
            remedy = "Copy ca.crt from the server's keys, or use --insecure."
            there(self.ca, "the certificate of the server's authority", remedy)

    def answers(self, api: str) -> bool:
        """Return whether a server answers at `fleet`, for devices, or `control`, to submit runs.
        Raises Refused if it is not the server of this link, or accepts no runs here.
        """
        connection, host = self._connection(), self.address.rpartition(":")[0]
        try:
            connection.request("POST", f"/v1/{api}/hello", b"")
            status = connection.getresponse().status
        except ssl.SSLCertVerificationError as error:
            raise Refused(
                f"{self.address} has no certificate signed by {self.ca}: {error.verify_message}",
                f"Check that ca.crt is from this server's keys, and that they were made with "
                f"--host {host}.",
            ) from None
        except ssl.SSLError:
            raise Refused(
                f"{self.address} does not use TLS",
                "Check the port. If the server runs with --insecure, give --insecure here too.",
            ) from None
        except (http.client.HTTPException, ConnectionResetError):
            if self.ca is None:
                raise Refused(
                    f"{self.address} requires TLS, or is not a server",
                    "Give --ca (and, for a device, --key).",
                ) from None
            return False
        except OSError:
            return False
        finally:
            connection.close()
        if status == http.HTTPStatus.FORBIDDEN:
            raise Refused(
                f"{self.address} is the port for devices",
                "Submit runs to the server's --runs-port, from its machine or through a tunnel.",
            )
        return status != http.HTTPStatus.SERVICE_UNAVAILABLE

    def _connection(self) -> http.client.HTTPConnection:
        host, _, port = self.address.rpartition(":")
        if self.ca is None:
            return http.client.HTTPConnection(host, int(port), timeout=_ANSWER_S)
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise Refused(
                f"{self.ca} is not a certificate", "Copy ca.crt from the server's keys."
            ) from None
        return http.client.HTTPSConnection(host, int(port), timeout=_ANSWER_S, context=context)


def there(path: Path, what: str, remedy: str) -> None:
    """Raise Refused if a file is missing."""
    if not path.is_file():
        raise Refused(f"{path}: {what} does not exist", remedy)


def unknown(address: str) -> str:
    """Return a sentence if the host of `host:port`, or a host alone, has no address as seen from
    this machine; "" if it has one.
    """
    host = address.rpartition(":")[0] or address
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError):
        return f" The name {host} has no address here: check it, and this machine's network."
    return ""


def listening(address: str) -> bool:
    """Return whether a program listens on host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
