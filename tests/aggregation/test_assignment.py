"""Members of a pool go to clients as well as a limit of load allows: against all choices."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.aggregation.clustering import assign_experts


def rows(m: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(st.integers(1, 50), min_size=m, max_size=m)
    return st.lists(row, min_size=1, max_size=4).map(lambda found: torch.tensor(found).double())


@given(st.integers(1, 4).flatmap(rows), st.integers(1, 3), st.sampled_from([1.0, 1.5]))
def test_nothing_better_could_be_dealt(wishes: Tensor, count: int, load: float) -> None:
    """Against all possible choices, one by one."""
    n, m = wishes.shape
    count = min(count, m)
    limit = -(-int(load * n * count * 2) // (2 * m))
    options = list(itertools.combinations(range(m), count))
    totals = [
        sum(float(wishes[i, list(own)].sum()) for i, own in enumerate(choice))
        for choice in itertools.product(options, repeat=n)
        if all(sum(j in own for own in choice) <= limit for j in range(m))
    ]
    dealt = assign_experts(wishes, count, load).tolist()
    assert all(len(set(own)) == count for own in dealt)
    assert max(sum(j in own for own in dealt) for j in range(m)) <= limit
    assert sum(float(wishes[i, own].sum()) for i, own in enumerate(dealt)) == pytest.approx(
        max(totals)
    )


def test_like_users_get_the_same_generalists_however_small_the_differences() -> None:
    scores = 0.25 + 1e-4 * torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 1.0, 2.0, 0.0]]).repeat(2, 1)
    assert assign_experts(scores, 2, None).tolist() == [[0, 1], [0, 2], [0, 1], [0, 2]]
    dealt = assign_experts(scores, 2, 1).tolist()
    assert torch.bincount(torch.tensor(dealt).flatten()).tolist() == [2, 2, 2, 2]
    assert [wanted in own for wanted, own in zip((1, 2, 1, 2), dealt, strict=True)] == [True] * 4
