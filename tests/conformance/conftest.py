"""The worlds, and every method in each that has models for it."""

from pathlib import Path

import pytest

from coterie.data.federation import Federation
from coterie.methods import Method
from coterie.testing import World
from coterie.testing.run import language_on, pictures_of

from .cases import EVERYWHERE, method_of


@pytest.fixture(scope="session")
def language(tiny_base: Path, tiny_federation: Federation) -> World:
    return language_on(tiny_base, tiny_federation)


@pytest.fixture(scope="session")
def pictures(tiny_pictures: Federation) -> World:
    return pictures_of(tiny_pictures)


@pytest.fixture(
    params=[
        pytest.param(case.values, marks=case.marks, id=" ".join(case.values)) for case in EVERYWHERE
    ]
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of model, and the method."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def world(case: tuple[str, str], request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(case[0])
    return found


@pytest.fixture
def method(case: tuple[str, str]) -> Method:
    return method_of(case[1])
