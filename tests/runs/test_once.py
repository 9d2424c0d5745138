"""What a run makes once: its data."""

from collections import Counter
from pathlib import Path

import pytest

from coterie.data.images import Images
from coterie.methods.fedavg import FedAvg
from coterie.methods.section import build_method
from coterie.reports.progress import Callback
from coterie.runs.problems.prepare import share_data
from coterie.runs.recipes.recipe import load
from coterie.runs.run import execute_all, run

SHORT = ["method.name=fedavg", "method.rounds=1", "method.local_steps=1"]


class Foretelling(Callback):
    """Wants to be told how long a run takes, as a person at a terminal does."""

    shows_estimate = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often data were loaded."""
    found: Counter[str] = Counter()
    loaded = Images.federated

    def federated(self: Images, *args: object, **kwargs: object) -> object:
        found["data"] += 1
        return loaded(self, *args, **kwargs)  # type: ignore[arg-type] # passed on as they came

    monkeypatch.setattr(Images, "federated", federated)
    return found


def test_a_run_prepares_its_data_once(tmp_path: Path, made: Counter[str]) -> None:
    execute_all([(load("cobo-digits", SHORT), tmp_path / "run")], Foretelling())
    assert made == {"data": 1}


def test_a_run_with_baselines_loads_its_data_once(tmp_path: Path, made: Counter[str]) -> None:
    recipe = load("cobo-digits", [*SHORT, "compare_with=[local, cobo]"])
    results = run(recipe, tmp_path / "run", reporter=Foretelling())
    assert made == {"data": 1}
    alone = run(recipe.with_changes(compare_with=[]), tmp_path / "alone", reporter=Foretelling())
    assert made["data"] == 2
    assert results[-1].to_json()["clients"] == alone[0].to_json()["clients"]


def test_rows_with_other_data_load_their_own(tmp_path: Path, made: Counter[str]) -> None:
    recipe = load("cobo-digits", SHORT)
    rows = [recipe, recipe.with_changes(seed=1), recipe.with_changes(seed=1, method="local")]
    execute_all([(row, tmp_path / str(k)) for k, row in enumerate(rows)], Callback())
    assert made["data"] == 3  # when they are checked: 0, 1; when they run: 1 again


def test_rows_with_canaries_share_no_data() -> None:
    audited = load("cobo-digits", [*SHORT, "audit={canaries: 2}"])
    plain = load("cobo-digits", SHORT)
    assert share_data(plain, plain.with_changes(method="local"))
    assert not share_data(audited, audited)
    assert not share_data(plain, audited)
    assert not share_data(plain, plain.with_changes(seed=1))
    assert not share_data(plain, plain.with_changes(data={"clients_per_cluster": 3}))
    assert not share_data(plain, plain.with_changes(model={"hidden": [8]}))


def test_methods_are_equal_where_they_are_written_alike() -> None:
    section = {"name": "fedavg", "rounds": 3}
    assert build_method(section) == build_method({"rounds": 3, "name": "fedavg"})
    assert build_method(section) == FedAvg(rounds=3)
    assert build_method({"name": "fedavg", "rounds": 4}).rounds == 4
