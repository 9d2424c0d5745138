"""`coterie tune`: what it writes, that it goes on where it was killed, that test figures decide
nothing, and what it refuses.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.metrics import Metric
from coterie.core.result import RESULT, Result, Tuning
from coterie.runs.recipes import recipe as recipes
from coterie.runs.tuning.trials import LOST, score_of, surely

SHORT = {"rounds": 8}
LR = "training.experts.lr"


def told(out: Path, *methods: str, **more: Any) -> Tuning:
    return coterie.tune(methods, "cobo-digits", out=out, method=SHORT, trials=4, **more)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    fields = {"method.rho": [0.01, 0.03]}
    return told(
        tmp_path_factory.mktemp("tuned") / "out", "cobo", "local", "pretrained", fields=fields
    )


def test_every_method_that_trains_has_the_same_effort(tuned: Tuning) -> None:
    cobo, local, pretrained = tuned.rows
    assert (cobo.candidates, local.candidates, pretrained.candidates) == (4, 4, 0)
    assert set(cobo.chosen) == {LR, "method.rho"}
    assert set(local.chosen) == {LR}
    assert (pretrained.chosen, pretrained.valid, pretrained.tried) == ({}, None, ())
    for row in (cobo, local):
        rungs = [[own for own in row.tried if own.rung == k] for k in range(3)]
        assert [(len(rung), {own.rounds for own in rung}) for rung in rungs] == [
            (4, {2}),
            (2, {4}),
            (1, {8}),
        ]
        assert row.runs == len(row.tried)
        assert row.iterations == sum(own.rounds for own in row.tried)
    tried = "tried 4 settings in runs of 2 rounds, the best 2 of them in runs of 4 rounds, and the "
    for said in (f"{tried}best one in runs of 8 rounds; ", "judged on validation data alone"):
        assert said in tuned.effort


def test_the_chosen_recipes_run_and_give_the_score_that_they_were_chosen_for(
    tuned: Tuning, tmp_path: Path
) -> None:
    for row in tuned.rows:
        recipe = coterie.Recipe.load(tuned.path(row.method))
        assert recipe.method["name"] == row.method
        if row.chosen:
            run = coterie.run(recipe, out=tmp_path / row.method)
            assert run.result.valid == pytest.approx(row.valid)
            assert run.result.rounds == row.rounds


def test_what_is_written_is_read_back(tuned: Tuning) -> None:
    assert tuned.folder is not None
    found = Tuning.read(tuned.folder)
    assert json.dumps(found.to_json()) == json.dumps(tuned.to_json())
    assert "test" not in (tuned.folder / "tune.json").read_text()


def test_figures_of_test_data_decide_nothing(
    tuned: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, honest = random.Random(1), Metric.scores

    def corrupted(self: Metric, score: Mapping[str, Tensor]) -> dict[str, float]:
        found = honest(self, score)
        return {k: chance.uniform(0, 100) if "test" in k else v for k, v in found.items()}

    monkeypatch.setattr(Metric, "scores", corrupted)
    other = told(tmp_path / "out", "cobo", "local", fields={"method.rho": [0.01, 0.03]})
    assert [row.to_json() for row in other.rows] == [row.to_json() for row in tuned.rows[:2]]
    assert tuned.folder is not None
    folders = sorted(path.parent for path in tuned.folder.glob("runs/*/*/result.json"))
    same = [path.relative_to(tuned.folder) for path in folders]
    assert same
    assert all(Result.read(tmp_path / "out" / p).valid >= 0 for p in same)
    assert any(
        Result.read(tmp_path / "out" / p).mean != Result.read(tuned.folder / p).mean for p in same
    )


def test_a_score_is_of_validation_alone_and_whole(tuned: Tuning) -> None:
    assert tuned.folder is not None
    path = min(tuned.folder.glob("runs/*/*/result.json"))
    found = json.loads(path.read_text())
    score = score_of(Result.from_json(found))
    for client in found["clients"].values():
        client |= {"test": 0.0, "test_loss": 99.0, "test_synced": 0.0}
    found |= {"mean": 0.0, "best": 0.0, "mean_synced": 0.0, "mean_loss": 9.0}
    assert score_of(Result.from_json(found)) == score
    gone, *_ = found["clients"]
    assert score_of(Result.from_json(found | {"lost": {gone: 1}})) == score
    del found["clients"][gone]
    assert score_of(Result.from_json(found | {"lost": {gone: 1}})) == LOST
    for client in found["clients"].values():
        client["valid_loss"] = float("nan")
    assert score_of(Result.from_json(found)) == LOST


def test_one_run_is_surely_better_if_its_clients_agree(tuned: Tuning) -> None:
    assert tuned.folder is not None
    path = min(tuned.folder.glob("runs/*/*/result.json"))

    def result(*valid: float) -> Result:
        found = json.loads(path.read_text())
        for value, client in zip(valid, found["clients"].values(), strict=True):
            client["valid"] = value
        return Result.from_json(found)

    plain = result(*[50.0] * 8)
    assert surely([result(*[51, 52] * 4)], [plain])
    assert not surely([plain], [result(*[51, 52] * 4)])
    assert not surely([result(90, *[49] * 7)], [plain])  # better in the mean, by one client
    assert not surely([plain], [plain])
    assert surely([plain], [])
    assert not surely([], [plain])


def test_what_diverges_or_is_refused_loses(tmp_path: Path) -> None:
    found = told(tmp_path / "out", "fedavg", fields={LR: [0.3, 1e30]}, callbacks=[])
    row = found["fedavg"]
    lost = [own for own in row.tried if own.problem]
    assert lost
    assert all(own.valid is None and "diverged: " in (own.problem or "") for own in lost)
    assert row.chosen[LR] < 1e25
    assert "trials lost" in " ".join(found.notes)
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob(RESULT))]
    again = told(tmp_path / "out", "fedavg", fields={LR: [0.3, 1e30]}, resume=True)
    assert [row.to_json() for row in again.rows] == [row.to_json() for row in found.rows]
    assert [p.stat().st_mtime_ns for p in sorted((tmp_path / "out").rglob(RESULT))] == before
    refused = told(  # CoBo refuses a pull that cannot converge
        tmp_path / "refused", "cobo", fields={"method.rho": [0.03, 1e6], LR: [0.3]}
    )
    problems = [own.problem for own in refused["cobo"].tried if own.settings["method.rho"] > 1e4]
    assert problems
    assert all("would diverge" in (problem or "") for problem in problems)


def test_where_every_candidate_is_lost_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(coterie.CoterieError, match="no candidate finished") as caught:
        told(tmp_path / "out", "fedavg", fields={LR: [1e30]})
    assert "--field" in caught.value.remedy


def command(out: Path, *more: str) -> list[str]:
    settings = ("--set", "method.rounds=40", "--trials", "4", "--out", str(out))
    methods = ("cobo", "fedavg", "--recipe", "cobo-digits")
    return [sys.executable, "-m", "coterie", "tune", *methods, *settings, *more]


class Enough(coterie.Callback):
    """Stops at the third run that ends."""

    ended = 0

    def end(self, result: Result) -> None:
        self.ended += 1
        if self.ended == 3:
            raise KeyboardInterrupt


def test_what_was_stopped_goes_on_and_ends_as_the_whole(tuned: Tuning, tmp_path: Path) -> None:
    fields = {"method.rho": [0.01, 0.03]}
    with pytest.raises(KeyboardInterrupt):
        told(tmp_path / "out", "cobo", "local", fields=fields, callbacks=[Enough()])
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob(RESULT)}
    assert len(done) == 3
    found = told(tmp_path / "out", "cobo", "local", fields=fields, resume=True)
    assert [row.to_json() for row in found.rows] == [row.to_json() for row in tuned.rows[:2]]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())


class Killed(coterie.Callback):
    """Kills its own process at an event of a run, when it has come so often."""

    def __init__(self, event: str, count: int) -> None:
        self.event, self.left = event, count

    def checkpoint(self, round: int, folder: Path) -> None:
        self._count("checkpoint")

    def end(self, result: Result) -> None:
        self._count("end")

    def _count(self, event: str) -> None:
        self.left -= event == self.event
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


KILLS = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
from test_tune import Killed, told

torch.set_num_threads(1)
for k, (event, count) in enumerate((("checkpoint", 3), ("end", 3), ("end", 5))):
    if not (pid := os.fork()):
        fields = {"method.rho": [0.01, 0.03]}
        killed = [Killed(event, count)]
        told(Path("out"), "cobo", "local", fields=fields, callbacks=killed, resume=k > 0)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, k
"""


@pytest.mark.slow
def test_killed_in_a_run_and_between_runs_it_goes_on(tuned: Tuning, tmp_path: Path) -> None:
    """The same as below, at events that are named, in processes that need not start anew."""
    words = [sys.executable, "-c", KILLS, str(Path(__file__).parent)]
    subprocess.run(words, cwd=tmp_path, check=True)
    done = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(RESULT)}
    assert len(done) == 2 + 3 + 5
    fields = {"method.rho": [0.01, 0.03]}
    found = told(tmp_path / "out", "cobo", "local", fields=fields, resume=True)
    assert [row.to_json() for row in found.rows] == [row.to_json() for row in tuned.rows[:2]]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())
    whole, killed = (
        {path.relative_to(folder) for path in folder.rglob("client*/*.safetensors")}
        for folder in (tuned.folder, tmp_path / "out")
        if folder is not None
    )
    assert killed == whole  # the models of what was chosen, and no others


@pytest.mark.slow
def test_after_kill_9_it_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), cwd=tmp_path, capture_output=True, check=True)
    kills = 0
    for wanted in (2, 6):
        resume = ("--resume",) if kills else ()
        process = subprocess.Popen(
            command(killed, *resume),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            if len(list(killed.rglob(RESULT))) >= wanted:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.wait()
    assert kills == 2
    done = {path: path.stat().st_mtime_ns for path in killed.rglob(RESULT)}
    again = subprocess.run(
        command(killed, "--resume"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    kept = {path: stamp for path, stamp in done.items() if path.stat().st_mtime_ns == stamp}
    assert len(kept) >= len(done) - 1  # one may have been killed right behind writing its result
    assert (killed / "tune.json").read_text() == (whole / "tune.json").read_text()
    for chosen in (whole / "chosen").iterdir():
        assert (killed / "chosen" / chosen.name).read_text() == chosen.read_text()


TINY = ("--recipe", "cobo-digits", "--set", "method.rounds=2", "--trials", "1")
REFUSED = {
    "a field that is none": (("cobo", *TINY, "--field", "method.rhoo=1,2"), "did you mean rho"),
    "a field of none of the methods": (
        ("local", *TINY, "--field", "method.rho=0.1,0.2"),
        "method.rho: unknown key",
    ),
    "words for numbers": (
        ("cobo", *TINY, "--field", f"{LR}=fast,slow"),
        "training.experts.lr: input should be a valid number",
    ),
    "no values": (("cobo", *TINY, "--field", f"{LR}="), "KEY=V1,V2"),
    "no key": (("cobo", *TINY, "--field", "0.1,0.2"), "KEY=V1,V2"),
    "a field twice": (
        ("cobo", *TINY, "--field", f"{LR}=1", "--field", f"{LR}=2"),
        "given twice",
    ),
    "what is scored": (("cobo", *TINY, "--field", "data.seed=1,2"), "cannot be searched"),
    "no method": (TINY, "coterie methods"),
    "nothing at all": ((), "--recipe cobo-digits"),
    "no recipe": (("cobo", "local"), "--recipe quickstart"),
    "a method that is none": (("coboo", *TINY), "did you mean cobo"),
    "nothing that trains": (("pretrained", *TINY), "nothing to tune"),
    "a method that does not fit": (("comigs-1g1s", *TINY), "classifier"),
    "no run to resume": (("cobo", *TINY, "--resume"), "without --resume"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_at_once(case: str, tmp_path: Path) -> None:
    words, remedy = REFUSED[case]
    done = CliRunner().invoke(app, ["tune", *words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert remedy in " ".join(done.output.split())
    assert not list(tmp_path.rglob(RESULT))


def test_another_search_in_the_folder_is_refused(tuned: Tuning) -> None:
    out = ["--out", str(tuned.folder)]
    base = ["tune", "cobo", "local", "--recipe", "cobo-digits", "--set", "method.rounds=8"]
    for more, said in (
        ([], "already holds a search"),
        (["--resume"], "other methods and fields and effort"),
        (["--resume", "--set", "seed=4"], "recipe"),
    ):
        done = CliRunner().invoke(app, [*base, *out, *more])
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())
        assert "another --out" in " ".join(done.output.split())


def test_a_recipe_alone_means_its_own_method_and_a_field_of_rounds_keeps_them(
    tmp_path: Path,
) -> None:
    words = ["tune", "cobo-digits", "--set", "method.rounds=8", "--trials", "2"]
    out = ["--out", str(tmp_path / "out"), "--field", "method.rounds=4,8"]
    done = CliRunner().invoke(app, [*words, *out])
    assert done.exit_code == 0, done.output
    [row] = Tuning.read(tmp_path / "out").rows
    assert (row.method, row.candidates) == ("cobo", 2)
    assert row.chosen["method.rounds"] == row.rounds
    assert recipes.load(str(tmp_path / "out/chosen/cobo.yaml")).method["rounds"] == row.rounds
    text = " ".join(done.output.split())
    assert "chosen on validation" in text
    assert "test accuracy" not in text
    assert f"coterie run {tmp_path}/out/chosen/cobo.yaml" in text


def test_a_comparison_tunes_every_row_first_and_says_so(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"seeds": 2, "tune": True, "trials": 2, "method": SHORT}
    found = coterie.compare(["cobo", "local"], "cobo-digits", out=tmp_path / "out", **arguments)
    assert "tried 2 settings in runs of 2 rounds" in found.notes[0]
    searched = Tuning.read(tmp_path / "out" / "tune")
    for row in searched.rows:
        recipe = coterie.Recipe.load(tmp_path / "out" / row.method / "seed-1")
        assert recipe.training.experts.lr == row.chosen[LR]
        assert f"{row.method}: experts.lr {row.chosen[LR]:g}" in found.notes[0]
    again = coterie.compare(
        ["cobo", "local"], "cobo-digits", out=tmp_path / "out", resume=True, **arguments
    )
    assert [row.mean for row in again.rows] == [row.mean for row in found.rows]
    with pytest.raises(coterie.Refused, match="tune is not set"):
        coterie.compare(["cobo"], "cobo-digits", trials=2, out=tmp_path / "other")
