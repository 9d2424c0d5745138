"""What holds for every method, on every engine, on every kind of model that it can train."""

import pytest

from coterie.core.protocol import Ask
from coterie.methods import Method
from coterie.runs.recipes.recipe import Recipe
from coterie.testing import CHECKS, NotApplicable, Run, World
from coterie.testing.run import Check, require_same
from coterie.testing.training import batch_is_as_one_by_one, clients_come_and_go, devices_are_alike

from .cases import PICTURES, method_of

ELSEWHERE = (
    batch_is_as_one_by_one,
    clients_come_and_go,
    devices_are_alike,
)  # below, and in tests/engines/test_flower_parity.py


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c not in ELSEWHERE], ids=lambda check: check.__name__
)
def test_every_method_keeps_the_contract(check: Check, method: Method, world: World) -> None:
    try:
        check(method, world)
    except NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", PICTURES)
def test_many_clients_at_once_are_as_one_by_one(name: str, pictures: World) -> None:
    batch_is_as_one_by_one(method_of(name), pictures)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("language", name) for name in ("fedavg", "comigs-1g1s")),
        *(("pictures", name) for name in ("cobo", "cobo on the simplex", "ddome", "ifca")),
    ],
)
def test_clients_come_and_go(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    clients_come_and_go(method_of(name), request.getfixturevalue(kind))


def test_fedavg_of_one_client_is_local(language: World) -> None:
    fedavg, local = (Run(method_of(name), language.alone).rounds(2) for name in ("fedavg", "local"))
    require_same(fedavg.engine.states()["ann"], local.engine.states()["ann"], "one client")


def test_every_shipped_recipe_parses() -> None:
    from coterie.runs import recipes
    from coterie.runs.recipes.recipe import load

    assert {"quickstart", "folders", "agnews-ood", "agnews-id", "multilingual", "topics"} <= set(
        recipes.names()
    )
    for name in recipes.names():
        assert isinstance(load(name), Recipe)


def test_a_task_sees_only_its_own_client(language: World) -> None:
    """Training another client in between changes nothing for this one, though both take turns in
    one model.
    """
    method = method_of("comigs-1g1s")
    a, b = (Run(method, language) for _ in range(2))
    ask = Ask(method.local_round, {"ann": a.server})  # type: ignore[attr-defined]
    a.engine.answer(ask, 0, 0)
    b.engine.answer(Ask(method.local_round, {"ben": b.server}), 0, 0)  # type: ignore[attr-defined]
    b.engine.answer(ask, 0, 0)
    require_same(
        a.engine.states()["ann"], b.engine.states()["ann"], "with and without another task between"
    )
