"""What a run makes once: its data and its method."""

from collections import Counter
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from coterie.data.images import Images
from coterie.methods.base import Method
from coterie.methods.fedavg import FedAvg
from coterie.reports.progress import Callback
from coterie.runs import method_section
from coterie.runs.method_section import build_method
from coterie.runs.recipe import load
from coterie.runs.run import execute_all

SHORT = ["method.name=fedavg", "method.rounds=1", "method.local_steps=1"]


class Foretelling(Callback):
    """Wants to be told how long a run takes, as a person at a terminal does."""

    shows_estimate = True


def test_a_run_prepares_its_data_and_builds_its_method_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method_section._built.cache_clear()
    made: Counter[str] = Counter()
    loaded, validated = Images.federated, TypeAdapter.validate_python

    def federated(self: Images, *args: object, **kwargs: object) -> object:
        made["data"] += 1
        return loaded(self, *args, **kwargs)  # type: ignore[arg-type] # passed on as they came

    def validate_python(self: TypeAdapter[Method], *args: object, **kwargs: object) -> object:
        made["method"] += 1
        return validated(self, *args, **kwargs)  # type: ignore[arg-type] # passed on as they came

    monkeypatch.setattr(Images, "federated", federated)
    monkeypatch.setattr(TypeAdapter, "validate_python", validate_python)
    execute_all([(load("cobo-digits", SHORT), tmp_path / "run")], Foretelling())
    assert made == {"data": 1, "method": 1}


def test_methods_are_one_object_where_they_are_written_alike_and_no_other() -> None:
    section = {"name": "fedavg", "rounds": 3}
    assert build_method(section) is build_method({"rounds": 3, "name": "fedavg"})
    assert build_method(section) == FedAvg(rounds=3)
    assert build_method({"name": "fedavg", "rounds": 4}).rounds == 4
