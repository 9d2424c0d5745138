"""Results with types are what is on disk, also where an older version wrote it, or are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reports.samples import audited, classified, pooled, result, routing

from coterie.core.errors import CheckpointError
from coterie.core.files import write_json
from coterie.core.result import AUDITED, AuditResult, Result, Routing, WordExample

LATER = ("metric", "best", "curve", "privacy", "lost", "never_took_part", "peak_memory_bytes")


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


def test_a_result_of_an_older_version_is_read_without_what_it_lacks() -> None:
    older = {name: value for name, value in result("local", 2, 0.0).items() if name not in LATER}
    read = Result.from_json(older)
    assert (read.metric.unit, read.metric.lower_is_better) == ("per token", True)
    assert (read.best, read.curve, read.privacy, read.lost) == (None, None, None, None)
    assert read.evaluations[-1].clients["ann"].test == older["clients"]["ann"]["test"]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("evaluations", [{"round": 1}], "not a valid Evaluation: it has no iteration, test"),
        ("evaluations", {}, "evaluations of a result: expected a JSON array"),
        ("curve", {"windows": 2}, "not a valid Curve: it has no points"),
        ("privacy", {"epsilon": 1.0}, "not a valid PrivacySpent: it has no delta"),
        ("clients", [], "clients of a result: expected a JSON object"),
        ("machine", "cpu", "not a valid Machine: expected a JSON object"),
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
    assert AuditResult.read(tmp_path) is None
    write_json(tmp_path / AUDITED, audited(canaries, words))
    before = (tmp_path / AUDITED).read_bytes()
    read = AuditResult.read(tmp_path)
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
            "not a valid ObserverResult: it has no membership",
        ),
        ("observers", [], "observers of an audit: expected a JSON object"),
        ("shift", None, "not a valid MembershipResult: expected a JSON object"),
        ("shift", {"auc": {"value": 1.0}}, "not a valid MembershipResult: it has no tpr"),
        ("words", {"words": 3}, "not a valid WordsResult: it has no known_to_the_base"),
        ("settings", "all", "not a valid AuditSettings: expected a JSON object"),
    ],
)
def test_what_is_no_audit_is_refused_with_what_to_do(
    name: str, value: object, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=f"audit.json: {problem}") as refused:
        AuditResult.from_json(audited() | {name: value})
    assert "coterie audit RUN" in refused.value.remedy
    with pytest.raises(CheckpointError, match=f"it has no {name}"):
        AuditResult.from_json({key: own for key, own in audited().items() if key != name})
