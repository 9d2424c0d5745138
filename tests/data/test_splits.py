"""The endless walk and the scoring pass, as properties."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.federation import CENTRALIZED, ClientData, Federation, federate
from coterie.data.splits import Split, TokenSplit, UnionSplit

contexts = st.integers(1, 7)


def tokens_of(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint16)


@st.composite
def token_splits(draw: st.DrawFn) -> Split:
    context = draw(contexts)
    return TokenSplit(
        "train", tokens_of(draw(st.integers(context + 1, 60))), context, draw(st.integers(0, 3))
    )


@st.composite
def splits(draw: st.DrawFn) -> Split:
    if draw(st.booleans()):
        return draw(token_splits())
    context = draw(contexts)
    counts = draw(st.lists(st.integers(context + 1, 30), min_size=1, max_size=4))
    offsets = np.cumsum([0, *counts])
    parts = [
        TokenSplit("train", tokens_of(int(stop))[start:], context, 0)
        for start, stop in pairwise(offsets)
    ]
    return UnionSplit("train", parts, draw(st.integers(0, 3)))


@settings(max_examples=60, deadline=None)
@given(splits(), st.integers(0, 3))
def test_an_epoch_visits_every_window_once(split: Split, epoch: int) -> None:
    rows = split.batch(epoch * split.windows, split.windows)
    assert rows.dtype == torch.int64
    assert rows.shape == (split.windows, split.context + 1)
    expected = split.take(np.arange(split.windows))
    assert sorted(rows.tolist()) == sorted(expected.tolist())
    assert (rows.diff(dim=1) == 1).all()  # a window is a stretch of one stream, and of one client


@settings(max_examples=60, deadline=None)
@given(splits(), st.integers(0, 100), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_the_walk_does_not_depend_on_how_it_is_cut(
    split: Split, start: int, sizes: list[int]
) -> None:
    whole = split.batch(start, sum(sizes))
    starts = np.cumsum([start, *sizes])
    assert torch.equal(
        torch.cat([split.batch(int(at), size) for at, size in zip(starts, sizes, strict=False)]),
        whole,
    )


@settings(max_examples=60, deadline=None)
@given(token_splits(), st.integers(1, 9))
def test_scoring_predicts_every_token_but_the_first_once(split: TokenSplit, rows: int) -> None:
    batches = list(split.scoring(rows))
    assert all(batch.shape[0] <= rows for batch in batches)
    assert torch.cat([batch[:, 1:].flatten() for batch in batches]).tolist() == list(
        range(1, len(split))
    )
    assert torch.cat([batch[:, :-1].flatten() for batch in batches]).tolist() == list(
        range(len(split) - 1)
    )
    assert all(batch.shape[1] == split.context + 1 for batch in batches[:-1])


def test_epochs_seeds_and_names_have_orders_of_their_own() -> None:
    def order(seed: int, name: str, epoch: int) -> list[int]:
        return TokenSplit(name, tokens_of(101), 2, seed).batch(50 * epoch, 50)[:, 0].tolist()

    orders = [
        order(0, "train", 0),
        order(0, "train", 1),
        order(1, "train", 0),
        order(0, "valid", 0),
    ]
    assert len({tuple(o) for o in orders}) == 4
    assert order(0, "train", 1) == orders[1]


def test_fewer_tokens_than_a_window_are_refused() -> None:
    with pytest.raises(
        DataError, match="valid: 8 tokens found, 9 needed for one window of context 8"
    ):
        TokenSplit("valid", tokens_of(8), 8, 0)


def small_federation() -> Federation:
    return federate(
        {
            id: {name: tokens_of(n) for name in ("train", "valid", "test")}
            for id, n in (("b", 9), ("a", 12))
        },
        4,
        0,
        "numbers",
    )


def test_sizes() -> None:
    clients = small_federation().clients
    assert list(clients) == ["b", "a"]  # the recipe's order, not the alphabet's
    assert all((len(split), split.windows) == (12, 2) for split in clients["a"].splits)


def test_pooled_data_are_the_union() -> None:
    pool = small_federation().centralized()
    assert pool.id == CENTRALIZED
    assert [split.name for split in pool.splits] == ["train", "valid", "test"]
    assert (len(pool.train), pool.train.windows) == (21, 4)
    assert sum(batch[:, 1:].numel() for batch in pool.test.scoring(3)) == 8 + 11


def test_short_splits_are_refused_all_at_once() -> None:
    arrays = {
        id: {"train": tokens_of(50), "valid": tokens_of(3), "test": tokens_of(50)}
        for id in ("a", "b")
    }
    with pytest.raises(DataError) as refusal:
        federate(arrays, 8, 0, "")
    assert "client 'a', valid: 3 tokens found, 9 needed" in str(refusal.value)
    assert "client 'b', valid: 3 tokens found, 9 needed" in str(refusal.value)
    assert str(refusal.value).count("Give this split more text") == 1


@pytest.mark.parametrize("id", ["", ".", "..", ".git", "a/b", " a", "e\u0301", CENTRALIZED])
def test_ids_that_cannot_name_a_folder_are_refused(id: str) -> None:
    with pytest.raises(DataError, match="client id"):
        Federation({id: ClientData(id, *small_federation().clients["a"].splits)}, "")


def test_no_clients_are_refused() -> None:
    with pytest.raises(DataError, match="without clients"):
        Federation({}, "")
