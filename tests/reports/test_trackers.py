"""Experiment trackers: what the real programs keep in their offline modes."""

import importlib.util
import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from offline_trackers import assert_no_secrets, every_byte, secret_texts
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.result import Comparison, Result
from coterie.reports import trackers
from coterie.reports.trackers import TRACKED, TRACKERS, TrackedRun, Tracker
from coterie.reports.verdict import verdict

SHORT = {"method": {"rounds": 2}, "compare_with": ["local"], "threads": 1, "evaluate_every": 1}
TINY = [
    "method.rounds=2",
    "method.local_steps=1",
    "model.context=64",
    "compare_with=[]",
    "threads=1",
]
MODULES = {"wandb": "wandb", "mlflow": "mlflow.tracking"}


def mlflow_rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "mlflow.db") as base:
        return base.execute(query).fetchall()


def artifacts(folder: Path, name: str) -> dict[str, str]:
    """The files of the run of this name."""
    ((place,),) = mlflow_rows(folder, f"select artifact_uri from runs where name = '{name}'")
    root = folder / place.removeprefix("file://")
    return {path.name: path.read_text() for path in root.iterdir()}


class Recorder(Tracker):
    """Keeps what a tracker is told, in this process."""

    name, remedy = "recorder", "None."

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.fails = False

    def open(self, run: TrackedRun) -> str:
        self.runs.append({"run": run, "rounds": [], "complete": None})
        return run.known or f"id-{len(self.runs)}"

    def log(self, round: int, values: Mapping[str, float]) -> None:
        if self.fails:
            raise ConnectionError("the server\nhas gone")
        self.runs[-1]["rounds"].append((round, dict(values)))

    def close(self, complete: bool) -> None:
        self.runs[-1]["complete"] = complete


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(trackers, "TRACKERS", {**TRACKERS, "recorder": lambda: found})
    return found


def test_figures_are_those_of_metrics_jsonl_by_round_and_client(
    recorder: Recorder, tmp_path: Path
) -> None:
    run = coterie.run("cobo-digits", out=tmp_path / "mine", track=["recorder"], **SHORT)
    local, own = recorder.runs
    assert [local["run"].name, own["run"].name] == ["local", "cobo"]
    assert {local["run"].group, own["run"].group} == {"mine"}
    assert own["run"].config["method"]["rounds"] == 2
    assert own["complete"]
    assert local["complete"]
    told = {(round, name): v for round, values in own["rounds"] for name, v in values.items()}
    kept = {}  # of two exchanges in a round the later one counts
    for line in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()):
        kind, round, _, client = (line.pop(k) for k in ("kind", "round", "iteration", "client"))
        kept |= {(round, f"{kind}/{name}/{client}"): value for name, value in line.items()}
    assert len(kept) > 50
    assert {key: told[key] for key in kept} == kept
    assert told[2, "score/test"] == run.result.evaluations[-1].test
    assert told[2, "result/mean"] == run.result.mean
    assert [round for round, _ in own["rounds"]] == sorted({round for round, _ in own["rounds"]})


def test_a_comparison_is_one_group(recorder: Recorder, tmp_path: Path) -> None:
    coterie.compare(
        ["local", "fedavg"],
        "cobo-digits",
        seeds=2,
        out=tmp_path / "table",
        track=["recorder"],
        method={"name": "fedavg", "rounds": 1},
    )
    assert [own["run"].name for own in recorder.runs] == [
        f"{method}/seed-{seed}" for method in ("local", "fedavg") for seed in (0, 1)
    ]
    assert {own["run"].group for own in recorder.runs} == {"table"}


def test_a_search_is_one_group(recorder: Recorder, tmp_path: Path) -> None:
    command = ["tune", "local", "--recipe", "cobo-digits", "--trials", "2", "--track", "recorder"]
    command += ["--set", "method.rounds=2", "--out", str(tmp_path / "search")]
    assert CliRunner().invoke(app, command).exit_code == 0
    folders = {path.parent for path in (tmp_path / "search/runs").rglob("result.json")}
    found = {own["run"].name for own in recorder.runs}
    assert found == {path.relative_to(tmp_path / "search").as_posix() for path in folders}
    assert {own["run"].group for own in recorder.runs} == {"search"}


def test_a_resumed_run_is_the_same_run(recorder: Recorder, tmp_path: Path) -> None:
    class Stops(coterie.Callback):
        def round(self, done: int) -> None:
            raise RuntimeError("enough")

    short = {**SHORT, "compare_with": [], "checkpoint_every": 1}
    with pytest.raises(coterie.CallbackError):
        coterie.run("cobo-digits", out=tmp_path, track=["recorder"], callbacks=[Stops()], **short)
    assert recorder.runs[0]["complete"] is False
    assert json.loads((tmp_path / TRACKED).read_text()) == {"recorder": "id-1"}
    coterie.run("cobo-digits", out=tmp_path, track=["recorder"], resume=True, **short)
    assert recorder.runs[1]["run"].known == "id-1"
    assert recorder.runs[1]["complete"]


def test_a_tracker_that_fails_does_not_stop_the_run(recorder: Recorder, tmp_path: Path) -> None:
    recorder.fails = True
    with pytest.warns(RuntimeWarning, match="recorder has stopped: the server has gone"):
        run = coterie.run("cobo-digits", out=tmp_path, track=["recorder"], **SHORT)
    assert run.result.rounds == 2


def test_paths_of_this_machine_stay_here(recorder: Recorder, tmp_path: Path) -> None:
    secret_texts(data := tmp_path / "ann-smith" / "letters", "ann", "bob")
    coterie.run(
        "folders",
        out=tmp_path / "run",
        track=["recorder"],
        data={"path": str(data)},
        model={"context": 64},
        method={"name": "local", "rounds": 1, "local_steps": 1},
        compare_with=[],
        samples=False,
        threads=1,
    )
    told = json.dumps(recorder.runs[-1]["run"].config)
    assert "ann-smith" not in told
    assert '"letters"' in told


def test_no_text_of_a_client_is_in_what_the_trackers_keep(offline: Path, tmp_path: Path) -> None:
    found = [name for name in TRACKERS if importlib.util.find_spec(name)]
    if not found:
        pytest.skip("no tracker is installed")
    secret_texts(tmp_path / "letters", "ann", "bob")
    words = ["-m", "coterie", "run", "folders", "--out", str(tmp_path / "run")]
    settings = [*TINY, "threads=1", f"data.path={tmp_path / 'letters'}", "evaluate_every=1"]
    for option, values in (("--set", settings), ("--track", found)):
        words += [word for value in values for word in (option, value)]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for folder in {"wandb": "wandb", "mlflow": "mlflow.db"}.items():
        if folder[0] in found:
            kept = every_byte(offline / folder[1])
            assert b"score/test/ann" in kept  # its files can be read as they are
            assert b"local_steps" in kept
    kept = every_byte(offline)
    assert_no_secrets(kept)
    assert str(tmp_path / "letters").encode() not in kept


def test_mlflow_has_the_figures_in_its_database(offline: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking")
    run = coterie.run("cobo-digits", out=tmp_path / "mine", track=["mlflow"], **SHORT)
    names = mlflow_rows(offline, "select name, status from runs order by start_time")
    assert names == [("local", "FINISHED"), ("cobo", "FINISHED")]
    groups = mlflow_rows(offline, "select distinct value from tags where key = 'coterie.group'")
    assert groups == [("mine",)]
    query = (
        "select step, value from metrics m join runs r on m.run_uuid = r.run_uuid "
        "where r.name = 'cobo' and m.key = 'score/test/c0-0' order by step"
    )
    expected = [(e.round, e.clients["c0-0"].test) for e in run.result.evaluations]
    assert mlflow_rows(offline, query) == expected
    query = "select value from params where key = 'method.rounds'"
    assert {value for (value,) in mlflow_rows(offline, query)} == {"2"}
    local, own = (artifacts(offline, name) for name in ("local", "cobo"))
    assert own.keys() - local.keys() == {"verdict.txt"}
    assert Result.from_json(json.loads(own["result.json"])) == Result.read(run.folder)
    assert yaml.safe_load(local["recipe.yaml"])["method"]["name"] == "local"
    assert yaml.safe_load(own["recipe.yaml"])["method"]["rounds"] == 2
    assert own["verdict.txt"] == verdict(run.rows, "cobo")


def test_mlflow_has_a_comparison_as_one_run_with_children(offline: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking")
    settings = {"method": {"name": "fedavg", "rounds": 1}, "track": ["mlflow"]}
    for seeds, resume in ((1, False), (2, True)):  # what is added goes under the same run
        coterie.compare(
            ["local", "fedavg"],
            "cobo-digits",
            seeds=seeds,
            out=tmp_path / "table",
            resume=resume,
            **settings,
        )
    runs = dict(mlflow_rows(offline, "select run_uuid, name from runs where status = 'FINISHED'"))
    query = "select run_uuid, value from tags where key = 'mlflow.parentRunId'"
    parents = dict(mlflow_rows(offline, query))
    (table,) = set(parents.values())
    assert runs[table] == "table"
    assert sorted(runs[child] for child in parents) == [
        f"{method}/seed-{seed}" for method in ("fedavg", "local") for seed in (0, 1)
    ]
    assert len(runs) == 5
    kept = artifacts(offline, "table")
    table_rows = Comparison.from_json(json.loads(kept["comparison.json"])).rows
    assert [len(row.per_seed) for row in table_rows] == [2, 2]
    assert kept["verdict.txt"] == verdict(table_rows, "fedavg")
    assert artifacts(offline, "local/seed-1").keys() == {"result.json", "recipe.yaml"}


def test_artifacts_that_cannot_be_kept_lose_no_figures(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tracking.MlflowClient, "log_dict", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        coterie.run("cobo-digits", out=tmp_path / "mine", track=["mlflow"], **SHORT)
    names = mlflow_rows(offline, "select name, status from runs order by start_time")
    assert names == [("local", "FINISHED"), ("cobo", "FINISHED")]


@pytest.mark.parametrize("name", list(MODULES))
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", "cobo-digits", "--out", str(out), "--track", name])
    assert done.exit_code == 2
    assert f"--track {name} needs {name}, which is not installed" in " ".join(done.stderr.split())
    assert f"[{name}]" in done.stderr
    assert not out.exists()


def test_a_tracker_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = CliRunner().invoke(app, ["run", "cobo-digits", "--out", out, "--track", "neptune"])
    assert done.exit_code == 2
    assert "wandb, mlflow." in done.stderr


def test_without_a_login_wandb_is_refused_and_not_asked_for(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(coterie.Refused, match="WANDB_MODE=offline"):
        coterie.run("cobo-digits", out=tmp_path / "run", track=["wandb"], **SHORT)
    assert not (tmp_path / "run").exists()
