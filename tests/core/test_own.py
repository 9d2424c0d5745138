"""What installed packages bring by entry points: methods, kinds of data and recipes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.errors import RecipeError, Refused
from coterie.core.importing import installed
from coterie.data import kind_of
from coterie.engines.messages import Reply, Request, parsed
from coterie.runs.device.device import Device

SAYINGS = '''
from coterie.data import Section, Source

print("imported")


class Sayings(Section):
    """Two clients with sayings."""

    @property
    def title(self):
        return "sayings"

    def source(self):
        said = [f"the saying of day {k}" for k in range(20)]
        return Source(1, lambda: {"ann": [said] * 3, "ben": [said[::-1]] * 3})
'''
RECIPE = """
description: sayings of two people
data: {kind: sayings}
method: {name: fedavg, rounds: 1, local_steps: 1}
"""
POINTS = """
[coterie.data]
sayings = two_people.data:Sayings
digits = two_people.data:Sayings
[coterie.recipes]
two-people = two_people
quickstart = two_people
lost = two_people
gone = no_such_package.recipes
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package as pip would have installed it."""
    (tmp_path / "two_people").mkdir()
    (tmp_path / "two_people/__init__.py").touch()
    (tmp_path / "two_people/data.py").write_text(SAYINGS)
    (tmp_path / "two_people/two-people.yaml").write_text(RECIPE)
    info = tmp_path / "two_people-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-people\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield tmp_path
    installed.cache_clear()


def test_a_package_brings_a_kind_of_data(package: Path) -> None:
    method = {"name": "fedavg", "rounds": 1, "local_steps": 1}
    recipe = coterie.Recipe(name="own", data={"kind": "sayings"}, method=method)
    assert kind_of(recipe.data) == "two_people.data:Sayings"
    assert coterie.Recipe.load("cobo-digits").data.kind == "digits"  # no package takes such a name
    with pytest.raises(
        RecipeError, match=r"data\.kind: unknown kind 'saying'; choose one of 'stdlib'"
    ):
        coterie.Recipe(name="own", data={"kind": "saying"}, method=method)
    with pytest.raises(RecipeError, match=r"data\.train_tokens"):
        coterie.Recipe(name="own", data={"kind": "sayings", "train_tokens": 0}, method=method)


def test_a_package_brings_a_recipe(package: Path, tiny_base: Path) -> None:
    recipe = coterie.Recipe.load(
        "two-people", model={"base": str(tiny_base), "context": 8}, training={"batch_size": 2}
    )
    assert recipe.name == "two-people"
    run = coterie.run(recipe, out=package / "run")
    assert list(run.result.clients) == ["ann", "ben"]
    assert coterie.Recipe.load("quickstart").data.kind == "stdlib"
    assert "sayings of two people" in CliRunner().invoke(app, ["recipes"]).stdout


@pytest.mark.parametrize(("name", "where"), [("lost", "two_people"), ("gone", "no_such_package")])
def test_a_recipe_that_a_package_lacks_is_refused(package: Path, name: str, where: str) -> None:
    with pytest.raises(Refused, match=f"{name}'.*{where}.* has no file {name}.yaml"):
        coterie.Recipe.load(name)


def test_a_device_uses_what_its_owner_installed(package: Path, tiny_base: Path) -> None:
    recipe = coterie.Recipe.load(
        "two-people", model={"base": str(tiny_base), "context": 8}, engine="flower"
    )
    section = recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"})
    request = Request(
        recipe=section, task="local_round", action="task", run="run", client="ann"
    ).model_dump_json()
    text, _ = Device(package / "home", client="ann").answer(request, b"")
    assert "does not import modules" not in (parsed(Reply, text).problem)
