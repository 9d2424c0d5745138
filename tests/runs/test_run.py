"""The command line as a person uses it: real processes on a real (tiny) base and real folders of
text.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from coterie import personal
from coterie.cli.base import app
from coterie.core.files import load
from coterie.models.backbone import Backbone

WORDS = {
    "ann": "the cat sat on a warm mat and slept while the dog looked for its bone in the garden",
    "ben": "add two numbers then divide by three to find the mean value of this small list",
    "cleo": "sail north until the wind turns and drop the anchor near the old stone harbour wall",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of three clients, with forty short documents each."""
    root = tmp_path_factory.mktemp("texts")
    for name, words in WORDS.items():
        rng = random.Random(name)
        (root / name).mkdir()
        for k in range(40):
            (root / name / f"{k:02d}.txt").write_text(
                " ".join(rng.choices(words.split(), k=12)) + ".\n"
            )
    return root


@pytest.fixture(scope="module")
def options(texts: Path, tiny_base: Path) -> list[str]:
    settings = {
        "data.path": texts,
        "model.base": tiny_base,
        "model.context": 16,
        "training.batch_size": 4,
        "method.name": "comigs-1g1s",
        "method.rounds": 4,
        "method.local_steps": 2,
        "method.router_every": 2,
        "method.router_steps": 1,
        "evaluate_every": 2,
        "patience": "null",
        "compare_with": "[pretrained,local,fedavg]",  # each trained by itself
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def coterie(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coterie", *words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def here(*words: str, cwd: Path) -> Result:
    """The same in this process, which has everything imported."""
    before = Path.cwd()
    os.chdir(cwd)
    try:
        return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(words))
    finally:
        os.chdir(before)


def numbers(result: dict) -> dict:
    return {
        key: value
        for key, value in result.items()
        if key not in ("wall_s", "peak_memory_bytes", "versions", "machine")
    }


def personal_tensors(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {
        folder.name: load(folder / "adapter.safetensors")[0]
        for folder in sorted((out / "clients").iterdir())
    }


@pytest.fixture(scope="module")
def finished(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = coterie("run", "folders", *options, "--seed", "3", "--out", str(out), cwd=out.parent)
    assert done.returncode == 0, done.stderr
    return out


def test_the_run_folder(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert result["method"] == "comigs-1g1s"
    assert result["recipe"] == "folders"
    assert (result["seed"], result["rounds"]) == (3, 4)
    assert result["metric"] == {
        "name": "test perplexity",
        "unit": "per token",
        "lower_is_better": True,
    }
    assert set(result["clients"]) == set(WORDS)
    assert result["mean"] == pytest.approx(sum(c["test"] for c in result["clients"].values()) / 3)
    client = result["clients"]["ann"]
    assert {
        "test",
        "test_synced",
        "valid",
        "trainable_parameters",
        "bytes_up",
        "bytes_down",
    } <= client.keys()
    for name in ("recipe.yaml", "metrics.jsonl", "report.html", "checkpoints", "tensorboard"):
        assert (finished / name).exists(), name
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "train" for line in lines) == 4 * 3
    assert {line["round"] for line in lines if line["kind"] == "score"} == {
        0,
        2,
        4,
    }  # that before the first round too
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == [
        "round-00003",
        "round-00004",
    ]
    assert list((finished / "tensorboard").glob("events*"))
    assert (
        not list(finished.rglob("*.pkl"))
        + list(finished.rglob("*.pt"))
        + list(finished.rglob("*.new"))
    )


def test_bytes_are_those_of_the_generalists_each_way(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    for i, tensors in personal_tensors(finished).items():
        local = sum(
            t.numel() for name, t in tensors.items() if "specialist" in name or "router" in name
        )
        everything = sum(t.numel() for t in tensors.values())
        assert result["clients"][i]["trainable_parameters"] == everything
        assert (
            result["clients"][i]["bytes_up"]
            == result["clients"][i]["bytes_down"]
            == 4 * 4 * (everything - local)
        )


def test_baselines_are_beside_it(finished: Path) -> None:
    for name in ("pretrained", "local", "fedavg"):
        result = json.loads((finished / "baselines" / name / "result.json").read_text())
        assert result["method"] == name
    fedavg = json.loads((finished / "baselines/fedavg/result.json").read_text())["clients"]["ann"]
    router = personal_tensors(finished)["ann"]
    routers = sum(t.numel() for name, t in router.items() if "router" in name)
    ours = json.loads((finished / "result.json").read_text())["clients"]["ann"]
    assert (
        ours["trainable_parameters"] - routers == fedavg["trainable_parameters"]
    )  # equal budgets, but for the router


def test_a_personal_model_gives_the_perplexity_of_the_table(
    finished: Path, tiny_base: Path, options: list[str]
) -> None:
    from coterie.core.metrics import perplexity
    from coterie.runs.problems.prepare import prepare
    from coterie.runs.recipes.recipe import resolve

    result = json.loads((finished / "result.json").read_text())
    site = prepare(resolve(finished)).site
    for i in WORDS:
        model = personal.load(finished, i)
        nll = model.score(site.data[i].test.scoring(8))
        assert perplexity(torch.tensor(nll)) == pytest.approx(
            result["clients"][i]["test"], rel=1e-6
        )


def test_a_damaged_personal_model_is_refused(
    finished: Path, tmp_path: Path, tiny_base: Path
) -> None:
    import shutil

    from coterie.core.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"no client 'dan'\n  Its clients: ann, ben, cleo"):
        personal.load(finished, "dan")
    copy = tmp_path / "clients" / "ann"
    shutil.copytree(finished / "clients/ann", copy)
    weights = copy / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors is damaged"):
        personal.load(tmp_path, "ann", backbone=Backbone.load(tiny_base))


@pytest.mark.parametrize(
    "moment",
    [pytest.param(0.15, marks=pytest.mark.slow), 0.5, pytest.param(0.85, marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_and_resumed_it_ends_the_same(
    moment: float, finished: Path, options: list[str], tmp_path: Path
) -> None:
    """Kill -9 a real run at several moments, as soon as metrics of a given share of all rounds
    are on disk; resume; compare bit for bit.
    """
    out = tmp_path / "killed"
    words = ["run", "folders", *options, "--seed", "3", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    written = [
        out / folder / "metrics.jsonl" for folder in ("baselines/local", "baselines/fedavg", ".")
    ]
    rounds = len(written) * 4
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        lines = sum(
            path.read_bytes().count(b'"kind": "train"') for path in written if path.exists()
        )
        if lines >= moment * rounds * len(WORDS):
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (out / "result.json").exists()
    resumed = coterie(*words, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    for name in (".", "baselines/local", "baselines/fedavg"):
        a, b = (
            json.loads((folder / name / "result.json").read_text()) for folder in (finished, out)
        )
        assert numbers(a) == numbers(b)
        mine, theirs = personal_tensors(finished / name), personal_tensors(out / name)
        assert all(torch.equal(mine[i][t], theirs[i][t]) for i in mine for t in mine[i])
        assert (finished / name / "metrics.jsonl").read_bytes() == (
            out / name / "metrics.jsonl"
        ).read_bytes()


def test_terminated_it_says_how_to_go_on(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "coterie",
            "run",
            "folders",
            *options,
            "--set",
            "method.rounds=500",
            "--out",
            str(out),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while (
        not (out / "baselines/local/checkpoints/round-00002").exists()
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "--resume" in error
    assert "Traceback" not in error


def test_the_engine_changes_no_number(finished: Path, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "loopback"
    sets = ("--set", "engine=loopback", "--set", "compare_with=[]")
    done = here("run", "folders", *options, *sets, "--seed", "3", "--out", str(out), cwd=tmp_path)
    assert done.exit_code == 0, done.output
    a, b = (json.loads((folder / "result.json").read_text()) for folder in (finished, out))
    assert numbers(a) == numbers(b)


def test_compare_writes_one_table(options: list[str], tmp_path: Path, finished: Path) -> None:
    out = tmp_path / "table"
    words = [
        "compare",
        "pretrained",
        "local",
        "centralized",
        "comigs-1g1s",
        "--recipe",
        "folders",
        *options,
        "--seed",
        "3",
        "--seeds",
        "2",
    ]
    done = here(*words, "--out", str(out), cwd=tmp_path)
    assert done.exit_code == 0, done.output
    comparison = json.loads((out / "comparison.json").read_text())
    rows = {row["method"]: row for row in comparison["rows"]}
    assert list(rows) == ["pretrained", "local", "centralized", "comigs-1g1s"]
    assert comparison["seeds"] == [3, 4]
    assert (
        rows["comigs-1g1s"]["per_seed"][0]
        == json.loads((finished / "result.json").read_text())["mean"]
    )
    assert rows["pretrained"]["std"] == 0
    assert rows["local"]["bytes_up_per_round"] == rows["centralized"]["bytes_up_per_round"] == 0
    assert rows["local"]["mean"] < rows["pretrained"]["mean"]
    for title in ("Pretrained", "Local", "Centralized", "CoMiGS-1G1S"):
        assert title in done.stdout
    lines = re.findall(r"^\[(\d)/8\] (.*?):", done.stdout, re.MULTILINE)
    titles = [
        f"{title}, seed {seed}"
        for title in ("Pretrained", "Local", "Centralized", "CoMiGS-1G1S")
        for seed in (3, 4)
    ]
    assert lines == [(str(k + 1), title) for k, title in enumerate(titles)]


def test_progress_is_plain_lines_without_a_terminal(options: list[str], tmp_path: Path) -> None:
    sets = ("--set", "compare_with=[]")
    done = here("run", "folders", *options, *sets, "--out", str(tmp_path / "o"), cwd=tmp_path)
    assert "round 4/4" in done.stdout
    assert "tokens/s" in done.stdout
    assert "\x1b[" not in done.stdout


def refused(words: list[str], cwd: Path) -> str:
    """What a command that must be refused says on stderr."""
    done = here(*words, cwd=cwd)
    assert done.exit_code == 2, done.output
    return done.stderr


def test_a_refusal_is_one_message_on_stderr(tmp_path: Path) -> None:
    done = coterie("run", "quikstart", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("coterie: recipe 'quikstart'")
    assert "Traceback" not in done.stderr


def test_all_mistakes_of_a_recipe_at_once_with_exit_code_2(tmp_path: Path) -> None:
    sets = [
        "method.rounds=-1",
        "method.locl_steps=3",
        "model.rank=0",
        "training.experts.lr=x",
        "colour=blue",
        "data.kind=stdlib",
    ]
    message = refused(
        ["run", "quickstart", *(w for s in sets for w in ("--set", s)), "--out", "o"], tmp_path
    )
    for expected in (
        "method.rounds: input should be greater than or equal to 0, found -1",
        "method.locl_steps: unknown key, did you mean local_steps?",
        "model.rank: input should be greater than or equal to 1",
        "training.experts.lr",
        "colour: unknown key",
    ):
        assert expected in message, message
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "quikstart"], "no shipped recipe with that name"),
        (["run", "nothing.yaml"], "no such file"),
        (["run", __file__], "is neither a recipe nor a table that is read"),
        (["run", "quickstart", "--set", "method.rounds"], "key=value"),
        (["run", "quickstart", "--set", "method.name=comig"], "did you mean comigs"),
        (["run", "quickstart", "--set", "method.specialists=3"], "fixes it to 1"),
        (
            ["run", "quickstart", "--set", "method={name: comigs, specialists: [1, 2]}"],
            "method.specialists: 2 values for 4 clients",
        ),
        (
            ["run", "quickstart", "--set", "method={name: comigs, generalists: 0, specialists: 0}"],
            "at least 1",
        ),
        (["run", "quickstart", "--set", "model.base=/nowhere/at/all"], "no model folder"),
        (["run", "quickstart", "--set", "model.context=100000"], "model.context"),
        (["run", "quickstart", "--set", "model.device=gpu"], "model.device"),
        (["run", "folders", "--set", "data.path=/nowhere"], "/nowhere"),
        (["compare", "local", "fedavgg", "--recipe", "quickstart"], "did you mean fedavg"),
        (["run", "quickstart", "--seed", "-1"], "--seed"),
        (["run", "quickstart", "--resume"], "no run of quickstart"),
        (["run", "quickstart", "--out", "/proc/none"], "cannot make the folder /proc/none"),
        (
            [
                "compare",
                "hetlora",
                "--recipe",
                "quickstart",
                "--set",
                "method={name: hetlora, ranks: [1, 2]}",
            ],
            "method.ranks: 2 values for 4",
        ),
        (["reproduce", "comigs/table9"], "no such table, figure or theorem"),
        (["reproduce", "comigs/table2", "--scale", "huge"], "small, smollm2, paper"),
        (["reproduce", "comigs/theorem-2.1", "--seeds", "2"], "is a theorem"),
    ],
)
def test_wrong_input_is_refused_before_any_work(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    assert expected in refused(words, tmp_path)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_short_and_empty_data_is_refused(texts: Path, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "few" / "ann").mkdir(parents=True)
    (tmp_path / "few" / "ann" / "a.txt").write_text("only this.")
    (tmp_path / "few" / "ben").mkdir()
    message = refused(
        ["run", "folders", *options, "--set", f"data.path={tmp_path / 'few'}"], tmp_path
    )
    assert "ben" in message


def test_a_folder_that_holds_a_run_is_not_overwritten(finished: Path, options: list[str]) -> None:
    before = (finished / "result.json").read_bytes()
    assert "--resume" in refused(
        ["run", "folders", *options, "--out", str(finished)], finished.parent
    )
    assert (finished / "result.json").read_bytes() == before


def test_a_checkpoint_of_another_recipe_is_refused(finished: Path, options: list[str]) -> None:
    words = [
        "run",
        "folders",
        *options,
        "--seed",
        "3",
        "--set",
        "model.rank=4",
        "--out",
        str(finished),
        "--resume",
    ]
    message = refused(words, finished.parent)
    assert "model.rank was 8, now 4" in message


def test_a_truncated_checkpoint_is_refused(
    finished: Path, options: list[str], tmp_path: Path
) -> None:
    import shutil

    out = tmp_path / "cut"
    shutil.copytree(finished, out)
    (out / "result.json").unlink()
    (state,) = (out / "checkpoints/round-00004/clients").iterdir()
    state.write_bytes(state.read_bytes()[:50])
    words = ["run", "folders", *options, "--seed", "3", "--out", str(out), "--resume"]
    assert "Delete" in refused(words, tmp_path)
    shutil.rmtree(out / "checkpoints/round-00004")  # what the message says
    assert here(*words, cwd=tmp_path).exit_code == 0
    a, b = (json.loads((folder / "result.json").read_text()) for folder in (finished, out))
    assert numbers(a) == numbers(b)


def test_what_there_is_is_listed(tmp_path: Path) -> None:
    methods, shipped = coterie("methods", cwd=tmp_path), coterie("recipes", cwd=tmp_path)
    assert "comigs-1g1s" in methods.stdout
    assert "quickstart" in shipped.stdout
    assert coterie("--version", cwd=tmp_path).stdout.startswith("coterie ")


def test_help_explains_arguments_and_options() -> None:
    shown = " ".join(
        CliRunner()
        .invoke(app, ["run", "--help"], terminal_width=120)
        .output.replace("│", " ")
        .split()
    )
    assert "A shipped recipe" in shown
    assert "Change a field of the recipe" in shown
    assert "\\[" not in shown


def test_reproduce_without_a_name_lists_what_there_is() -> None:
    shown = CliRunner().invoke(app, ["reproduce"]).output
    assert "comigs/table2" in shown
    assert "homogeneous models" in shown
    assert "comigs/theorem-g.2" in shown
