"""Shares of a secret: what makes it up, what does not, and that each share can be checked."""

import secrets
from dataclasses import replace
from hashlib import sha256
from itertools import combinations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from coterie.aggregation.secure import (
    CHECK,
    ORDER,
    SHARE,
    Check,
    Share,
    SharingProof,
    combined,
    share_secret,
)

SECRET = secrets.randbelow(ORDER)


def shared(threshold: int, clients: int) -> tuple[list[Share], SharingProof]:
    return share_secret(SECRET, secrets.randbelow(ORDER), threshold, clients, b"test")


def naive_secret(shares: list[Share]) -> int:
    """Lagrange's formula at 0, with every quotient on its own."""
    total = 0
    for share in shares:
        weight = 1
        for other in shares:
            if other.place != share.place:
                weight = weight * other.place * pow(other.place - share.place, -1, ORDER)
        total += weight * share.value
    return total % ORDER


def test_the_order_is_that_of_the_curve() -> None:
    assert ec.SECP384R1().group_order == ORDER


@pytest.mark.parametrize(("threshold", "clients"), [(3, 3), (3, 4), (4, 5), (5, 7)])
def test_any_shares_that_are_enough_make_up_the_secret_and_fewer_do_not(
    threshold: int, clients: int
) -> None:
    shares, _ = shared(threshold, clients)
    for some in combinations(shares, threshold):
        assert combined(some) == naive_secret(list(some)) == SECRET
    for few in combinations(shares, threshold - 1):
        assert combined(few) != SECRET


def test_every_share_passes_its_own_check_and_no_other() -> None:
    shares, proof = shared(4, 6)
    for share in shares:
        for place in range(1, 7):
            assert proof.check(place).holds(share) is (place == share.place)


@given(st.integers(1, 6), st.integers(1, ORDER - 1), st.sampled_from(["value", "blind"]))
def test_a_share_that_was_changed_does_not_pass(place: int, by: int, name: str) -> None:
    shares, proof = shared(4, 6)
    share = shares[place - 1]
    wrong = replace(share, **{name: (getattr(share, name) + by) % ORDER})
    assert not proof.check(place).holds(wrong)


def test_shares_of_two_polynomials_do_not_pass_whatever_is_published() -> None:
    """The dealer publishes right digests of them, and the polynomial that fits the first three."""
    one, two = (shared(3, 6)[0] for _ in range(2))
    mixed = one[:3] + two[3:]
    digests = tuple(sha256(share.to_bytes()).digest() for share in mixed)
    c = SharingProof(digests, (), b"test").challenge
    points = [(share.place, (share.blind + c * share.value) % ORDER) for share in mixed[:3]]
    proof = SharingProof(digests, tuple(through(points)), b"test")
    assert [proof.check(s.place).holds(s) for s in mixed] == [True] * 3 + [False] * 3


def through(points: list[tuple[int, int]]) -> list[int]:
    """Coefficients of the polynomial through three points, by Gaussian elimination modulo ORDER."""
    rows = [[pow(x, k, ORDER) for k in range(3)] + [y] for x, y in points]
    for k in range(3):
        inverse = pow(rows[k][k], -1, ORDER)
        rows[k] = [value * inverse % ORDER for value in rows[k]]
        for other in range(3):
            if other != k:
                factor = rows[other][k]
                rows[other] = [
                    (a - factor * b) % ORDER for a, b in zip(rows[other], rows[k], strict=True)
                ]
    return [row[3] for row in rows]


def test_what_is_published_is_for_one_context() -> None:
    shares, proof = shared(3, 4)
    assert not replace(proof, context=b"another").check(1).holds(shares[0])


def test_all_of_it_goes_through_bytes() -> None:
    shares, proof = shared(3, 4)
    assert SharingProof.from_bytes(*proof.to_bytes(), b"test") == proof
    for share in shares:
        check = proof.check(share.place)
        assert (len(share.to_bytes()), len(check.to_bytes())) == (SHARE, CHECK)
        assert Share.from_bytes(share.to_bytes()) == share
        assert Check.from_bytes(check.to_bytes()) == check
    with pytest.raises(ValueError, match="99 bytes"):
        Share.from_bytes(bytes(99))
