"""Certificates of a server and keys of devices, to encrypt traffic and refuse unknown ones; and the
address and certificate of a server.
"""

import http.client
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.core import names
from coterie.core.errors import Refused
from coterie.core.foreign import read_bytes, read_text
from coterie.deploy.resident import write_private

CA, CA_KEY, CERTIFICATE, KEY, CLIENTS = "ca.crt", "ca.key", "server.crt", "server.key", "clients"
PUBLIC = ".pub"
_ALWAYS = ("localhost", "127.0.0.1")  # the server's own machine, where runs are submitted
_DAYS = 3 * 365
_AUTHORITY = "coterie certificate authority"
_MOST = 1 << 14  # bytes of a file with a public key; a true one has a few hundred


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> None:
    """Create the files missing from a folder: a certificate authority `ca.crt` and `ca.key`, the
    server's certificate `server.crt` and `server.key` for `hosts`, and a key pair for each client.
    Raises Refused if an id is invalid, or the folder is for other hosts, or not writable.

    Only `ca.crt` and a client's private key go to its device. Then the private key is not needed
    here: a client with a public key has its pair. `ca.key` and `server.key` never leave the server.
    """
    for client in clients:
        _check(client)
    try:
        (folder / CLIENTS).mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / CERTIFICATE).exists():
            _make_certificates(folder, sorted({*hosts, *_ALWAYS}))
        for client in clients:
            if not public(folder, client).exists():
                _make_pair(private(folder, client), public(folder, client))
    except OSError as error:
        problem = f"cannot write keys to {folder}: {error.strerror}"
        raise Refused(problem, "Choose another folder.") from None
    extensions = x509.load_pem_x509_certificate(read_bytes(folder / CERTIFICATE)).extensions
    known = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if missing := sorted(set(hosts) - {str(name.value) for name in known}):
        raise Refused(
            f"{folder / CERTIFICATE} already exists, and is not for {', '.join(missing)}",
            "Choose another folder, or delete its certificates: devices then need the new ca.crt.",
        )


def _check(client: str) -> None:
    """Refuse an invalid id, or one whose private key would look like a public key."""
    if mistake := names.mistake(client):
        raise Refused(f"--client {client!r}: {mistake}", "Choose another name.")
    if client.endswith(PUBLIC):
        remedy = f"File names of public keys end that way: choose an id without {PUBLIC}."
        raise Refused(f"--client {client!r}", remedy)


def private(folder: Path, client: str) -> Path:
    """Return where a client's private key is in a folder of keys."""
    return folder / CLIENTS / names.encoded(client)


def public(folder: Path, client: str) -> Path:
    """Return where a client's public key is in a folder of keys."""
    return folder / CLIENTS / (names.encoded(client) + PUBLIC)


def owner(path: Path) -> str:
    """Return the client of a key file by its name, which may be written without escapes."""
    return names.normal(names.decoded(path.name.removesuffix(PUBLIC)))


def public_keys(folder: Path) -> tuple[dict[str, Path], dict[Path, str]]:
    """Return the files of devices' public keys in a folder by their texts, and the problems of
    files without a key. Raises Refused if the folder cannot be read.
    """
    try:
        names_in_folder = sorted(os.listdir(folder / CLIENTS))
    except OSError as error:
        remedy = "Until it can be read, the list of known devices stays as it is."
        raise Refused(f"cannot read {folder / CLIENTS}: {error.strerror}", remedy) from None
    key_files, problems = dict[str, Path](), dict[Path, str]()
    for path in (folder / CLIENTS / name for name in names_in_folder if name.endswith(PUBLIC)):
        try:
            text = _read(path)
            public_key(text)
            key_files[text] = path
        except Refused as error:
            problems[path] = error.problem
    return key_files, problems


def _read(path: Path) -> str:
    """Return the text of a small regular file. Raises Refused for others: pipes may have no end."""
    try:
        if not path.is_file():
            raise Refused(f"It is not a file{', or a broken link' * path.is_symlink()}.")
        return read_text(path, _MOST)
    except OSError as error:
        raise Refused(f"It cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise Refused("It holds no public key.") from None
    except ValueError:
        raise Refused(f"It has more than {_MOST:,} bytes.") from None


@lru_cache(1 << 14)
def public_key(text: str) -> ec.EllipticCurvePublicKey:
    """Return the public key in a text. Raises Refused for others, or keys unknown to Flower."""
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise Refused("It holds no public key.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise Refused(
            "It contains a kind of key that Flower does not accept. Make one with: "
            "ssh-keygen -t ecdsa -b 384"
        )
    return key


def shown(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the bytes by which a device shows its public key to a server."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    authority, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = (
        _certificate(_AUTHORITY, authority.public_key(), authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    leaf = (
        _certificate("coterie server", server_key.public_key(), authority.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_name, hosts))), critical=False)
    )
    for key, name in ((authority, CA_KEY), (server_key, KEY)):
        content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_private(folder / name, content)
    for builder, name in ((root, CA), (leaf, CERTIFICATE)):
        certificate = builder.sign(authority, hashes.SHA384())
        (folder / name).write_bytes(certificate.public_bytes(Encoding.PEM))


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Return a certificate with the key identifiers that RFC 5280 and Python 3.13 demand."""
    now, issuer = datetime.now(UTC), x509.AuthorityKeyIdentifier.from_issuer_public_key(authority)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(issuer, critical=False)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    """Return the usage of a key: signing certificates, or the server's side of TLS."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    no = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **no)


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _make_pair(path: Path, public: Path) -> None:
    """Make a key pair as `ssh-keygen -t ecdsa -b 384` makes it: Flower knows no other kind."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.unlink(missing_ok=True)  # of a former pair, whose public key was deleted
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    # A running server looks for *.pub all the time, and must not read half of one.
    new = public.with_name(f"{public.name}.new")
    new.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    new.replace(public)


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
            problem = f"{self.address!r} is not the address of a server"
            raise Refused(problem, "The form is HOST:PORT, for instance example.org:9500.")
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
            remedy = "Check the port. If the server runs with --insecure, give --insecure here too."
            raise Refused(f"{self.address} does not use TLS", remedy) from None
        except (http.client.HTTPException, ConnectionResetError):
            if self.ca is None:
                problem = f"{self.address} requires TLS, or is not a server"
                raise Refused(problem, "Give --ca (and, for a device, --key).") from None
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
            problem = f"{self.ca} is not a certificate"
            raise Refused(problem, "Copy ca.crt from the server's keys.") from None
        return http.client.HTTPSConnection(host, int(port), timeout=_ANSWER_S, context=context)


def there(path: Path, what: str, remedy: str) -> None:
    """Raise Refused if a file is missing."""
    if not path.is_file():
        raise Refused(f"{path}: {what} does not exist", remedy)


def unknown(address: str) -> str:
    """Return a sentence if a host, or that of `host:port`, has no address seen from here, or ""."""
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
