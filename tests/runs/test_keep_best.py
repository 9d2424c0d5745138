"""`keep: best`: every client ends with the model of the round that its own validation data chose,
wherever it computes, and whatever happens on the way.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reported
import torch

from coterie import personal
from coterie.cli.train import _show
from coterie.core.callback import Callback
from coterie.core.errors import Refused
from coterie.core.files import read_json
from coterie.core.metrics import ACCURACY, perplexity
from coterie.core.protocol import State
from coterie.core.result import Evaluation, Result, Scores
from coterie.core.result import rows as comparison
from coterie.core.tensors import from_bytes
from coterie.data.splits import SPLITS
from coterie.methods import METHODS
from coterie.runs import run
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.scoring import Scorer

WORDS = {
    "ann": "the cat sat on a warm mat and slept while the dog looked for its bone",
    "ben": "add two numbers then divide by three to find the mean value of this list",
    "cleo": "sail north until the wind turns and drop the anchor near the stone wall",
}
ROUNDS = 5
# so high a learning rate that validation is best at another round than the last
SMALL = (
    *("model.context=16", "training.batch_size=4", "training.experts.lr=0.2", "samples=false"),
    *(f"method.rounds={ROUNDS}", "method.local_steps=4", "method.router_every=2"),
    *("method.router_steps=1", "evaluate_every=1", "compare_with=[]", "curve_every=null", "seed=3"),
    *("training.experts.schedule=constant", "method.name=comigs-1g1s", "patience=null"),
    "evaluate_rows=null",
)
DIGITS = (
    *(f"method.rounds={ROUNDS}", "method.local_steps=3", "compare_with=[]", "evaluate_every=1"),
    *("data.clusters=2", "data.clients_per_cluster=2", "curve_every=null"),
)


def write_texts(root: Path) -> Path:
    """Three clients with splits of their own. ben is validated on what training harms at once, and
    ann has little text, which it knows by heart after a while.
    """
    for name, words in WORDS.items():
        rng = random.Random(name)
        for split, count in zip(SPLITS, (24, 6, 6), strict=True):
            (root / name / split).mkdir(parents=True)
            for k in range(2 if (name, split) == ("ann", "train") else count):
                text = " ".join(rng.choices(words.split(), k=12))
                if (name, split) == ("ben", "valid"):
                    text = "".join(rng.choices("0123456789", k=60))
                (root / name / split / f"{k:02d}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


def of_texts(path: Path, base: Path, *more: str) -> Recipe:
    return load("folders", [*SMALL, f"data.path={path}", f"model.base={base}", *more])


class Copies(Callback):
    """Copies the checkpoint of every round."""

    def __init__(self, to: Path) -> None:
        self.to = to

    def checkpoint(self, round: int, folder: Path) -> None:
        shutil.copytree(folder, self.to / str(round))


def state_in(folder: Path, client: str) -> State:
    """The state of a client in a checkpoint's folder, wherever that is."""
    index = read_json(folder / "clients.json")
    pack, offset, length, _ = index["clients"][client]
    with open(folder / "clients" / index["packs"][pack], "rb") as file:
        file.seek(offset)
        return from_bytes(file.read(length))


class Killed(Callback):
    """Kills its own process after a round."""

    def checkpoint(self, round: int, folder: Path) -> None:
        if round == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def result_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "result.json").read_text())
    return {k: v for k, v in found.items() if k not in ("wall_s", "peak_memory_bytes", "machine")}


def personal_files(folder: Path) -> dict[str, bytes]:
    paths = sorted((folder / "clients").rglob("*.safetensors"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def assert_ends_alike(ours: Path, theirs: Path) -> None:
    assert result_of(ours) == result_of(theirs)
    assert personal_files(ours) == personal_files(theirs) != {}


@pytest.fixture(scope="module")
def kept(texts: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "run"
    reported.run(of_texts(texts, tiny_base, "keep=best"), out)
    return out


def at_the_start(recipe: Recipe, client: str) -> dict[str, float]:
    """The scores of a client that nobody has trained."""
    prepared = prepare(recipe)
    own = prepared.site.client(client, {})
    return {name: perplexity(own.score(getattr(own, name))) for name in ("valid", "test")}


def test_each_client_has_the_round_that_is_best_by_hand(
    kept: Path, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """With `keep: last` and everything kept that there is: the argmin by client over the rounds."""
    recipe = of_texts(texts, tiny_base, "keep=last")
    copies = Copies(tmp_path / "copies")
    run.run(recipe, tmp_path / "last", reporter=copies)
    last, best = result_of(tmp_path / "last"), result_of(kept)
    assert "kept_round" not in last["clients"]["ann"]
    assert last["evaluations"] == best["evaluations"][1:]
    chosen = {}
    for client, found in best["clients"].items():
        by_round = [at_the_start(recipe, client)]
        by_round += [evaluation["clients"][client] for evaluation in last["evaluations"]]
        valid = [scores["valid"] for scores in by_round]
        chosen[client] = round = valid.index(min(valid))
        assert found["kept_round"] == round
        assert found["valid"] == valid[round] <= valid[0]
        assert found["test"] == found["test_synced"] == by_round[round]["test"]
        if round:
            state = state_in(copies.to / str(round), client)
            end = state_in(kept / f"checkpoints/round-{ROUNDS:05d}", client)
            for key, tensor in state.items():
                if key.startswith("parameters/"):
                    assert torch.equal(end[f"best/{key}"], tensor)
    assert len(set(chosen.values())) > 1, chosen  # there was something to find
    assert sorted(chosen.values())[1] < ROUNDS
    assert best["mean"] == pytest.approx(sum(c["test"] for c in best["clients"].values()) / 3)


def test_of_equal_scores_the_earliest_counts_so_that_nothing_learned_is_nothing_changed(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    idle = ["keep=best", "training.experts.lr=1e-30", "training.routers.lr=1e-30"]
    recipe = of_texts(texts, tiny_base, *idle, "method.rounds=2")
    run.run(recipe, tmp_path / "run")
    for client, found in result_of(tmp_path / "run")["clients"].items():
        assert found["kept_round"] == 0
        start = at_the_start(recipe, client)
        assert {name: found[name] for name in start} == start


def test_the_personal_model_scores_what_the_result_says(
    kept: Path, texts: Path, tiny_base: Path
) -> None:
    federation = prepare(of_texts(texts, tiny_base)).problem.federation
    for client, found in result_of(kept)["clients"].items():
        model = personal.load(kept / "clients" / client)
        assert model.about.round == found["kept_round"]
        split = federation.clients[client].test
        nll, tokens = model.score(split.scoring(4))
        assert perplexity(torch.tensor([nll, tokens], dtype=torch.float64)) == pytest.approx(
            found["test"], rel=1e-9
        )


def test_test_data_have_no_say(kept: Path, texts: Path, tiny_base: Path, tmp_path: Path) -> None:
    """With other test texts every client keeps the same model to the bit."""
    shutil.copytree(texts, tmp_path / "texts")
    for path in (tmp_path / "texts").glob("*/test/*.txt"):
        path.write_text("".join(sorted(path.read_text())) * 2)
    run.run(of_texts(tmp_path / "texts", tiny_base, "keep=best"), tmp_path / "other")
    ours, theirs = (result_of(folder)["clients"] for folder in (kept, tmp_path / "other"))
    for client in WORDS:
        assert ours[client]["test"] != theirs[client]["test"]
        for key in ("kept_round", "valid", "valid_loss"):
            assert ours[client][key] == theirs[client][key]
    assert personal_files(kept) == personal_files(tmp_path / "other")


@pytest.mark.slow
def test_killed_and_resumed_it_ends_alike(
    kept: Path, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
import torch
torch.set_num_threads(1)
from coterie.runs import run
from test_keep_best import Killed, of_texts
recipe = of_texts(Path({str(texts)!r}), Path({str(tiny_base)!r}), "keep=best")
run.run(recipe, Path("run"), reporter=Killed())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "run/result.json").exists()
    run.run(of_texts(texts, tiny_base, "keep=best"), tmp_path / "run", resume=True)
    assert_ends_alike(kept, tmp_path / "run")


def test_it_is_alike_over_bytes(kept: Path, texts: Path, tiny_base: Path, tmp_path: Path) -> None:
    run.run(of_texts(texts, tiny_base, "keep=best", "engine=loopback"), tmp_path / "bytes")
    assert_ends_alike(kept, tmp_path / "bytes")


@pytest.mark.parametrize("name", ["cobo", "fedavg", "local", "ditto", "ifca", "pretrained", "fc"])
def test_classifiers_of_every_kind_of_method_never_end_below_their_start(
    name: str, tmp_path: Path
) -> None:
    recipe = load("cobo-digits", [*DIGITS, "keep=best"]).with_method(name)
    run.run(recipe, tmp_path / "run")
    found = result_of(tmp_path / "run")
    for client, own in found["clients"].items():
        valid = [e["clients"][client]["valid"] for e in found["evaluations"]]
        assert own["kept_round"] == found["evaluations"][valid.index(max(valid))]["round"]
        assert own["valid"] == max(valid)
    assert found["evaluations"][0]["round"] == 0


def test_clients_that_keep_nothing_keep_their_best_model(tmp_path: Path) -> None:
    """A pool's clients forget the model after every task, and not the copy."""
    settings = ["method.rounds=3", "data.clients=4", "data.anchors=2", "method.pool=2"]
    settings += ["data.unseen={}", "evaluate_every=1", "keep=best", "training.stateless=false"]
    run.run(load("ddome-digits", settings), tmp_path / "run")
    found = result_of(tmp_path / "run")
    for client, own in found["clients"].items():
        valid = [e["clients"][client]["valid"] for e in found["evaluations"]]
        assert own["valid"] == max(valid)
        assert own["gate_accuracy"] is not None
        model = personal.load(tmp_path / "run/clients" / client)
        assert model.about.round == own["kept_round"]


def test_without_evaluations_between_it_chooses_between_start_and_end(tmp_path: Path) -> None:
    run.run(load("cobo-digits", [*DIGITS, "keep=best", "evaluate_every=0"]), tmp_path / "run")
    found = result_of(tmp_path / "run")
    assert [e["round"] for e in found["evaluations"]] == [0, ROUNDS]
    for client, own in found["clients"].items():
        start, end = (e["clients"][client]["valid"] for e in found["evaluations"])
        assert own["kept_round"] == (ROUNDS if end > start else 0)
        assert own["valid"] == max(start, end)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Refused, match=r"keep: best needs clients.*data\.unseen"):
        prepare(load("ddome-digits", ["keep=best", "evaluate_every=1"]))
    stateless = ["keep=best", "evaluate_every=1", "training.stateless=true", "method.name=fedavg"]
    with pytest.raises(Refused, match=r"keep: best needs clients.*training\.stateless"):
        prepare(load("cobo-digits", stateless))


def test_the_result_and_its_tables_show_the_rounds(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result.read(kept)
    assert result.to_json() == json.loads((kept / "result.json").read_text())
    rows = comparison.rows([result])
    rounds = {i: client.kept_round for i, client in result.clients.items()}
    assert rows[0].kept_rounds == rounds
    assert type(rows[0]).from_json(rows[0].to_json()) == rows[0]
    page = (kept / "report.html").read_text()
    assert "best round by its own validation data (keep: best)" in page
    assert METHODS[result.method].title in page
    from rich.console import Console

    _show(Console(width=160), rows, "folders", result.method)
    said = " ".join(capsys.readouterr().out.split())
    assert "best round by its own validation data" in said
    assert "synced" not in said


@pytest.mark.parametrize(
    "method",
    [
        "comigs-1g1s",
        pytest.param("interpolation", marks=pytest.mark.slow),
        pytest.param("fdlora", marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_when_no_validation_score_gets_better(
    texts: Path, tiny_base: Path, tmp_path: Path, method: str
) -> None:
    """After the round that the scores by hand say; its models are those of the whole run's best
    rounds until then, and what follows the last round is done.
    """
    recipe = of_texts(texts, tiny_base, "keep=best").with_method(method)
    section = {**recipe.method, "rounds": 25}
    whole = recipe.model_copy(update={"method": section})
    patient = whole.model_copy(update={"patience": 2})
    result = reported.run(patient, tmp_path / "patient")[-1]
    every = reported.run(whole, tmp_path / "whole")[-1]

    def series(evaluations: Any) -> list[list[float]]:
        by_client = []
        for i in evaluations[0].clients:
            scores = [e.clients[i] for e in evaluations]
            parts = scores[0].parts or {}
            by_client += [[s.parts[p].valid for s in scores] for p in parts] or [
                [s.valid for s in scores]
            ]
        return by_client

    rounds = [e for e in every.evaluations if e.round <= result.rounds]
    turned = [min(v[:-2]) <= min(v[-2:]) for v in series(rounds)]
    before = [min(v[:-2]) <= min(v[-2:]) for v in series(rounds[:-1])]
    assert result.rounds < 25
    assert all(turned)
    assert not all(before)
    assert [e.test for e in result.evaluations[: len(rounds)]] == [e.test for e in rounds]
    assert len(result.evaluations) - len(rounds) == (method == "fdlora")


def test_patience_needs_validation_scores() -> None:
    for field in ("keep=last", "evaluate_every=0"):
        with pytest.raises(Refused, match="patience: needs keep: best"):
            load("quickstart", ["keep=best", "evaluate_every=1", field, "patience=3"])


def test_an_accuracy_of_zero_is_a_score_that_others_are_better_than() -> None:
    scores = {"a": [0.0, 20.0, 30.0, 40.0], "b": [60.0, 60.0, 60.0, 60.0]}
    by_round = [{i: Scores(test=0.0, valid=of[k]) for i, of in scores.items()} for k in range(4)]
    evaluations = [
        Evaluation(round=k, iteration=k, test=0.0, clients=of) for k, of in enumerate(by_round)
    ]
    prepared = SimpleNamespace(problem=SimpleNamespace(metric=ACCURACY))
    state = SimpleNamespace(
        recipe=SimpleNamespace(patience=3), round=3, evaluations=evaluations, prepared=prepared
    )
    assert not Scorer(state, SimpleNamespace()).turned()  # type: ignore[arg-type]
