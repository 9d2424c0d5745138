"""`coterie compare --rivals`: the sensible rows for a recipe."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.methods import METHODS
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load
from coterie.runs.recipes.rivals import rivals_of


@pytest.mark.parametrize("name", ["quickstart", "cobo-digits", "ddome-digits"])
def test_every_rival_can_run_on_the_recipe(name: str) -> None:
    recipe = load(name)
    rows = rivals_of(recipe)
    assert len(set(rows)) == len(rows) >= 7
    assert rows[-1] == recipe.method["name"]
    for row in rows:
        assert row in METHODS
        prepare(recipe.with_method(row))


def test_the_rivals_are_compared_and_what_is_named_beside_them(tmp_path: Path) -> None:
    small = ["--set", "method.rounds=1", "--set", "method.local_steps=1"]
    command = ["compare", "--rivals", "lg-fedavg", "cobo-digits", "--seeds", "1", *small]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "table")])
    assert done.exit_code == 0, done.output
    titles = [METHODS[name].title for name in (*rivals_of(load("cobo-digits")), "lg-fedavg")]
    assert all(title in done.output for title in titles)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compare"], "no methods to compare, and no recipe"),
        (["compare", "local", "fedavg"], "--recipe: missing"),
        (["compare", "--recipe", "quickstart"], "no methods to compare"),
    ],
)
def test_what_is_missing_is_said(words: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert problem in done.output
