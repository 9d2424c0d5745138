"""CoMiGS whose clients choose their number of specialists, against CoMiGS with each number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_interpolation_method import same, scored
from typer.testing import CliRunner

import coterie
from coterie.adapt.fresh import refit
from coterie.cli.base import app
from coterie.core.errors import RecipeError
from coterie.core.tensors import under
from coterie.methods import METHODS
from coterie.methods.section import build_method
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture
from coterie.runs.problems.prepare import prepare
from coterie.testing.run import Run, language

SMALL = {"rounds": 3, "local_steps": 2, "router_every": 2, "router_steps": 1}


def test_each_size_is_comigs_alone_bit_for_bit() -> None:
    """Its server's state, its clients', and their scores."""
    method = build_method({"name": "comigs-auto", **SMALL, "specialists": [0, 1, 3]})
    together = Run(method, language())
    alone = {
        f"comigs-1g{s}s": Run(
            build_method({"name": "comigs", **SMALL, "specialists": s}), language()
        )
        for s in (0, 1, 3)
    }
    assert list(method.methods) == list(alone)
    for _ in range(3):
        replies = scored(together.rounds(1), "score")
        for place, (name, run) in enumerate(alone.items()):
            own = scored(run.rounds(1), "score")
            same(under(name, together.server), run.server)
            for i in run.clients:
                same(under(name, together.engine.states()[i]), run.engine.states()[i])
                assert torch.equal(replies[i]["parts"][place][0], own[i]["valid"])
                assert torch.equal(replies[i]["parts"][place][1], own[i]["test"])
                chosen = int(replies[i]["weights"].argmax())
                assert replies[i]["weights"].tolist() == [float(k == chosen) for k in range(3)]
        for i in alone["comigs-1g0s"].clients:
            chosen = int(replies[i]["weights"].argmax())
            assert torch.equal(replies[i]["test"], replies[i]["parts"][chosen][1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    coterie.run(
        "synthetic",
        out=folder,
        data={"clients": 3, "train_tokens": 1500, "valid_tokens": 600, "test_tokens": 600},
        method={"name": "comigs-auto", **SMALL, "local_steps": 6, "specialists": [0, 1]},
        model={"base": str(tiny_base)},
        training={"batch_size": 4},
        compare_with=["comigs-1g1s"],
        evaluate_every=1,
    )
    return folder


def test_each_client_keeps_one_model_of_the_size_that_validation_says(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    data = prepare(coterie.Recipe.load(run / "recipe.yaml")).problem.federation.clients
    other = json.loads((run / "baselines/comigs-1g1s/result.json").read_text())
    for i, of in result["clients"].items():
        model = coterie.load(run, i)
        assert isinstance(model, PersonalModel)
        assert not isinstance(model, PersonalMixture)
        weights = {name: part["weight"] for name, part in of["parts"].items()}
        assert weights[model.about.method] == 1
        assert sum(weights.values()) == 1
        assert model.about.method == f"comigs-1g{model.layout.specialists}s"
        assert METHODS[model.about.method].fixed["specialists"] == model.layout.specialists
        nll, tokens = model.score(data[i].test.scoring(8))
        assert torch.tensor(nll / tokens).exp().item() == pytest.approx(of["test"], rel=1e-5)
        assert of["test"] == of["parts"][model.about.method]["test"]
        # the row of one size by itself is that part
        assert of["parts"]["comigs-1g1s"]["test"] == other["clients"][i]["test"]


def test_the_chosen_model_is_used_like_any_other(run: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("\n\n".join(f"the water and the {k} of it" for k in range(400)))
    client = next(iter(coterie.load_all(run)))
    words = ["adapt", str(run), "--data", str(texts), "--client", "you", "--no-train"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert coterie.load(run, "you").about.method == "comigs-1g0s"
    if coterie.load(run, client).layout.specialists:
        assert refit(run, client, texts, iterations=3).new


def test_numbers_that_leave_nothing_to_choose_are_refused() -> None:
    for numbers in ([1], [2, 2]):
        with pytest.raises((RecipeError, ValueError), match="specialists"):
            build_method({"name": "comigs-auto", "specialists": numbers})


def test_a_size_may_be_named_by_itself() -> None:
    method: Any = build_method({"name": "comigs-2g3s"})
    assert (method.generalists, method.specialists) == (2, 3)
    assert METHODS["comigs-2g3s"].title == "CoMiGS-2G3S"
    assert "comigs-2g123s" not in METHODS
    assert "comigs-2g3s" not in list(METHODS)
