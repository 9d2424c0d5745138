"""`coterie reproduce` finds the theorems in a checkout, and says elsewhere that it needs one."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.core.errors import Refused
from coterie.papers import theorems

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as if it were installed apart from its repository."""
    place = tmp_path / "site-packages/coterie/papers/theorems.py"
    monkeypatch.setattr(theorems, "__file__", str(place))


def test_a_checkout_has_the_theorems_that_are_named() -> None:
    before = sys.path[:]
    package = theorems.load("comigs/theorem-2.1")
    assert sys.path == before
    assert theorems.checkout() == REPOSITORY
    assert Path(package.__file__) == REPOSITORY / "theorems/__init__.py"
    assert tuple(package.THEOREMS) == theorems.NAMES
    shown = CliRunner().invoke(app, ["reproduce"]).output
    assert all(name in shown for name in theorems.NAMES)


def test_a_theorem_is_run_and_its_page_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "comigs/theorem-2.1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "What the paper says" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "comigs-theorem-2.1.html",
        "comigs-theorem-2.1.json",
    }


@pytest.mark.usefixtures("installed")
def test_an_installed_copy_says_that_a_theorem_needs_a_checkout() -> None:
    for name in theorems.NAMES:
        with pytest.raises(Refused, match=f"{name} needs a checkout of the repository"):
            theorems.load(name)
    done = CliRunner().invoke(app, ["reproduce", "cobo/theorem-1"])
    assert done.exit_code == 2
    assert "cobo/theorem-1 needs a checkout of the repository" in done.output
    assert "Clone the repository" in done.output


@pytest.mark.usefixtures("installed")
def test_an_installed_copy_lists_tables_alone() -> None:
    shown = CliRunner().invoke(app, ["reproduce"]).output
    assert "comigs/table2" in shown
    assert "theorem" not in shown
