"""Honest clients send what they are asked for, to the shape; anything else is refused before a
method sees it.
"""

from collections.abc import Callable, Mapping

import pytest
import torch

from coterie.aggregation.means import SAMPLES
from coterie.core.errors import TensorError
from coterie.core.protocol import empty_reply
from coterie.core.tensors import Named, Tensors
from coterie.testing import World
from coterie.testing.suite import exchanges

from .cases import method_of


def spoilt(reply: Named, how: str) -> Tensors:
    """A reply with one thing wrong."""
    name = next(n for n, t in reply.items() if t.is_floating_point() and t.numel())
    tensor = reply[name]
    wrong: Mapping[str, Callable[[], Tensors]] = {
        "foreign": lambda: {"stranger": torch.zeros(1)},
        "shape": lambda: {name: torch.cat([tensor.flatten(), tensor.new_zeros(1)])},
        "dtype": lambda: {name: tensor.to(torch.float16)},
        "NaN": lambda: {name: torch.full_like(tensor, torch.nan)},
        "infinite": lambda: {name: torch.full_like(tensor, -torch.inf)},
    }
    return {**reply, **wrong[how]()}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("foreign", "unexpected tensor 'stranger'"),
        ("shape", "expected"),
        ("dtype", "is float16"),
        ("NaN", "not all values"),
        ("infinite", "not all values"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("language", "hetlora"), ("pictures", "ifca"), ("pictures", "ddome"), ("language", "pcl")],
)
def test_a_reply_with_anything_wrong_is_refused_by_the_client_that_sent_it(
    kind: str, name: str, how: str, said: str, request: pytest.FixtureRequest
) -> None:
    for ask, replies, _ in exchanges(method_of(name), request.getfixturevalue(kind), 1):
        assert ask.reply_spec is not empty_reply
        for i, reply in replies.items():
            with pytest.raises(TensorError, match=said) as refused:
                ask.check(i, spoilt(reply, how))
            assert repr(i) in str(refused.value)


@pytest.mark.parametrize("value", [-1, 2**41])
def test_a_client_cannot_say_that_it_has_any_number_of_samples(value: int, pictures: World) -> None:
    ask, replies, _ = exchanges(method_of("fedavg, by samples"), pictures, 1)[0]
    ask.check("ann", replies["ann"])
    with pytest.raises(TensorError, match=f"'ann'.*'{SAMPLES}'"):
        ask.check("ann", replies["ann"] | {SAMPLES: torch.tensor(value)})


def test_a_client_cannot_choose_a_centre_that_there_is_not(pictures: World) -> None:
    ask, replies, _ = exchanges(method_of("ifca"), pictures, 1)[0]
    for choice in (-1, 2):
        with pytest.raises(TensorError, match=r"'ben'.*'choice'.*expected from 0 to 1"):
            ask.check("ben", replies["ben"] | {"choice": torch.tensor(choice)})


def test_a_smaller_reply_passes_where_ranks_are_truncated_and_a_larger_one_nowhere(
    language: World,
) -> None:
    ask, replies, _ = exchanges(method_of("hetlora"), language, 1)[0]
    name, tensor = next(iter(replies["ann"].items()))
    ask.check("ann", replies["ann"] | {name: tensor[:, :1]})
    with pytest.raises(TensorError, match="'ann'"):
        ask.check("ann", replies["ann"] | {name: torch.cat([tensor, tensor], dim=1)})
