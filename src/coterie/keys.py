"""Certificates for a server and keys for devices, so that only known devices talk to a known server, and nobody listens."""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from coterie.errors import Refused

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
    from cryptography.x509.oid import NameOID
except ImportError:  # pragma: no cover - it comes with Flower
    raise Refused("Flower is not installed", "Install the extra: pip install 'coterie[flower]'.") from None

CA, CA_KEY, CERTIFICATE, KEY, CLIENTS = "ca.crt", "ca.key", "server.crt", "server.key", "clients"
_ALWAYS = ("localhost", "127.0.0.1")  # the server's own machine, where runs are submitted
_DAYS = 3 * 365
_AUTHORITY = "coterie certificate authority"


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> None:
    """Make what is missing in a folder: a certificate authority, the server's certificate, and a key pair for each client.

    Only `ca.crt` and a client's own private key go to its device; `ca.key` and `server.key` never leave the server.

    Args:
        folder: Gets `ca.crt`, `ca.key`, `server.crt`, `server.key`, `clients/<id>` and `clients/<id>.pub`.
        hosts: Names and addresses by which devices reach the server.
        clients: Ids.

    Raises:
        Refused: The folder has a certificate for other hosts already, or is not writable.
    """
    try:
        (folder / CLIENTS).mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / CERTIFICATE).exists():
            _make_certificates(folder, sorted({*hosts, *_ALWAYS}))
        for client in clients:
            if not (folder / CLIENTS / client).exists():
                _make_pair(folder / CLIENTS / client)
    except OSError as error:
        raise Refused(f"cannot write keys to {folder}: {error.strerror}", "Choose another folder.") from None
    if missing := sorted(set(hosts) - set(_hosts(folder / CERTIFICATE))):
        problem = f"{folder / CERTIFICATE} is there already, and not for {', '.join(missing)}"
        raise Refused(problem, "Choose another folder, or delete its certificates: devices then need the new ca.crt.")


def _make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    authority, own = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate(_AUTHORITY, authority.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    leaf = _certificate("coterie server", own.public_key()).add_extension(
        x509.SubjectAlternativeName(list(map(_name, hosts))), critical=False
    )
    leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    for key, name in ((authority, CA_KEY), (own, KEY)):
        _write_private(folder / name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for builder, name in ((root, CA), (leaf, CERTIFICATE)):
        (folder / name).write_bytes(builder.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM))


def _certificate(name: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=_DAYS))
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(path: Path) -> list[str]:
    """The names and addresses that a certificate is for."""
    extensions = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    return [str(name.value) for name in extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def _make_pair(path: Path) -> None:
    """A key pair as `ssh-keygen -t ecdsa -b 384` makes it: Flower knows no other kind."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.with_name(f"{path.name}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))


def _write_private(path: Path, content: bytes) -> None:
    """Write what nobody else may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
