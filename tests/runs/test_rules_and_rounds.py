"""Robust rules know how many clients a round has: what cannot protect is refused before the start,
and a round that has lost too many leaves out what came, and says so.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.aggregation.means import Mean, by_holders
from coterie.aggregation.robust import ClippedMean, GeometricMedian, Krum, Median, TrimmedMean
from coterie.core.callback import Callback
from coterie.core.errors import RecipeError
from coterie.core.protocol import remarked
from coterie.engines.inprocess import InProcess
from coterie.runs import run as runs
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe


def recipe(rule: str | dict[str, Any] = "krum", **changes: Any) -> Recipe:
    """Eight clients in two clusters of digits, two rounds."""
    aggregation = {"rule": rule} if isinstance(rule, str) else rule
    method = {"name": "fedavg", "rounds": 2, "local_steps": 1, "aggregation": aggregation}
    return Recipe.load("cobo-digits", method=method, compare_with=[], **changes)


@pytest.mark.parametrize(
    ("rule", "clients", "needed"),
    [
        ("krum", 4, 5),
        ("krum", 1, 5),
        ("multi-krum", 4, 5),
        ({"rule": "multi-krum", "attackers": 2}, 6, 7),
        ("median", 2, 3),
        ("trimmed-mean", 2, 3),
        ("geometric-median", 2, 3),
        ("clipped-mean", 2, 3),
    ],
)
def test_a_round_of_too_few_is_refused(rule: Any, clients: int, needed: int) -> None:
    with pytest.raises(RecipeError, match=f"{needed} are needed"):
        prepare(recipe(rule, participation={"clients": clients}))
    prepare(recipe(rule, participation={"clients": needed}))


def test_rules_that_need_no_number_are_taken() -> None:
    for rule in (
        "mean",
        {"rule": "clipped-mean", "norm": 1.0},
        {"rule": "trimmed-mean", "trim": 0},
    ):
        prepare(recipe(rule, participation={"clients": 1}))


@pytest.mark.parametrize(
    "changes",
    [
        {"participation": {"schedule": "grow", "every": 1}},
        {"participation": {"schedule": "turns", "every": 1}},
        {"presence": {f"c{k}-0": [1, None] for k in range(4)}},
        {"presence": {f"c{k}-0": [0, 1] for k in range(4)}},
    ],
)
def test_every_round_of_the_recipe_counts(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="5 are needed"):
        prepare(recipe("krum", **changes))


def test_a_client_that_leaves_after_the_last_round_does_not_count() -> None:
    prepare(recipe("krum", presence={f"c{k}-0": [0, 2] for k in range(4)}))


def test_pairs_need_two_clients_in_a_round() -> None:
    with pytest.raises(RecipeError, match="pairs of clients"):
        prepare(Recipe.load("cobo-digits", participation={"clients": 1}))


def test_a_masked_sum_of_two_is_refused() -> None:
    with pytest.raises(RecipeError, match="secure: 2 clients"):
        prepare(recipe("mean", secure=True, engine="flower", participation={"clients": 2}))


@pytest.mark.parametrize(
    "rule", [Krum(), Median(), TrimmedMean(), GeometricMedian(), ClippedMean()]
)
def test_what_too_few_send_moves_nothing(rule: Any) -> None:
    around = {"w": torch.tensor([1.0, 2.0])}
    replies = {i: {"w": torch.tensor([9.0, 9.0 + k])} for k, i in enumerate(("ann", "ben"))}
    with remarked() as remarks:
        combined = by_holders(rule, replies, around)
    assert torch.equal(combined["w"], around["w"])
    (text,) = remarks
    assert f"{rule.rule} needs {rule.fewest}" in text
    with remarked() as remarks:
        assert not torch.equal(by_holders(Mean(), replies, around)["w"], around["w"])
    assert not remarks


def test_a_round_that_lost_clients_is_skipped_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = InProcess.answer

    def losing(self: InProcess, ask: Any, round: int, phase: int) -> Any:
        replies = dict(answer(self, ask, round, phase))
        if round == 1 and ask.name == "local_round":  # four of eight are lost in the second round
            for i in list(replies)[4:]:
                del replies[i]
        return replies

    monkeypatch.setattr(InProcess, "answer", losing)
    states: list[bytes] = []

    class States(Callback):
        def checkpoint(self, round: int, folder: Path) -> None:
            states.append((folder / "server.safetensors").read_bytes())

    runs.run(recipe("krum", checkpoint_every=1), tmp_path / "run", reporter=States())
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    (note,) = [line["note"] for line in lines if line["kind"] == "note"]
    assert note.startswith("round 2: what 4 clients sent is left out")
    assert "krum needs 5" in note
    assert len(states) == 2
    assert states[0] == states[1]
