"""Secure aggregation: what clients and server agree on, so that the server learns only the mean of
the updates. A client sends its update, reply - sent, as integers modulo 2^32 under masks that
cancel in the sum: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017; Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", CCS 2020 (SecAgg+). Engines run the protocol; its constants are here, because a client
accepts none from a server.

Secrets are shared (Shamir) so that each holder can check its share without the secret. The dealer
of a secret f(0) draws a second polynomial r of the same degree, gives client i the share (f(i),
r(i)), and publishes a digest of each share and the polynomial r + c f, where the challenge c is a
hash of the digests. A share that has its digest and lies on that polynomial is right but with a
chance of 2^-384, since c is known only once f and r are fixed. Nothing published reveals f, as r is
used only once (Atapoor et al., "VSS from Distributed ZK Proofs and Applications", ASIACRYPT 2023).
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256, sha384

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import TensorError
from coterie.core.tensors import Named, Tensors, check_alike

FEWEST = 3  # of two clients, each would learn the other's update from the sum
RANGE = 8.0  # no value of an update may be beyond
MODULUS = 1 << 32
UPDATE = "update"  # the one tensor of a reply that is to be masked


def levels(clients: int) -> int:
    """Return the number of levels: the greatest power of two of which the sum is below 2^32."""
    return 1 << min(30, ((MODULUS - 1) // clients).bit_length() - 1)


def step(clients: int) -> float:
    """Return the distance of two `levels`. Random rounding is unbiased: the mean's error is below a
    step, its deviation step / 2 sqrt(n).
    """
    return 2 * RANGE / levels(clients)


def threshold(clients: int) -> int:
    """Return how many clients must stay to the end: over two thirds, so that a server cannot get
    both masks of a client from different halves.
    """
    return max(FEWEST, 2 * clients // 3 + 1)


def check_form(first: Named, sent: Named, back: Named) -> None:
    """Raise TensorError if a client is sent, or has to return, other tensors than the first, so
    that updates have no sum; the exchange must then not be done unmasked.
    """
    check_alike(first, sent, "secure aggregation: sent to two clients")
    check_alike(sent, back, "secure aggregation: sent and expected back")
    if foreign := [name for name in sorted(sent) if not sent[name].is_floating_point()]:
        problem = f"secure aggregation: {foreign[0]!r} holds integers"
        raise TensorError(problem, "It carries floating-point numbers only.")


def difference(reply: Named, sent: Named) -> Tensor:
    """Return reply - sent as one vector, (d,) float64, in the order of the tensors' names."""
    parts = [
        (reply[name].detach().cpu().double() - sent[name].detach().cpu().double()).flatten()
        for name in sorted(sent)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def update(sent: Named, reply: Named) -> Tensor:
    """Return the update, see `difference`. Raises TensorError: the reply has another form than what
    was sent, integers, or a value out of `RANGE`.
    """
    check_form(sent, sent, reply)
    vector = difference(reply, sent)
    if not bool((vector.abs() <= RANGE).all()):  # of NaN: not true
        raise TensorError(
            f"reply to be masked: an update with values that are not numbers, or beyond "
            f"{RANGE:g}, which secure aggregation carries",
            "Training diverged there: lower the learning rate.",
        )
    return vector


def moved(sent: Sequence[Named], mean: np.ndarray) -> Tensors:
    """Return the mean of the replies: that of what was sent, plus the mean update, (d,)."""
    tensors_moved: Tensors = {}
    vector, start = torch.from_numpy(mean), 0
    for name in sorted(sent[0]):
        form = sent[0][name]
        part = vector[start : start + form.numel()].view(form.shape)
        origins = torch.stack([tensors[name].detach().cpu().double() for tensors in sent])
        tensors_moved[name] = (origins.mean(dim=0) + part).to(form.device, form.dtype)
        start += form.numel()
    return tensors_moved


# Order of the curve P-384: its private keys are shared, so arithmetic is modulo it.
ORDER = int("f" * 48 + "c7634d81f4372ddf581a0db248b0a77aecec196accc52973", 16)
SCALAR = 48  # bytes of a number below ORDER
DIGEST = 32  # bytes
_PLACE = 4


@dataclass(frozen=True)
class Share:
    """One client's share of a secret."""

    place: int  # of the client, from 1
    value: int  # f(place)
    blind: int  # r(place)

    def to_bytes(self) -> bytes:
        """Return it as `SHARE` bytes."""
        return self.place.to_bytes(_PLACE) + _bytes(self.value) + _bytes(self.blind)

    @staticmethod
    def from_bytes(data: bytes) -> "Share":
        """Return the inverse of `to_bytes`. Raises ValueError for another number of bytes."""
        if len(data) != SHARE:
            raise ValueError(f"a share of {len(data)} bytes, expected {SHARE}")
        parts = (data[:_PLACE], *_pieces(data[_PLACE:], SCALAR))
        return Share(*map(int.from_bytes, parts))


SHARE = _PLACE + 2 * SCALAR  # bytes of a share


@dataclass(frozen=True)
class Check:
    """What a client needs to check its share."""

    digest: bytes  # of the share
    challenge: int  # c
    answer: int  # r + c f at the client's place

    def holds(self, share: Share) -> bool:
        """Return whether a share was dealt by the dealer and lies on the published polynomial."""
        return (
            sha256(share.to_bytes()).digest() == self.digest
            and (share.blind + self.challenge * share.value - self.answer) % ORDER == 0
        )

    def to_bytes(self) -> bytes:
        """Return it as `CHECK` bytes."""
        return self.digest + _bytes(self.challenge) + _bytes(self.answer)

    @staticmethod
    def from_bytes(data: bytes) -> "Check":
        """Return the inverse of `to_bytes`. Raises ValueError for another number of bytes."""
        if len(data) != CHECK:
            raise ValueError(f"a check of {len(data)} bytes, expected {CHECK}")
        return Check(data[:DIGEST], *map(int.from_bytes, _pieces(data[DIGEST:], SCALAR)))


CHECK = DIGEST + 2 * SCALAR  # bytes of a check


@dataclass(frozen=True)
class SharingProof:
    """What the dealer of a secret publishes."""

    digests: tuple[bytes, ...]  # of the shares, by place
    response: tuple[int, ...]  # the coefficients of r + c f, the constant one first
    context: bytes  # what the secret is for, part of the challenge

    @cached_property
    def challenge(self) -> int:
        """c, a hash of the digests."""
        return _challenge(self.digests, self.context)

    def check(self, place: int) -> Check:
        """Return the `Check` of the client at a place."""
        return Check(self.digests[place - 1], self.challenge, _at(self.response, place))

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Return the digests and the response, each as bytes."""
        return b"".join(self.digests), b"".join(map(_bytes, self.response))

    @staticmethod
    def from_bytes(digests: bytes, response: bytes, context: bytes) -> "SharingProof":
        """Return the inverse of `to_bytes`."""
        return SharingProof(
            _pieces(digests, DIGEST), tuple(map(int.from_bytes, _pieces(response, SCALAR))), context
        )


def share_secret(
    secret: int, blind: int, threshold: int, clients: int, context: bytes
) -> tuple[list[Share], SharingProof]:
    """Return `clients` shares of a secret f(0) < `ORDER`, any `threshold` of which give it back,
    and the published proof for a context. `blind` is r(0), drawn at random for this secret.
    """
    f, r = (
        [first, *(secrets.randbelow(ORDER) for _ in range(threshold - 1))]
        for first in (secret, blind)
    )
    shares = [Share(place, _at(f, place), _at(r, place)) for place in range(1, clients + 1)]
    digests = tuple(sha256(share.to_bytes()).digest() for share in shares)
    c = _challenge(digests, context)
    response = tuple((b + c * a) % ORDER for a, b in zip(f, r, strict=True))
    return shares, SharingProof(digests, response, context)


def combined(shares: Sequence[Share]) -> int:
    """Return the secret of enough shares of different places."""
    weights = _weights(tuple(share.place for share in shares))
    return sum(w * share.value for w, share in zip(weights, shares, strict=True)) % ORDER


@lru_cache(maxsize=64)
def _weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights of these places for the value at 0."""
    weights = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above, below = above * other % ORDER, below * (other - place) % ORDER
        weights.append(above * pow(below, -1, ORDER) % ORDER)
    return tuple(weights)


def _challenge(digests: Sequence[bytes], context: bytes) -> int:
    return int.from_bytes(sha384(sha256(context).digest() + b"".join(digests)).digest()) % ORDER


def _at(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % ORDER
    return value


def _bytes(number: int) -> bytes:
    return number.to_bytes(SCALAR)


def _pieces(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[start : start + size] for start in range(0, len(data), size))
