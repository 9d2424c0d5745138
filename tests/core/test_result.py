"""Results with types are what is on disk, also where an older version wrote it, or are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reports.samples import audited, classified, pooled, result, routing

from coterie.core.errors import CheckpointError
from coterie.core.files import write_json
from coterie.core.result import Result, Routing
from coterie.core.result.audit import AUDITED, AuditResult, WordExample


@pytest.mark.parametrize("made", [lambda: classified("cobo"), lambda: pooled("ddome")])
def test_evaluations_and_clients_are_what_was_written(made: Callable[[], dict]) -> None:
    written = made()
    read = Result.from_json(written).to_json()
    assert read["evaluations"] == written["evaluations"]
    assert read["clients"].keys() == written["clients"].keys()
    for i, client in written["clients"].items():
        assert {name: read["clients"][i][name] for name in client} == client
    assert json.dumps(Result.from_json(read).to_json()) == json.dumps(read)


def test_routing_is_what_was_written() -> None:
    assert json.dumps(Routing.from_json(routing()).to_json(), sort_keys=True) == json.dumps(
        routing(), sort_keys=True
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("evaluations", [{"round": 1}], "it has no evaluations.0.iteration, evaluations.0.test"),
        ("evaluations", {}, "evaluations: Input should be"),
        ("curve", {"windows": 2}, "it has no curve.points"),
        ("privacy", {"epsilon": 1.0}, "it has no privacy.delta"),
        ("clients", [], "clients: Input should be"),
        ("machine", "cpu", "machine: Input should be"),
    ],
)
def test_what_is_no_result_is_refused_with_what_to_do(
    name: str, value: object, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem) as refused:
        Result.from_json(result("local", 2, 0.0) | {name: value})
    assert "run the recipe again" in str(refused.value)


@pytest.mark.parametrize(("canaries", "words"), [(True, True), (False, False)])
def test_an_audit_is_what_was_written_to_the_letter(
    canaries: bool, words: bool, tmp_path: Path
) -> None:
    assert AuditResult.read_any(tmp_path) is None
    write_json(tmp_path / AUDITED, audited(canaries, words))
    before = (tmp_path / AUDITED).read_bytes()
    read = AuditResult.read_any(tmp_path)
    assert read is not None
    write_json(tmp_path / AUDITED, read.to_json())
    assert (tmp_path / AUDITED).read_bytes() == before
    assert AuditResult.read(tmp_path) == read
    assert read.observers["server"].membership.tpr.fpr == 0.01
    assert (read.canaries is not None, read.words is not None) == (canaries, words)
    if read.words:
        (example,) = read.words.examples
        assert isinstance(example, WordExample)
        assert example.by == ["<b>ben</b>"]


def test_an_audit_of_a_private_run_has_what_was_spent() -> None:
    spent = {"epsilon": None, "delta": 1e-5, "where": "local", "noise": 0.0, "clip": 1.0}
    written = audited() | {"privacy": spent | {"sampling": "all", "covers": "rounds"}}
    read = AuditResult.from_json(written)
    assert read.privacy is not None
    assert read.privacy.where == "local"
    assert json.dumps(read.to_json()) == json.dumps(written)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (
            "observers",
            {"server": {"exchanges": 1}},
            "it has no observers.server.membership",
        ),
        ("observers", [], "observers: Input should be"),
        ("shift", None, "shift: Input should be"),
        ("shift", {"auc": {"value": 1.0}}, "it has no .*shift.tpr"),
        ("words", {"words": 3}, "it has no words.known_to_the_base"),
        ("settings", "all", "settings: Input should be"),
    ],
)
def test_what_is_no_audit_is_refused_with_what_to_do(
    name: str, value: object, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=f"not a valid AuditResult: {problem}") as refused:
        AuditResult.from_json(audited() | {name: value})
    assert "coterie audit RUN" in refused.value.remedy
    with pytest.raises(CheckpointError, match=f"it has no {name}"):
        AuditResult.from_json({key: own for key, own in audited().items() if key != name})
