"""What `coterie run folders` does unless told otherwise: Local and FedAvg, mixed, for as long as
validation gets better, and the best round of each.
"""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.runs.recipes.recipe import load

WORDS = {  # two who share words, and one apart
    "ann": "the cat sat on a warm mat and slept while a dog looked for its bone",
    "ben": "the cat sat on a cold roof and a bird looked for its nest",
    "cleo": "veni vidi vici gallia est omnis divisa in partes tres",
}
LIMIT = 30
QUICK = {
    "evaluate_rows": None,
    "model.context": 32,
    "training.batch_size": 4,
    "training.experts.lr": 0.05,
    "training.experts.schedule": "constant",
    "method.local_steps": 20,
    "method.rounds": LIMIT,
    "samples": False,
    "words": 4,
    "threads": 1,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    for name, words in WORDS.items():
        (root / name).mkdir()
        draw = random.Random(name)
        for k in range(12):
            (root / name / f"{k}.txt").write_text(" ".join(draw.choices(words.split(), k=15)))
    return root


def coterie_run(*words: str, **settings: object) -> str:
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    options = [word for setting in given for word in ("--set", setting)]
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["run", *words, *options])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("name", ["folders", "table"])
def test_the_recipes(name: str) -> None:
    recipe = load(name)
    assert recipe.build_method().methods.keys() == {"local", "fedavg"}
    assert (recipe.method["rounds"], recipe.keep, recipe.evaluate_every) == (25, "best", 1)
    assert recipe.patience == 3
    assert recipe.compare_with == ("pretrained", "local", "fedavg")
    assert [recipe.trains(recipe.with_method(row)) for row in recipe.compare_with] == [0, 1, 1]


def test_it_is_never_worse_ends_by_itself_and_says_so(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    place = {"data.path": str(texts), "model.base": str(tiny_base)}
    said = coterie_run("folders", "--out", str(out), **QUICK, **place)
    assert f"at most {LIMIT} rounds: training ends when no validation score has become" in said
    assert f"Interpolation: at most {LIMIT} rounds, 3 clients" in said
    assert "Pretrained: no training, 3 clients to score" in said
    for row in ("Local", "FedAvg"):
        assert f"{row}: trained already, 3 clients to score" in said
    assert "best round by its own validation data (keep: best)" in said
    run = coterie.Run(out)
    last = run.result.rounds
    assert 3 < last < LIMIT
    assert f"training ends after round {last} of at most {LIMIT}" in said
    # naive: of every series, the best score lies at least three evaluations back
    for name in ("local", "fedavg"):
        for i in WORDS:
            series = [(e.clients[i].parts or {})[name].valid for e in run.result.evaluations]
            best = min(range(last + 1), key=lambda k: series[k])
            assert best <= last - 3
            assert run.baselines[name].clients[i].valid == pytest.approx(series[best])
    for i, client in run.result.clients.items():
        assert client.valid is not None
        assert client.words is not None
        assert 0 < client.words.words <= 4
        for row in run.baselines.values():
            assert client.valid <= row.clients[i].valid * 1.005, (i, row.method)
    assert {row.method: bool(row.kept_rounds) for row in run.rows} == dict.fromkeys(
        ("pretrained", "local", "fedavg", "interpolation"), True
    )


@pytest.mark.slow
def test_each_part_is_that_method_by_itself(texts: Path, tiny_base: Path, tmp_path: Path) -> None:
    settings = {**QUICK, "method.rounds": 3, "patience": None, "data.path": str(texts)}
    recipe = load("folders").with_changes(**settings, **{"model.base": str(tiny_base)})
    run = coterie.run(recipe, out=tmp_path / "run")
    for name in ("local", "fedavg"):
        alone = coterie.run(recipe.with_method(name), out=tmp_path / name)
        assert alone.result.clients == run.baselines[name].clients
        assert run.baselines[name].part_of == "interpolation"


@pytest.mark.parametrize("key", ["method", "method.name"])
def test_another_method_has_its_own_defaults(
    key: str, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    recipe = load("folders", [f"{key}=comigs-1g1s"])
    method = recipe.build_method()
    assert (method.router_every, method.router_steps) == (30, 10)  # type: ignore[attr-defined]
    assert recipe == coterie.Recipe.load("folders", method="comigs-1g1s")
    said = coterie_run(
        "folders",
        "--out",
        str(tmp_path / "run"),
        **{key: "comigs-1g1s", **QUICK, "method.rounds": 1},
        **{"data.path": str(texts), "model.base": str(tiny_base), "compare_with": []},
    )
    assert "CoMiGS-1G1S" in said


def test_a_dry_run_says_what_is_trained_with_it(texts: Path, tiny_base: Path) -> None:
    place = {"data.path": str(texts), "model.base": str(tiny_base)}
    said = coterie_run("folders", "--dry-run", **QUICK, **place)
    assert said.count("trained with Interpolation, once") == 2
    assert f"at most {LIMIT} rounds: training ends" in said
    assert f"Local: at most {LIMIT} rounds" in said
    assert "Pretrained: 0 rounds" in said
