"""Keys and secrets of secure aggregation, which a device deals among the others so that everybody
can check what they got: what device and server both know of them.
"""

import secrets
from dataclasses import dataclass

from Crypto.PublicKey import ECC
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
    verify_signature,
)

from coterie.aggregation.sharing import (
    DIGEST,
    ORDER,
    SCALAR,
    SHARE,
    Share,
    SharingProof,
    share_secret,
)

# What Flower's messages have no names for.
CHECK_SHARES, OPEN_SHARE = "coterie.check shares", "coterie.open share"  # two more stages
SIGNATURES, PROOFS, CHECKS, COMPLAINTS = "signatures", "proofs", "checks", "complaints"
COMPLAINER, OPENED, SHARE_OPENED = "complainer", "opened", "share"
SEED = 32  # bytes
PUBLIC_KEY = 215  # bytes of a public key of P-384 in PEM
_ADDRESSES = 20  # bytes before the shares: from whom, to whom, how long the first one is
MOST_SIGNATURE = 104  # bytes
CIPHERTEXT = len(encrypt(b"A" * 43 + b"=", bytes(DIGEST + _ADDRESSES + 2 * SHARE)))


def signatures(private_keys: list[bytes], about: str, node: int) -> list[bytes]:
    """Return proofs that a node has its private keys: signatures of the exchange and the node."""
    text = f"{about} {node}".encode()
    return [sign_message(bytes_to_private_key(key), text) for key in private_keys]


def proves(public: bytes, signature: bytes, about: str, node: int) -> bool:
    """Whether this is a public key of P-384, and its private key is the node's, see
    `signatures`.
    """
    try:
        key = bytes_to_public_key(public)
        return (
            isinstance(key.curve, ec.SECP384R1)
            and public_key_to_bytes(key) == public
            and verify_signature(key, f"{about} {node}".encode(), signature)
        )
    except (ValueError, AttributeError, UnsupportedAlgorithm):
        return False


@dataclass(frozen=True)
class Proofs:
    """What a device publishes of the secrets that it deals.

    Args:
        seed: Of its own mask.
        key: Of the private key of the masks of pairs.
        point: Public key of the blinding value of `key`, PEM.
    """

    seed: SharingProof
    key: SharingProof
    point: bytes

    def to_list(self) -> list[bytes]:
        """Return it as a device sends it."""
        return [*self.seed.to_bytes(), *self.key.to_bytes(), self.point]

    @staticmethod
    def from_list(data: list[bytes], cohort: bytes, node: int) -> "Proofs":
        """Return the inverse of `to_list`, for a cohort's digest and a node."""
        *parts, point = data
        return Proofs(
            SharingProof.from_bytes(parts[0], parts[1], _context(cohort, node)),
            SharingProof.from_bytes(parts[2], parts[3], _context(cohort, node, point)),
            point,
        )

    @staticmethod
    def lengths(clients: int, threshold: int) -> list[int]:
        """Return the lengths of the parts of `to_list` in bytes."""
        return [*2 * [clients * DIGEST, threshold * SCALAR], PUBLIC_KEY]

    def is_of(self, public: bytes) -> bool:
        """Whether the private key of this public key was dealt (Schnorr's proof). Raises ValueError
        for a point that is none.
        """
        blinded = ECC.construct(curve="p384", d=1).pointQ * self.key.response[0]
        return bool(blinded == _point(self.point) + _point(public) * self.key.challenge)


def share_seed(
    seed: bytes, threshold: int, clients: int, cohort: bytes, node: int
) -> tuple[list[Share], SharingProof]:
    """Share the seed of a device's own mask."""
    blind = secrets.randbelow(ORDER)
    secret = int.from_bytes(seed)
    return share_secret(secret, blind, threshold, clients, _context(cohort, node))


def share_key(
    private: bytes, threshold: int, clients: int, cohort: bytes, node: int
) -> tuple[list[Share], SharingProof, bytes]:
    """Share a private key. Its last value is `Proofs.point`."""
    blind, public = generate_key_pairs()
    point = public_key_to_bytes(public)
    secret, start = (
        key.private_numbers().private_value for key in (bytes_to_private_key(private), blind)
    )
    return *share_secret(secret, start, threshold, clients, _context(cohort, node, point)), point


def private_key(secret: int) -> ec.EllipticCurvePrivateKey:
    """Return the private key that was dealt."""
    return ec.derive_private_key(secret, ec.SECP384R1())


def _context(cohort: bytes, node: int, point: bytes = b"") -> bytes:
    return cohort + node.to_bytes(8) + point


def _point(public: bytes) -> ECC.EccPoint:
    numbers = bytes_to_public_key(public).public_numbers()
    return ECC.EccPoint(numbers.x, numbers.y, "p384")
