"""Honest clients send what they are asked for, to the shape; anything else is refused before a
method sees it.
"""

from collections.abc import Callable, Mapping

import pytest
import torch

from coterie.aggregation import SAMPLES
from coterie.core.errors import TensorError
from coterie.core.protocol import Ask, ClientId, Replies, drive, nothing, trains
from coterie.core.tensors import Named, Tensors
from coterie.methods import Method

from .cases import method_of
from .test_methods import Run, World, case, language, method, pictures, world  # noqa: F401 - the fixtures

Exchanges = list[
    tuple[Ask, Replies, dict[ClientId, Tensors]]
]  # with what was sent, before a client may have used its memory


def exchanges(method: Method, world: World, rounds: int | None = None) -> Exchanges:
    """All that is asked and answered in a run, and in an adaptation after it."""
    run, found = Run(method, world), Exchanges()

    def answer(ask: Ask, phase: int) -> Replies:
        before = {i: {name: t.clone() for name, t in sent.items()} for i, sent in ask.to.items()}
        found.append((ask, run.answer(ask, phase), before))
        return found[-1][1]

    run.rounds(method.rounds if rounds is None else rounds, answer)
    drive(method.adapt(run.server, run.clients), answer)
    return found


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, str], Exchanges]:
    """Every case's exchanges, once."""
    return {}


@pytest.fixture
def found(
    seen: dict[tuple[str, str], Exchanges],
    case: tuple[str, str],
    method: Method,
    world: World,
) -> Exchanges:
    if case not in seen:
        seen[case] = exchanges(method, world)
    return seen[case]


def test_every_reply_has_the_form_that_was_asked_for(found: Exchanges) -> None:
    for ask, replies, _ in found:
        for i, reply in replies.items():
            ask.check(i, reply)


def test_a_task_is_training_where_a_model_comes_and_goes_back_changed(found: Exchanges) -> None:
    """All floating-point tensors of its reply came by the same names, but for what says how
    others should step (SCAFFOLD).
    """
    gradients = {
        "midpoint_gradients",
        "gradients",
    }  # these have the names of what came too, but are no models
    for ask, replies, before in found:
        for i, reply in replies.items():
            same = {
                name for name, t in reply.items() if name in before[i] and t.is_floating_point()
            }
            assert trains(ask.task) == bool(same and ask.name not in gradients), ask.name
            if trains(ask.task):
                assert same == {
                    name
                    for name, t in reply.items()
                    if t.is_floating_point() and not name.startswith("change/")
                }
                assert ask.smaller or any(
                    not torch.equal(reply[name], before[i][name]) for name in same
                )


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
        ("foreign", "foreign tensor 'stranger'"),
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
        assert ask.back is not nothing
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
