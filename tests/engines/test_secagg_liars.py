"""Secure aggregation and one registered device that does not follow the protocol: whatever it does
at whichever stage, it is named, it alone, and the others have their sum.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_secagg import (  # noqa: F401 - the fixture
    InProcess,
    answered,
    as_in_a_run,
    assert_is_mean,
    configured,
    said_by,
    with_masked,
)

from coterie.aggregation import secure
from coterie.aggregation.secure import Share, SharingProof
from coterie.engines.flower.secagg_common import (
    CHECK_SHARES,
    COMPLAINTS,
    OPEN_SHARE,
    share_key,
    share_seed,
)

LIAR = 1000
LEVELS = secure.levels(5)
Change = Callable[[int, str, Message], Message]


def at(stage: str, change: Callable[[ConfigRecord], Any]) -> Change:
    """The liar changes what it says at one stage."""

    def tamper(node: int, now: str, reply: Message) -> Message:
        if (node, now) == (LIAR, stage) and not reply.has_error():
            change(reply.content.config_records[RECORD_KEY_CONFIGS])
        return reply

    return tamper


def keys(first: bytes, second: bytes) -> Change:
    return at(Stage.SETUP, lambda c: c.update({Key.PUBLIC_KEY_1: first, Key.PUBLIC_KEY_2: second}))


def lists(stage: str, **changed: Callable[[list[Any]], list[Any]]) -> Change:
    """The liar changes lists of what it says."""

    def change(configs: ConfigRecord) -> None:
        for key, made in changed.items():
            configs[key] = made(list(configs[key]))

    return at(stage, change)


def one_flipped(values: list[bytes]) -> list[bytes]:
    return [values[0][:-1] + bytes([values[0][-1] ^ 1]), *values[1:]]


def random_bytes(values: list[bytes]) -> list[bytes]:
    return [os.urandom(len(value)) for value in values]


def moved(weight: int) -> Change:
    return with_masked(lambda v: [(v[0] + weight * LEVELS) % 2**32, v[1]])


def sharing(**changed: Callable[[list[Any]], list[Any]]) -> Change:
    return lists(Stage.SHARE_KEYS, **changed)


def unmasking(**changed: Callable[[list[Any]], list[Any]]) -> Change:
    return lists(Stage.UNMASK, **changed)


def a_key() -> bytes:
    return public_key_to_bytes(generate_key_pairs()[1])


# Before a masked update is sent: the liar is left out, and the others have their own mean.
EARLY = {
    "keys of random bytes": keys(os.urandom(200), os.urandom(200)),
    "keys of random bytes, as long as keys": keys(os.urandom(215), os.urandom(215)),
    "no keys": keys(b"", b""),
    "keys that are not its own": keys(a_key(), a_key()),
    "one key twice": at(Stage.SETUP, lambda c: c.update({Key.PUBLIC_KEY_1: c[Key.PUBLIC_KEY_2]})),
    "keys exchanged": at(
        Stage.SETUP,
        lambda c: c.update(
            {Key.PUBLIC_KEY_1: c[Key.PUBLIC_KEY_2], Key.PUBLIC_KEY_2: c[Key.PUBLIC_KEY_1]}
        ),
    ),
    "random signatures": lists(Stage.SETUP, signatures=random_bytes),
    "random ciphertexts": sharing(ctxts=random_bytes),
    "one ciphertext flipped": sharing(ctxts=one_flipped),
    "ciphertexts to each other's receivers": sharing(ctxts=lambda v: v[::-1]),
    "ciphertexts of 20 MB": sharing(ctxts=lambda v: [os.urandom(20_000_000), *v[1:]]),
    "no ciphertexts": sharing(ctxts=lambda v: [], dsts=lambda v: []),
    "all to one": sharing(dsts=lambda v: [1001] * len(v)),
    "to nobody there": sharing(dsts=lambda v: [77 + k for k in range(len(v))]),
    "to itself": sharing(dsts=lambda v: [LIAR, *v[1:]]),
    "one left out": sharing(ctxts=lambda v: v[1:], dsts=lambda v: v[1:]),
    "random proofs": sharing(proofs=random_bytes),
    "no proofs": sharing(proofs=lambda v: []),
    "half of the digests wrong": sharing(
        proofs=lambda v: [v[0][:64] + os.urandom(len(v[0]) - 64), *v[1:]]
    ),
    "complains about everybody": at(
        CHECK_SHARES, lambda c: c.update({COMPLAINTS: [1001, 1002, 1003, 1004]})
    ),
    "complains about nobody there": at(CHECK_SHARES, lambda c: c.update({COMPLAINTS: [7]})),
    "complains about itself": at(CHECK_SHARES, lambda c: c.update({COMPLAINTS: [LIAR]})),
    "complains twice": at(CHECK_SHARES, lambda c: c.update({COMPLAINTS: [1001, 1001]})),
    "weight + 5": moved(5),
    "weight - 4": moved(-4),
    "random weight": with_masked(lambda v: [np.random.default_rng(0).integers(0, 2**32, 1), v[1]]),
    "a masked update that claims to be large": at(
        Stage.COLLECT_MASKED_VECTORS,
        lambda c: c.update(
            {
                Key.MASKED_PARAMETERS: [
                    c[Key.MASKED_PARAMETERS][0],
                    c[Key.MASKED_PARAMETERS][1].replace(b"(607,), ", b"(9**9,),"),
                ]
            }
        ),
    ),
}
# Afterwards its update is in the sum as it is: nothing that it says then changes that.
LATE = {
    "random shares": unmasking(shares=random_bytes),
    "one bit of a share flipped": unmasking(shares=one_flipped),
    "empty shares": unmasking(shares=lambda v: [b"" for _ in v]),
    "no shares": unmasking(shares=lambda v: [], nids=lambda v: []),
    "shares twice": unmasking(shares=lambda v: v * 2, nids=lambda v: v * 2),
    "shares of others": unmasking(nids=lambda v: v[::-1]),
    "shares of one alone": unmasking(nids=lambda v: [v[0]] * len(v)),
    "shares of 20 MB": unmasking(shares=lambda v: [os.urandom(20_000_000), *v[1:]]),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_liar_is_left_out_and_named_alone(name: str) -> None:
    replies, ear = answered(InProcess(5, tamper=EARLY[name]), 5)
    assert_is_mean(replies, (1, 2, 3, 4), 5)
    assert list(ear.reasons) == ["c0"]


@pytest.mark.parametrize("name", LATE)
def test_a_liar_whose_update_is_in_the_sum_is_named_alone(name: str) -> None:
    replies, ear = answered(InProcess(5, tamper=LATE[name]), 5)
    assert_is_mean(replies, range(5), 5)
    assert list(ear.reasons) == ["c0"]


def test_who_copies_the_keys_of_another_is_named_alone() -> None:
    seen: dict[str, bytes] = {}

    def copies(node: int, stage: str, reply: Message) -> Message:
        configs = reply.content.config_records[RECORD_KEY_CONFIGS] if stage else {}
        if stage == Stage.SETUP and node == 1001:
            seen.update(configs)
        if stage == Stage.SETUP and node == 1004:
            configs.update(seen)
        return reply

    replies, ear = answered(InProcess(5, tamper=copies), 5)
    assert_is_mean(replies, (0, 1, 2, 3), 5)
    assert list(ear.reasons) == ["c4"]


def test_who_accuses_one_honest_client_harms_nobody() -> None:
    """The accused one opens its shares, and the accuser goes on with them."""
    grid = InProcess(5, tamper=at(CHECK_SHARES, lambda c: c.update({COMPLAINTS: [1002]})))
    replies, ear = answered(grid, 5)
    assert_is_mean(replies, range(5), 5)
    assert ear.reasons == {}
    assert [node for node, stage, _ in grid.carried if stage == OPEN_SHARE] == [1002]


def test_who_is_accused_and_opens_nothing_is_named_alone() -> None:
    def accused(node: int, stage: str, reply: Message) -> Message:
        if (node, stage) == (1002, CHECK_SHARES):
            reply.content.config_records[RECORD_KEY_CONFIGS][COMPLAINTS] = [LIAR]
        return reply

    grid = InProcess(
        5, lost=lambda node, stage: (node, stage) == (LIAR, OPEN_SHARE), tamper=accused
    )
    replies, ear = answered(grid, 5)
    assert_is_mean(replies, (1, 2, 3, 4), 5)
    assert ear.reasons == {"c0": "node lost"}


# --- secrets that were not shared as they should be, in messages that are well formed
# --------------------------------------------------------------------------------------------------


def lying_dealer(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Share], SharingProof], list[Share]]
) -> None:
    """The liar deals other shares of its seed, and publishes their digests."""

    def lies(
        seed: bytes, threshold: int, clients: int, cohort: bytes, node: int
    ) -> tuple[list[Share], SharingProof]:
        shares, proof = share_seed(seed, threshold, clients, cohort, node)
        if node == LIAR:
            shares = change(shares, proof)
            digests = tuple(sha256(share.to_bytes()).digest() for share in shares)
            proof = replace(proof, digests=digests)
        return shares, proof

    monkeypatch.setattr("coterie.engines.flower.secagg_common.share_seed", lies)


def test_shares_that_do_not_fit_together_are_found_before_anybody_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lying_dealer(monkeypatch, lambda shares, _: [replace(s, value=s.value ^ 1) for s in shares])
    grid = InProcess(5)
    replies, ear = answered(grid, 5)
    assert_is_mean(replies, (1, 2, 3, 4), 5)
    assert list(ear.reasons) == ["c0"]
    assert not [1 for node, stage, _ in grid.carried if (node, stage) == (LIAR, Stage.UNMASK)]


def test_a_key_that_is_not_its_own_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(
        private: bytes, threshold: int, clients: int, cohort: bytes, node: int
    ) -> tuple[list[Share], SharingProof, bytes]:
        used = private_key_to_bytes(generate_key_pairs()[0]) if node == LIAR else private
        return share_key(used, threshold, clients, cohort, node)

    monkeypatch.setattr("coterie.engines.flower.secagg_common.share_key", lies)
    replies, ear = answered(InProcess(5), 5)
    assert_is_mean(replies, (1, 2, 3, 4), 5)
    assert list(ear.reasons) == ["c0"]
    assert "another key than its own" in ear.reasons["c0"]


# --- what a device opens
# --------------------------------------------------------------------------------------------------


def asked(grid: InProcess, node: int, **configs: Any) -> Message:
    return said_by(grid, configured(stage=OPEN_SHARE, **configs), node=node)


def dealt_by(grid: InProcess, dealer: int) -> dict[int, bytes]:
    """The shares that a device has dealt, under encryption, by node."""
    (configs,) = (
        message.content.config_records[RECORD_KEY_CONFIGS]
        for node, stage, message in grid.carried
        if (node, stage) == (dealer, Stage.SHARE_KEYS)
    )
    return dict(zip(configs[Key.DESTINATION_LIST], configs[Key.CIPHERTEXT_LIST], strict=True))


def test_a_device_opens_its_shares_for_one_client_alone() -> None:
    """With those for more a server would need fewer clients than the threshold."""
    grid = InProcess(5, lost=lambda node, stage: stage == CHECK_SHARES)
    answered(grid, 5)
    sent = dealt_by(grid, 1001)
    for _ in range(2):
        assert not asked(grid, 1001, complainer=1003, ctxts=sent[1003]).has_error()
    second = asked(grid, 1001, complainer=1004, ctxts=sent[1004])
    assert "a second client" in str(second.error.reason)
    assert asked(grid, 1001, complainer=1003, ctxts=sent[1003]).has_error()  # it forgot its keys


def test_a_device_opens_only_what_it_dealt_and_before_it_sends() -> None:
    """Both directions of two clients are under one key: what it got is not opened."""
    grid = InProcess(5, lost=lambda node, stage: stage == CHECK_SHARES)
    answered(grid, 5)
    got = dealt_by(grid, 1003)[1001]
    assert "did not deal" in str(asked(grid, 1001, complainer=1003, ctxts=got).error.reason)
    grid = InProcess(5, lost=lambda node, stage: stage == Stage.UNMASK)
    answered(grid, 5)
    assert "in use" in str(asked(grid, 1001, complainer=1003, ctxts=got).error.reason)


FIELDS = {
    Stage.SETUP: (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2, "signatures"),
    Stage.SHARE_KEYS: (Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, "proofs"),
    CHECK_SHARES: (COMPLAINTS,),
    Stage.COLLECT_MASKED_VECTORS: (),
    Stage.UNMASK: (Key.NODE_ID_LIST, Key.SHARE_LIST),
}
VALUES = st.one_of(
    st.binary(max_size=300),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=9),
    st.floats(allow_nan=False),
    st.lists(st.binary(max_size=120), max_size=6),
    st.lists(st.integers(998, 1006), max_size=6),
)


@st.composite
def lies(draw: Any) -> Change:
    """A liar puts something else in one field, changes bytes in it, leaves it out, or adds one."""
    stage = draw(st.sampled_from(list(FIELDS)))
    field = draw(st.sampled_from([*FIELDS[stage], "another"]))
    how = draw(st.sampled_from(["value", "bytes", "none"]))
    value, place, bits = draw(VALUES), draw(st.integers(0, 400)), draw(st.integers(1, 255))

    def changed(old: bytes) -> bytes:
        index = place % max(len(old), 1)
        return old[:index] + bytes(b ^ bits for b in old[index : index + 1]) + old[index + 1 :]

    def tamper(node: int, now: str, reply: Message) -> Message:
        if (node, now) != (LIAR, stage):
            return reply
        configs = reply.content.config_records[RECORD_KEY_CONFIGS]
        old = configs.get(field)
        if how == "none":
            configs.pop(field, None)
        elif how == "bytes" and isinstance(old, bytes):
            configs[field] = changed(old)
        elif how == "bytes" and isinstance(old, list) and old and isinstance(old[0], bytes):
            k = place % len(old)
            configs[field] = [*old[:k], changed(old[k]), *old[k + 1 :]]
        else:
            configs[field] = value
        return reply

    return tamper


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lies())
def test_whatever_one_device_says_the_others_have_their_sum(tamper: Change) -> None:
    replies, ear = answered(InProcess(5, tamper=tamper), 5)
    assert_is_mean(replies, range(5) if "c0" in replies else (1, 2, 3, 4), 5)
    assert set(ear.reasons) <= {"c0"}
    assert "c0" in replies or "c0" in ear.reasons


@pytest.mark.parametrize("clients", [4, 16])
def test_a_client_that_sends_and_one_that_leaves_after_it_shared_its_keys(clients: int) -> None:
    """Masks of pairs of who left are taken off with its key, of which the shares are checked."""
    lost, last = 1000 + clients - 1, clients - 1
    grid = InProcess(
        clients,
        lost=lambda node, stage: (node, stage) == (lost, Stage.COLLECT_MASKED_VECTORS),
        tamper=LATE["random shares"] if clients > 4 else lambda node, stage, reply: reply,
    )
    replies, ear = answered(grid, clients)
    assert_is_mean(replies, range(last), clients)
    assert set(ear.reasons) == {f"c{last}"} | ({"c0"} if clients > 4 else set())
