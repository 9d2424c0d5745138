"""Canaries: where they are planted, and what their exposure is."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coterie.audit.canaries import CanaryScores, chance
from coterie.audit.statistics import MembershipScores, drawn, measured
from coterie.core.errors import CheckpointError, DataError
from coterie.data.canaries import Audit, Canaries, PlantedCanaries, plant
from coterie.data.chats import ChatSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.splits import TokenSplit

AUDIT = Audit(canaries=10, repeats=3, prefix=2, length=5, references=20)
CONTEXT, LOW = 16, 500  # the clients' own ids are below LOW, those of canaries are not


@pytest.fixture
def federation() -> Federation:
    rng = np.random.default_rng(0)

    def client(name: str, seed: int) -> ClientData:
        splits = (
            TokenSplit(s, rng.integers(1, LOW, n).astype(np.uint16), CONTEXT, seed)
            for s, n in (("train", 900), ("valid", 99), ("test", 99))
        )
        return ClientData(name, *splits)

    return Federation({"ann": client("ann", 1), "ben": client("ben", 2)}, "two")


def windows_with(split: TokenSplit, canary: list[int]) -> list[int]:
    """The numbers of the training windows that hold a canary, in whole."""
    rows = split.take(np.arange(split.windows)).tolist()
    return [
        k
        for k, row in enumerate(rows)
        if any(row[i : i + len(canary)] == canary for i in range(len(row)))
    ]


def test_planted_ones_are_whole_in_as_many_windows_as_asked_and_the_others_nowhere(
    federation: Federation,
) -> None:
    planted, found, references = plant(federation, AUDIT, 7, range(LOW, 900), [0], [0])
    assert references.shape == (20, 5)
    for id, own in found.items():
        data = planted.clients[id]
        assert isinstance(data.train, TokenSplit)
        assert 0 < own.planted.sum() < 10
        holding: list[int] = []
        for tokens, here in zip(own.tokens.tolist(), own.planted, strict=True):
            windows = windows_with(data.train, [0, *own.prefix.tolist(), *tokens, 0])
            assert len(windows) == (3 if here else 0)
            assert len(set(windows) & set(holding)) == 0  # each has windows of its own
            holding += windows
        assert sorted(holding) == sorted(own.windows.tolist())
        before = federation.clients[id]
        assert isinstance(before.train, TokenSplit)
        foreign = [
            k
            for k, row in enumerate(data.train.take(np.arange(data.train.windows)).tolist())
            if max(row) >= LOW
        ]
        assert sorted(foreign) == sorted(holding)  # not even a part of one is in another window
        assert (data.valid, data.test) == (before.valid, before.test)
        assert len(data.train) == len(before.train)


def test_documents_get_them_at_their_beginning_one_in_a_row(federation: Federation) -> None:
    """Of a base that begins documents with token 1 and ends them with 0."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, CONTEXT + 2, 120).astype(np.uint32)
    ids = [[1, *rng.integers(2, LOW, length - 1).tolist()] for length in lengths]
    tokens = np.array([i for own in ids for i in own], np.uint32)
    counted = np.array([k > 0 for own in ids for k in range(len(own))], np.uint32)
    split = ChatSplit("train", tokens, counted, lengths, CONTEXT, 0)
    data = replace(federation.clients["ann"], train=split)
    planted, canaries, _ = plant(
        Federation({"ann": data}, "one"), AUDIT, 7, range(LOW, 900), [1], [0]
    )
    train, own = planted.clients["ann"].train, canaries["ann"]
    assert isinstance(train, ChatSplit)
    assert train.rows == split.rows
    holding: list[int] = []
    for random_part, here in zip(own.tokens.tolist(), own.planted, strict=True):
        whole = [1, *own.prefix.tolist(), *random_part, 0]
        rows = [
            window
            for window, row in enumerate(train.rows)
            if any(train.conversation(n)[: len(whole)].tolist() == whole for n in row)
        ]
        assert len(rows) == (3 if here else 0)
        holding += rows
    assert sorted(holding) == sorted(own.windows.tolist())
    assert len(set(holding)) == len(holding)
    changed = train.tokens != split.tokens
    assert set(train.tokens[train.tokens >= LOW]) <= set(train.tokens[changed])
    assert np.array_equal(train.counted, split.counted)
    few = replace(split, tokens=tokens[:20], counted=counted[:20], lengths=np.array([10, 10]))
    one = Federation({"ann": replace(data, train=few)}, "one")
    with pytest.raises(DataError, match="train: 30 places for canaries, but only"):
        plant(one, AUDIT, 7, range(LOW, 900), [1], [0])


def test_a_flip_changes_its_own_windows_and_nothing_else(federation: Federation) -> None:
    train = {
        seed: plant(
            federation, AUDIT.model_copy(update={"seed": seed}), 7, range(LOW, 900), [0], [0]
        )
        for seed in (0, 1)
    }
    same = plant(federation, AUDIT, 7, range(LOW, 900), [0], [0])
    for id, data in federation.clients.items():
        assert isinstance(data.train, TokenSplit)
        for seed, (found, canaries, _) in train.items():
            changed = found.clients[id].train.take(
                np.arange(data.train.windows)
            ) != data.train.take(np.arange(data.train.windows))
            assert sorted(np.flatnonzero(changed.any(dim=1).numpy()).tolist()) == sorted(
                canaries[id].windows.tolist()
            ), seed
        assert np.array_equal(
            same[0].clients[id].train.tokens, train[0][0].clients[id].train.tokens
        )
        assert not np.array_equal(train[1][1][id].tokens, train[0][1][id].tokens)


def test_clients_have_canaries_of_their_own_and_flips_are_fair(federation: Federation) -> None:
    many = AUDIT.model_copy(update={"canaries": 18})
    flips = np.concatenate(
        [
            own.planted
            for seed in range(60)
            for own in plant(federation, many, seed, range(LOW, 900), [0], [0])[1].values()
        ]
    )
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / math.sqrt(len(flips))
    found = plant(federation, many, 7, range(LOW, 900), [0], [0])[1]
    assert not np.array_equal(found["ann"].tokens, found["ben"].tokens)
    assert np.array_equal(found["ann"].prefix, found["ben"].prefix)
    again = Canaries.from_json(found["ann"].to_json())
    assert all(
        np.array_equal(getattr(again, name), getattr(found["ann"], name))
        for name in ("prefix", "tokens", "planted", "windows")
    )


def test_the_list_of_a_run_is_read_back_and_a_damaged_one_is_refused(
    federation: Federation,
) -> None:
    written = PlantedCanaries(*plant(federation, AUDIT, 7, range(LOW, 900), [0], [0])[1:]).to_json()
    assert PlantedCanaries.from_json(written).to_json() == written
    for damaged in ([], {"references": []}, written | {"clients": {"ann": {"prefix": []}}}):
        with pytest.raises(CheckpointError, match="canaries is damaged") as refused:
            PlantedCanaries.from_json(damaged)
        assert "Run the recipe again" in refused.value.remedy


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"length": 40}, "canaries of 44 tokens in windows of 16"),
        ({"canaries": 40}, "120 places for canaries, but only 56 windows"),
    ],
)
def test_what_does_not_fit_is_refused_by_client(
    federation: Federation, changes: dict[str, int], told: str
) -> None:
    with pytest.raises(DataError, match=told) as refused:
        plant(federation, AUDIT.model_copy(update=changes), 7, range(LOW, 900), [0], [0])
    assert "client 'ann'" in str(refused.value)
    assert "client 'ben'" in str(refused.value)
    assert "Set " in refused.value.remedy + str(refused.value)


def test_the_likeliest_of_all_has_the_largest_exposure_and_the_unlikeliest_none() -> None:
    own = CanaryScores(
        np.array([9.0, -9.0, 0.0]), np.array([True, True, False]), np.arange(14.0) / 14
    )
    assert own.ranked_among == 16
    assert own.exposures.tolist() == [4.0, 0.0]


def test_equal_scores_are_no_exposure() -> None:
    assert CanaryScores(np.zeros(2), np.array([True, False]), np.zeros(6)).exposures.tolist() == [
        0.0
    ]


def test_the_exposure_of_chance_is_that_of_ranks_that_are_all_as_likely() -> None:
    rng = np.random.default_rng(5)
    exposures = [
        CanaryScores(rng.normal(size=40), np.arange(40) < 20, rng.normal(size=107)).exposures.mean()
        for _ in range(200)
    ]
    assert np.mean(exposures) == pytest.approx(chance(128), abs=0.05)
    assert chance(2**16) == pytest.approx(1 / math.log(2), abs=0.01)


def test_members_are_what_was_drawn_without_canaries(federation: Federation) -> None:
    train, rng = federation.clients["ann"].train, np.random.default_rng(0)
    assert isinstance(train, TokenSplit)
    walk = train.numbers(0, train.windows)
    first = drawn(train, 20, walk[:5], 100, rng)
    assert first.tolist() == sorted(walk[5:20].tolist())
    assert len(drawn(train, 10_000, walk[:0], 100, rng)) == train.windows
    assert len(drawn(train, 10_000, walk[:0], 7, rng)) == 7


def test_clients_of_another_level_share_one_threshold() -> None:
    """Each client's members are likelier by one; what differs between clients says nothing."""
    rng = np.random.default_rng(0)
    told = {
        i: MembershipScores(rng.normal(5 * k + 6, 0.1, 50), rng.normal(5 * k + 5, 0.1, 50))
        for k, i in enumerate(("ann", "ben"))
    }
    found = measured(told, 0)
    assert found.auc.value == found.tpr.value == 1
    shuffled = {
        i: replace(own, members=own.others[:25], others=own.others[25:]) for i, own in told.items()
    }
    nothing = measured(shuffled, 0).auc
    assert nothing.low < 0.5 < nothing.high
