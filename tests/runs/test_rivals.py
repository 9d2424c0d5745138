"""`coterie compare --rivals`: the sensible rows for a recipe."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.methods import METHODS
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load
from coterie.runs.recipes.rivals import rivals_of


@pytest.mark.parametrize("name", ["quickstart", "cobo-digits", "ddome-digits"])
def test_every_rival_can_run_on_the_recipe(name: str) -> None:
    recipe = load(name, ["method.local_steps=2"])
    rows = rivals_of(recipe)
    assert len(set(rows)) == len(rows) >= 7
    assert rows[-1] == recipe.method["name"]
    for row in rows:
        assert row in METHODS
        prepare(recipe.with_method(row))


def test_clients_that_all_train_are_compared_by_personal_methods() -> None:
    rows = rivals_of(load("ddome-digits", ["data.unseen={}"]))
    assert {"local", "fedper", "interpolation", "ddome"} <= set(rows)
    assert "fedper" not in rivals_of(load("ddome-digits"))


def test_rivals_that_privacy_refuses_are_left_out_and_named(tmp_path: Path) -> None:
    private = {"where": "central", "clip": 1.0, "noise": 4.0, "delta": 1e-5}
    small = {"method.name": "fedavg", "method.rounds": 1, "compare_with": []}
    table = coterie.compare(
        [], "cobo-digits", rivals=True, seeds=1, out=tmp_path, privacy=private, **small
    )
    compared = {row.method for row in table.rows}
    assert {"fedavg", "ditto"} <= compared
    assert compared.isdisjoint({"local", "cobo", "ifca"})
    for title in ("Local", "CoBo", "IFCA"):
        assert any(note.startswith(f"{title} is left out: ") for note in table.notes)
    # a round of one iteration has no place for FedRep's two phases
    assert any(note.startswith("FedRep is left out: method.local_steps") for note in table.notes)


def test_the_rivals_are_compared_and_what_is_named_beside_them(tmp_path: Path) -> None:
    small = ["--set", "method.rounds=1", "--set", "method.local_steps=2"]
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
