"""Certificates and keys, believed by other programs than the one that made them."""

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from coterie.core.errors import Refused
from coterie.deploy import keys


@pytest.fixture
def made(tmp_path: Path) -> Path:
    keys.make(tmp_path / "keys", ["server.example", "192.0.2.7"], ["ann", "ben"])
    return tmp_path / "keys"


def openssl(*arguments: object) -> str:
    return subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    "how",
    [
        ("-verify_hostname", "server.example"),
        ("-verify_ip", "192.0.2.7"),
        ("-verify_ip", "127.0.0.1"),
    ],
)
def test_openssl_believes_the_certificate(made: Path, how: tuple[str, str]) -> None:
    assert "OK" in openssl(
        "verify", "-x509_strict", "-CAfile", made / "ca.crt", *how, made / "server.crt"
    )


def test_openssl_does_not_believe_it_for_another_host(made: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        openssl(
            "verify",
            "-CAfile",
            made / "ca.crt",
            "-verify_hostname",
            "other.example",
            made / "server.crt",
        )


def test_the_server_has_the_key_of_its_certificate(made: Path) -> None:
    of_certificate = openssl("x509", "-in", made / "server.crt", "-noout", "-pubkey")
    assert openssl("pkey", "-in", made / "server.key", "-pubout") == of_certificate


def test_a_pair_is_one_that_flower_takes(made: Path) -> None:
    private = load_ssh_private_key((made / "clients/ann").read_bytes(), None)
    public = load_ssh_public_key((made / "clients/ann.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert uses_nist_ec_curve(public)
    assert public_key_to_bytes(private.public_key()) == public_key_to_bytes(public)


def test_nobody_else_may_read_what_is_private(made: Path) -> None:
    private = ["ca.key", "server.key", "clients/ann", "clients/ben"]
    assert {(made / name).stat().st_mode & 0o777 for name in private} == {0o600}
    assert (made / "clients").stat().st_mode & 0o777 == 0o700


def test_what_is_there_is_not_made_again(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    keys.make(made, ["server.example"], ["ann", "cleo"])
    after = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert before.items() <= after.items()
    assert {path.name for path in after.keys() - before.keys()} == {"cleo", "cleo.pub"}


def test_a_private_key_may_have_gone_to_its_device(made: Path) -> None:
    public = (made / "clients/ann.pub").read_bytes()
    (made / "clients/ann").unlink()
    keys.make(made, [], ["ann"])
    assert not (made / "clients/ann").exists()
    assert (made / "clients/ann.pub").read_bytes() == public


def test_who_was_shut_out_gets_a_new_pair(made: Path) -> None:
    public, private = (made / "clients/ann.pub").read_bytes(), (made / "clients/ann").read_bytes()
    (made / "clients/ann.pub").unlink()
    keys.make(made, [], ["ann"])
    assert (made / "clients/ann.pub").read_bytes() != public
    assert (made / "clients/ann").read_bytes() != private
    of_private = load_ssh_private_key((made / "clients/ann").read_bytes(), None).public_key()
    assert of_private == load_ssh_public_key((made / "clients/ann.pub").read_bytes())


def test_another_host_is_refused(made: Path) -> None:
    with pytest.raises(Refused, match=r"not for other\.example"):
        keys.make(made, ["server.example", "other.example"], [])


@pytest.mark.parametrize("client", ["../ann", "a/b", "", ".hidden"])
def test_a_client_that_cannot_be_is_refused_and_nothing_is_made(
    tmp_path: Path, client: str
) -> None:
    with pytest.raises(Refused):
        keys.make(tmp_path / "keys", [], [client])
    assert not list(tmp_path.rglob("*"))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot write keys"):
        keys.make(tmp_path / "file/keys", [], ["ann"])
