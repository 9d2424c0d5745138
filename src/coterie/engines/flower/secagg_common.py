"""Keys, secrets and masks of secure aggregation, known to device and server, and the exchange that
they are bound to. Devices deal their secrets so that every holder can check its shares. Flower's
functions for masks and shares are replaced by those here, see `_REPLACED`.
"""

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from Crypto.PublicKey import ECC
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.client.mod.secure_aggregation import secaggplus_mod
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow
from flwr.supercore.primitives import asymmetric

from coterie.aggregation.noise import Source
from coterie.aggregation.secure import (
    DIGEST,
    MODULUS,
    ORDER,
    RANGE,
    SCALAR,
    SHARE,
    Check,
    Share,
    SharingProof,
    levels,
    share_secret,
    threshold,
)
from coterie.core.errors import Refused, TensorError
from coterie.engines.messages import Request

SAME_VERSION = "Install the same version of coterie on server and devices."
TRAIN = "train"  # the only type of message that Flower's modifier does not pass through as it is
TEXT, FITRES = "text", "fitres"
EXCHANGE = "coterie.exchange"  # the record of which exchange it is; on a device also of its cohort
ABOUT = "about"
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
    return [
        asymmetric.sign_message(asymmetric.bytes_to_private_key(key), text) for key in private_keys
    ]


def proves(public: bytes, signature: bytes, about: str, node: int) -> bool:
    """Return whether a node has the private key of this P-384 public key, see `signatures`."""
    try:
        key = asymmetric.bytes_to_public_key(public)
        return (
            isinstance(key.curve, ec.SECP384R1)
            and asymmetric.public_key_to_bytes(key) == public
            and asymmetric.verify_signature(key, f"{about} {node}".encode(), signature)
        )
    except (ValueError, AttributeError, UnsupportedAlgorithm):
        return False


@dataclass(frozen=True)
class Proofs:
    """What a device publishes of the secrets that it deals."""

    seed: SharingProof  # of its own mask
    key: SharingProof  # of the private key of the pairwise masks
    point: bytes  # the public key of the blinding value of `key`, PEM

    def to_list(self) -> list[bytes]:
        """Return the parts that a device sends."""
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
        """Return whether this key's private key was dealt (Schnorr). ValueError: no point."""
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
    """Share a private key; the last value is `Proofs.point`."""
    blind, public = asymmetric.generate_key_pairs()
    point = asymmetric.public_key_to_bytes(public)
    keys = asymmetric.bytes_to_private_key(private), blind
    secret, start = (key.private_numbers().private_value for key in keys)
    return *share_secret(secret, start, threshold, clients, _context(cohort, node, point)), point


def _context(cohort: bytes, node: int, point: bytes = b"") -> bytes:
    return cohort + node.to_bytes(8) + point


def _point(public: bytes) -> ECC.EccPoint:
    numbers = asymmetric.bytes_to_public_key(public).public_numbers()
    return ECC.EccPoint(numbers.x, numbers.y, "p384")


@dataclass(frozen=True)
class Bound:
    """The digests that an exchange is bound to."""

    cohort: bytes = b""  # of the exchange, its clients and their keys, see `digest_of`
    sent: bytes = b""  # of the tensors sent to the clients
    node: int = 0  # the device's own
    published: list[bytes] = field(default_factory=list)  # receives the proofs of dealt secrets


_NOTHING = Bound()
_bound: ContextVar[Bound] = ContextVar("_bound", default=_NOTHING)


@contextmanager
def binding(bound: Bound) -> Iterator[None]:
    """Bind shares and masks in the block to this exchange."""
    token = _bound.set(bound)
    try:
        yield
    finally:
        _bound.reset(token)


def exchange_name(request: Request) -> str:
    """Name an exchange."""
    return json.dumps([request.run, request.round, request.number, request.task])


def digest_of(about: str, keys: Mapping[int, Sequence[bytes]]) -> bytes:
    """Return the digest of an exchange and all its clients' public keys, by node."""
    cohort = [[node, *(key.hex() for key in keys[node])] for node in sorted(keys)]
    return sha256(json.dumps([about, cohort]).encode()).digest()


def expanded(seed: bytes, modulus: int, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return a mask: AES-256 in counter mode, keyed with SHA-256 of a seed, used once, and the
    exchange. Flower's own function folds the seed to 32 bits (28 for a pair of clients) for a
    Mersenne Twister: with three clients a server finds both of a client's masks in minutes.
    """
    if modulus != MODULUS:
        raise TensorError(f"masks modulo {modulus}, expected {MODULUS}", SAME_VERSION)
    sizes, bound = [math.prod(shape) for shape in shapes], _bound.get()
    key = sha256(bound.cohort + bound.sent + seed).digest()
    stream = Source(key).read(4 * sum(sizes))
    parts = np.split(np.frombuffer(stream, "<u4").astype(np.int64), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _shares_of(secret: bytes, threshold: int, clients: int) -> list[bytes]:
    """Return shares, by place, of a device's seed or private key, and record its proofs. Shares of
    Flower's own function cannot be checked.
    """
    bound = _bound.get()
    point: list[bytes] = []
    if len(secret) == SEED:
        shares, proof = share_seed(secret, threshold, clients, bound.cohort, bound.node)
    else:
        shares, proof, *point = share_key(secret, threshold, clients, bound.cohort, bound.node)
    bound.published.extend([*proof.to_bytes(), *point])
    return [share.to_bytes() for share in shares]


def weight_sent(bound: Bound, clients: int) -> int:
    """Return a client's weight, 1, under a known mask: no other weight can hide in the sum."""
    text = b"weight" + bound.cohort + bound.sent + bound.node.to_bytes(8)
    return (levels(clients) + int.from_bytes(sha256(text).digest()[:4])) % MODULUS


def _share(source: int, target: int, b_share: bytes, key_share: bytes) -> bytes:
    """Return a client's shares for another as plain text: exchange, cohort, Flower's part."""
    return _bound.get().cohort + share_keys_plaintext_concat(source, target, b_share, key_share)


def share_read(share: bytes) -> tuple[int, int, bytes, bytes]:
    """Return the inverse of `_share`. Raises TensorError: the other exchange or cohort differs."""
    if share[:DIGEST] != _bound.get().cohort:
        raise TensorError(
            "secure aggregation: another client was sent a different cohort or exchange from this",
            "A server that tells clients different things could see a single client's update; "
            "nothing was sent.",
        )
    return share_keys_plaintext_separate(share[DIGEST:])


_REPLACED = {
    "pseudo_rand_gen": (expanded, (secaggplus_mod, SecAggPlusWorkflow.unmask_stage)),
    "create_shares": (_shares_of, (secaggplus_mod,)),
    "share_keys_plaintext_concat": (_share, (secaggplus_mod,)),
    "share_keys_plaintext_separate": (share_read, (secaggplus_mod,)),
}


for _name, (_ours, _users) in _REPLACED.items():
    for _user in _users:
        if _name not in _user.__globals__:  # pragma: no cover - another release of Flower
            raise Refused(
                f"this release of Flower makes masks differently ({_user.__module__})",
                "Install flwr 1.41.",
            )
        _user.__globals__[_name] = _ours


def terms(clients: int) -> dict[str, int | float]:
    """Return Flower's settings for so many clients in the first stage."""
    return {
        Key.SAMPLE_NUMBER: clients,
        Key.SHARE_NUMBER: clients,
        Key.THRESHOLD: threshold(clients),
        Key.CLIPPING_RANGE: RANGE,
        Key.TARGET_RANGE: levels(clients),
        Key.MOD_RANGE: MODULUS,
        Key.MAX_WEIGHT: 1.0,
    }


def shares_hold(plain: bytes, source: int, target: int, checks: bytes) -> bool:
    """Return whether a client dealt these shares, see `_share`, of its seed and key to another.
    Raises TensorError for another exchange or cohort, ValueError for invalid shares.
    """
    sent_by, sent_to, *shares = share_read(plain)
    middle = len(checks) // 2
    return (sent_by, sent_to) == (source, target) and all(
        Check.from_bytes(check).holds(Share.from_bytes(share))
        for share, check in zip(shares, (checks[:middle], checks[middle:]), strict=True)
    )
