"""What routers do with texts: gathered from real models, and written by a run where it may be."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import reported
import torch
from figures import as_json

from coterie.core.roles import ROUTER
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.runs.problems.language import CLIENTS, END, PART, TOKENS, beginning, look, pieces
from coterie.runs.recipes import recipe as recipes


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


def encoded(backbone: Backbone, text: str) -> list[int]:
    return [*backbone.tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b", ["a", " ", "b"]),
        ("aé!", ["a", PART, "é", "!"]),
        ("你\n", [PART, PART, "你", "\n"]),
        ("<b>", ["<", "b", ">"]),
    ],
)
def test_pieces_are_what_each_token_adds(
    backbone: Backbone, text: str, expected: Sequence[str]
) -> None:
    ids = encoded(backbone, text)
    assert pieces(backbone.tokenizer, ids) == expected
    assert pieces(backbone.tokenizer, [*ids, 0, *ids]) == [*expected, END, *expected]


def test_a_character_that_is_cut_off_is_a_part(backbone: Backbone) -> None:
    assert pieces(backbone.tokenizer, encoded(backbone, "aé")[:-1]) == ["a", PART]


def test_the_beginning_is_what_is_scored_first(tiny_federation) -> None:
    test = tiny_federation.clients["ann"].test
    rows = beginning(test)
    assert rows.shape == (10, 8)
    assert rows.flatten().tolist() == test.tokens[:TOKENS].tolist()


def test_weights_are_those_of_the_model(backbone: Backbone, tiny_federation) -> None:
    routed, single = (
        LanguageModel(backbone, Layout(top_k=1, specialists=2)),
        LanguageModel(backbone, Layout(specialists=0)),
    )
    for router in routed.parameters_by_role[ROUTER].values():
        torch.nn.init.normal_(router, generator=torch.Generator().manual_seed(0))
    tests = {i: data.test for i, data in tiny_federation.clients.items()}
    found = as_json(
        look(
            list(tests),
            {"ann": routed, "ben": single, "cleo": routed}.__getitem__,
            tests,
            backbone.tokenizer,
        )
    )
    assert found["blocks"] == [0, 1]
    assert found["depth"] == 2
    assert list(found["texts"]) == ["ann", "ben", "cleo"]
    assert found["experts"] == {i: {"generalists": 1, "specialists": 2} for i in ("ann", "cleo")}
    expected = routed.routing(tests["ben"].take(torch.arange(10).numpy())[:, :-1]).flatten(1, 2)
    torch.testing.assert_close(
        torch.tensor(found["weights"]["cleo"]["ben"]), expected, atol=6e-4, rtol=0
    )
    assert len(found["texts"]["ben"]) == TOKENS


def test_of_many_clients_the_first_few_are_looked_at(backbone: Backbone, tiny_federation) -> None:
    tests = {f"client-{k}": tiny_federation.clients["ann"].test for k in range(CLIENTS + 2)}
    model = LanguageModel(backbone, Layout())
    assert len(look(list(tests), lambda _: model, tests, backbone.tokenizer).texts) == CLIENTS


@pytest.fixture(scope="module")
def recipe(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> recipes.Recipe:
    """One round of three clients on the tiny base."""
    root = tmp_path_factory.mktemp("texts")
    for name in ("ann", "ben", "cleo"):
        (root / name).mkdir()
        for k in range(40):
            (root / name / f"{k}.txt").write_text(f"{name} says {k} and {k + 1}, café.\n")
    settings = {
        "data.path": root,
        "model.base": tiny_base,
        "model.context": 16,
        "training.batch_size": 4,
        "method.name": "comigs-1g1s",
        "method.rounds": 1,
        "method.local_steps": 1,
        "method.router_every": 1,
        "method.router_steps": 1,
        "keep": "last",
        "patience": "null",
        "compare_with": "[fedavg]",
    }
    return recipes.load("folders", [f"{key}={value}" for key, value in settings.items()])


def test_a_run_keeps_what_its_routers_did(recipe: recipes.Recipe, tmp_path: Path) -> None:
    result = as_json(reported.run(recipe, tmp_path))[-1]
    found = json.loads((tmp_path / "routing.json").read_text())
    assert list(found["weights"]) == ["ann", "ben", "cleo"]
    assert "".join(found["texts"]["ann"]).startswith("ann says")
    assert not (tmp_path / "baselines/fedavg/routing.json").exists()
    page = (tmp_path / "report.html").read_text()
    assert 'id="texts"' in page
    assert 'id="routers"' in page
    client = result["clients"]["ann"]
    moments = 3 * 4 * client["trainable_parameters"]  # the values and two moments of each, fp32
    assert moments <= client["state_bytes"] < moments + 100
    assert result["peak_memory_bytes"] > 10_000_000


def test_samples_can_be_taken_out_afterwards(recipe: recipes.Recipe, tmp_path: Path) -> None:
    reported.run(recipe, tmp_path)
    reported.run(recipe.model_copy(update={"samples": False}), tmp_path, resume=True)
    assert not (tmp_path / "routing.json").exists()
    assert 'id="texts"' not in (tmp_path / "report.html").read_text()


def test_samples_can_be_switched_off(recipe: recipes.Recipe, tmp_path: Path) -> None:
    silent = recipe.model_copy(update={"samples": False})
    reported.run(silent, tmp_path)
    assert not (tmp_path / "routing.json").exists()
    page = (tmp_path / "report.html").read_text()
    assert 'id="texts"' not in page
    assert "says" not in page
    assert 'id="routers"' in page


def test_a_comparison_has_a_report(recipe: recipes.Recipe, tmp_path: Path) -> None:
    reported.compare(["local", "comigs-1g1s"], recipe, tmp_path, seeds=2)
    page = (tmp_path / "report.html").read_text()
    assert page.count(" ± ") >= 4
    assert page.count('class="dot"') == 6
