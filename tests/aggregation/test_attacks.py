"""Attackers do what their kind says, to themselves alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.aggregation.robust import Attack, poisoned
from coterie.core.errors import RecipeError
from coterie.core.tensors import Tensors, dot, norm

SENT: Tensors = {"A": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0, 4.0])}
REPLY: Tensors = {
    "A": torch.tensor([[1.5, 2.0]]),
    "b": torch.tensor([3.0, 3.0]),
    "samples": torch.tensor(7),
}


def lie(
    kind: str, is_update: bool = True, scale: float = 10.0, seed: int = 0, reply: Tensors = REPLY
) -> Tensors:
    return poisoned(
        reply, SENT, is_update, Attack(kind=kind, scale=scale), torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(
    ("kind", "is_update", "A", "b"),
    [
        ("sign-flip", True, [[-4.0, 2.0]], [3.0, 14.0]),
        ("scaled", True, [[6.0, 2.0]], [3.0, -6.0]),
        ("sign-flip", False, [[-15.0, -20.0]], [-30.0, -30.0]),
        ("scaled", False, [[15.0, 20.0]], [30.0, 30.0]),
    ],
)
def test_the_update_is_multiplied(
    kind: str, is_update: bool, A: list[list[float]], b: list[float]
) -> None:
    found = lie(kind, is_update)
    torch.testing.assert_close(
        found, {"A": torch.tensor(A), "b": torch.tensor(b), "samples": torch.tensor(7)}
    )


def test_a_name_that_was_not_sent_is_lied_about_around_zero() -> None:
    assert lie("scaled", reply=REPLY | {"new": torch.ones(2)})["new"].tolist() == [10.0, 10.0]


@given(st.integers(0, 1000), st.floats(0.1, 100.0))
def test_noise_is_as_long_as_the_scaled_update(seed: int, scale: float) -> None:
    found = lie("noise", scale=scale, seed=seed)
    moved = {name: found[name] - t for name, t in SENT.items()}
    assert norm(moved) == pytest.approx(scale * math.sqrt(0.5**2 + 1.0**2), rel=1e-4)


def test_noise_has_any_direction() -> None:
    directions = []
    for seed in range(400):
        found = lie("noise", scale=1.0, seed=seed)
        directions.append({name: found[name] - t for name, t in SENT.items()})
    mean = {name: torch.stack([d[name] for d in directions]).mean(dim=0) for name in SENT}
    assert norm(mean) < 4 * math.sqrt(1.25) / math.sqrt(400)
    assert dot(directions[0], directions[1]) != dot(directions[0], directions[0])
    turned = dict(reversed(REPLY.items()))
    assert all(
        torch.equal(lie("noise", seed=3)[name], t)
        for name, t in lie("noise", seed=3, reply=turned).items()
    )


def test_no_update_no_noise() -> None:
    assert all(torch.equal(t, SENT[name]) for name, t in lie("noise", reply=dict(SENT)).items())


@pytest.mark.parametrize("kind", ["sign-flip", "scaled", "noise", "nan"])
def test_a_reply_without_values_is_what_it_is(kind: str) -> None:
    assert lie(kind, reply={"samples": REPLY["samples"]}) == {"samples": REPLY["samples"]}


def test_nan_keeps_the_form() -> None:
    found = lie("nan")
    assert all(
        found[name].isnan().all() and found[name].shape == REPLY[name].shape for name in SENT
    )


@pytest.mark.parametrize("kind", ["sign-flip", "scaled", "noise", "nan"])
@pytest.mark.parametrize("is_update", [True, False])
def test_names_shapes_dtypes_and_integers_stay_and_so_does_the_reply(
    kind: str, is_update: bool
) -> None:
    reply = REPLY | {"half": torch.ones(2, dtype=torch.float16)}
    before = {name: t.clone() for name, t in reply.items()}
    found = lie(kind, is_update, reply=reply)
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
        name: (t.shape, t.dtype) for name, t in reply.items()
    }
    assert found["samples"] == 7
    assert all(torch.equal(reply[name], t) for name, t in before.items())


def test_who_lies() -> None:
    clients = ["cleo", "ann", "ben"]
    assert Attack(kind="nan").attackers(clients) == {"ann"}
    assert Attack(kind="nan", clients=2).attackers(clients) == {"ann", "ben"}
    assert Attack(kind="nan", clients=0).attackers(clients) == frozenset()
    assert Attack(kind="nan", clients=("cleo",)).attackers(clients) == {"cleo"}
    with pytest.raises(RecipeError, match=r"attack\.clients: 4 attackers among 3 clients"):
        Attack(kind="nan", clients=4).attackers(clients)
    with pytest.raises(RecipeError, match=r"no client 'dan'; there are ann, ben, cleo"):
        Attack(kind="nan", clients=("ann", "dan")).attackers(clients)


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "loud"},
        {},
        {"kind": "nan", "clients": -1},
        {"kind": "nan", "scale": 0},
        {"kind": "nan", "f": 1},
    ],
)
def test_attacks_that_do_not_exist_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Attack.model_validate(section)
