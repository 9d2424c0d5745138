"""From Python: runs and comparisons with types, recipes built in code, and callbacks."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.callback import Callback
from coterie.core.result import Result
from coterie.methods.fedavg import FedAvg
from coterie.runs.recipes.recipe import load

SHORT = {"method": {"name": "cobo", "rounds": 3}, "compare_with": [], "checkpoint_every": 1}
DIGITS = {
    "data": {"kind": "digits", "partition": "permuted-clusters", "clusters": 2, "per_client": 40},
    "model": {"kind": "classifier", "network": "mlp", "hidden": [8]},
    "method": {"name": "fedavg", "rounds": 2, "local_steps": 1},
}
EVENTS = [name for name in vars(Callback) if not name.startswith("_") and name != "shows_estimate"]


def figures(folder: Path) -> dict[str, Any]:
    """What is in result.json and depends neither on the clock nor on the machine."""
    found = json.loads((folder / "result.json").read_text())
    timed = ("wall_s", "peak_memory_bytes", "versions", "machine")
    return {name: value for name, value in found.items() if name not in timed}


class Notes(coterie.Callback):
    """Writes down everything."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[Any, ...]]] = []

    def names(self) -> list[str]:
        return [event for event, _ in self.heard]


def _noting(event: str) -> Callable[..., None]:
    return lambda self, *told, **named: self.heard.append((event, told))


for _event in EVENTS:
    setattr(Notes, _event, _noting(_event))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> coterie.Run:
    return coterie.run("cobo-digits", out=tmp_path_factory.mktemp("api") / "run", **SHORT)


@pytest.fixture(scope="module")
def by_message(tmp_path_factory: pytest.TempPathFactory) -> coterie.Run:
    """The same, one client at a time."""
    return coterie.run(
        "cobo-digits", out=tmp_path_factory.mktemp("api") / "run", engine="loopback", **SHORT
    )


# Results


def test_a_result_is_what_is_in_the_file(undisturbed: coterie.Run) -> None:
    text = (undisturbed.folder / "result.json").read_text()
    said = json.loads(text)
    assert json.dumps(undisturbed.result.to_json(), indent=2, ensure_ascii=False) + "\n" == text
    assert undisturbed.result.mean == said["mean"]
    assert undisturbed.result.clients["c1-0"].bytes_up == said["clients"]["c1-0"]["bytes_up"] > 0
    assert undisturbed.recipe.method["rounds"] == 3
    assert "test accuracy" in repr(undisturbed.result)


def test_a_result_of_clients_that_never_train_keeps_their_groups_and_experts(
    tmp_path: Path,
) -> None:
    run = coterie.run(
        "ddome-digits", out=tmp_path, method={"name": "ddome", "rounds": 2}, compare_with=[]
    )
    assert run.result.to_json() == json.loads((tmp_path / "result.json").read_text())
    client = next(iter(run.result.clients.values()))
    assert run.result.groups
    assert client.group in run.result.groups
    assert client.experts


def test_a_result_without_its_mean_is_refused() -> None:
    with pytest.raises(coterie.Refused, match=r"not a valid Result: it has no .*mean"):
        Result.from_json({"method": "fedavg"})


def test_a_comparison_is_what_is_in_the_file_and_the_same_on_the_command_line(
    tmp_path: Path,
) -> None:
    settings = {"method": {"name": "fedavg", "rounds": 1}}
    table = coterie.compare(
        ["local", "fedavg"], "cobo-digits", seeds=2, out=tmp_path / "a", **settings
    )
    assert table.to_json() == json.loads((tmp_path / "a/comparison.json").read_text())
    words = ["compare", "local", "fedavg", "--recipe", "cobo-digits", "--seeds", "2"]
    words += [
        "--out",
        str(tmp_path / "b"),
        "--set",
        "method.name=fedavg",
        "--set",
        "method.rounds=1",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "FedAvg" in done.stdout
    other = json.loads((tmp_path / "b/comparison.json").read_text())
    assert [row.per_seed for row in table.rows] == [row["per_seed"] for row in other["rows"]]
    with pytest.raises(KeyError):
        table["ditto"]


def test_the_command_line_computes_the_same(undisturbed: coterie.Run, tmp_path: Path) -> None:
    words = ["run", "cobo-digits", "--out", str(tmp_path), "--set", "method.rounds=3"]
    words += ["--set", "compare_with=[]", "--set", "checkpoint_every=1"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert figures(tmp_path) == figures(undisturbed.folder)


# Recipes


def test_a_recipe_in_code_is_the_one_in_yaml(tmp_path: Path) -> None:
    recipe = coterie.Recipe(name="mine", **DIGITS)
    (tmp_path / "mine.yaml").write_text(json.dumps(DIGITS))
    assert (
        recipe == coterie.Recipe.load(tmp_path / "mine.yaml") == load(str(tmp_path / "mine.yaml"))
    )
    run = coterie.run(recipe, out=tmp_path / "run", seed=4)
    assert coterie.Recipe.load(run.folder) == run.recipe == recipe.with_changes(seed=4)


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"method": {"name": "fedavg", "rounds": 0, "stpes": 1}}, "method.stpes: unknown key"),
        ({"self": 1}, "self: unknown key"),
        ({"data": {"kind": "digits", "clusters": float("nan")}}, "data.clusters: must be a finite"),
        ({"training": 3}, "training: input should be"),
    ],
)
def test_mistakes_in_code_are_named_as_in_yaml(changes: dict[str, Any], mistake: str) -> None:
    with pytest.raises(coterie.Refused, match=mistake):
        coterie.Recipe(name="mine", **DIGITS | changes)


class OwnFedAvg(FedAvg):
    """A method that is given as a class."""


def test_a_method_is_given_by_its_class_or_its_name(tmp_path: Path) -> None:
    name = f"{__name__}:OwnFedAvg"
    recipe = coterie.Recipe(
        name="own",
        **DIGITS | {"method": {"name": OwnFedAvg, "rounds": 1}, "compare_with": [FedAvg]},
    )
    assert recipe.method["name"] == name
    assert recipe.compare_with == ("coterie.methods.fedavg:FedAvg",)
    assert coterie.Recipe.load("cobo-digits", method=OwnFedAvg).method["name"] == name
    short = {"method": {"name": OwnFedAvg, "rounds": 1}, "compare_with": []}
    assert coterie.run("cobo-digits", out=tmp_path / "run", **short).result.method == name
    table = coterie.compare(
        [OwnFedAvg, "fedavg"], "cobo-digits", seeds=1, out=tmp_path / "table", **short
    )
    assert table[name].mean == table["fedavg"].mean


def test_changes_are_those_of_set() -> None:
    recipe = coterie.Recipe.load(
        "cobo-digits", method={"rounds": 3}, training={"experts": {"lr": 0.1}}, seed=2
    )
    assert recipe == load("cobo-digits", ["method.rounds=3", "training.experts.lr=0.1", "seed=2"])
    assert coterie.Recipe.load("cobo-digits", method="fedavg") == load(
        "cobo-digits", ["method.name=fedavg"]
    )
    with pytest.raises(coterie.Refused, match=r"method\.roundz: unknown key, did you mean rounds"):
        recipe.with_changes(method={"roundz": 1})


def test_a_shipped_name_is_not_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/recipe.yaml").write_text("damaged")
    assert coterie.Recipe.load("quickstart").name == "quickstart"


# Callbacks


def test_several_callbacks_hear_of_rounds_metrics_and_checkpoints(tmp_path: Path) -> None:
    first, second = Notes(), Notes()
    run = coterie.run("cobo-digits", out=tmp_path, callbacks=[first, second], **SHORT)
    assert first.names() == second.names()
    assert first.names().count("round") == first.names().count("checkpoint") == 3
    told = dict(first.heard)
    assert told["checkpoint"] == (3, tmp_path / "checkpoints/round-00003")
    assert (tmp_path / "checkpoints/round-00003/checkpoint.json").exists()
    assert told["evaluated"][1]["test"] == run.result.mean
    assert told["client"][2]["tokens"] > 0
    assert told["end"] == (run.result,)
    assert {"preparing", "begin", "client", "evaluated", "end"} <= set(first.names())


@pytest.mark.parametrize(
    "event", ["preparing", "begin", "asking", "client", "evaluated", "round", "checkpoint", "end"]
)
@pytest.mark.parametrize("engine", ["inprocess", "loopback"])
def test_a_callback_that_raises_stops_the_run_by_its_name_and_it_can_be_resumed(
    event: str, engine: str, undisturbed: coterie.Run, by_message: coterie.Run, tmp_path: Path
) -> None:
    def fail(self: Any, *told: Any) -> None:
        raise ZeroDivisionError("in its own code")

    broken = type("Broken", (coterie.Callback,), {event: fail})()
    heard = Notes()
    with pytest.raises(
        coterie.CallbackError, match=f"Broken raised ZeroDivisionError in `{event}`"
    ) as raised:
        coterie.run(
            "cobo-digits", out=tmp_path / "run", engine=engine, callbacks=[broken, heard], **SHORT
        )
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert not [
        told for what, told in heard.heard if what == "warning"
    ]  # nor is a client blamed for it
    begun = event != "preparing"
    run = coterie.run("cobo-digits", out=tmp_path / "run", engine=engine, resume=begun, **SHORT)
    whole = undisturbed if engine == "inprocess" else by_message
    assert figures(run.folder) == figures(whole.folder)


@pytest.mark.parametrize("engine", ["inprocess", "loopback"])
def test_no_exchange_has_more_answers_than_clients_asked(engine: str, tmp_path: Path) -> None:
    heard = Notes()
    coterie.run("cobo-digits", out=tmp_path / "run", engine=engine, callbacks=[heard], **SHORT)
    asked = answers = 0
    for event, told in heard.heard:
        if event == "asking":
            asked, answers = told[1], 0
        answers += event in ("client", "answered")
        assert answers <= asked
    assert asked


class Meddler(coterie.Callback):
    """Changes whatever it is given, and draws random numbers."""


def _meddle(self: Any, *told: Any, **named: Any) -> None:
    torch.rand(3), np.random.rand(3), random.random()
    for given in (*told, *named.values()):
        for found in (given, getattr(given, "clients", None), getattr(given, "evaluations", None)):
            if isinstance(found, dict | list):
                found.clear()


for _event in EVENTS:
    setattr(Meddler, _event, _meddle)


def test_a_callback_that_meddles_changes_no_figure(
    undisturbed: coterie.Run, tmp_path: Path
) -> None:
    heard = Notes()
    coterie.run("cobo-digits", out=tmp_path, callbacks=[Meddler(), heard], **SHORT)
    assert figures(tmp_path) == figures(undisturbed.folder)
    assert dict(heard.heard)["end"][0].clients  # nor what others hear
    lines = [(folder / "metrics.jsonl").read_text() for folder in (tmp_path, undisturbed.folder)]
    kept = [[json.loads(line) for line in text.splitlines()] for text in lines]
    assert [{k: v for k, v in line.items() if k != "time"} for line in kept[0]] == [
        {k: v for k, v in line.items() if k != "time"} for line in kept[1]
    ]


def test_progress_is_shown_only_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coterie.run("cobo-digits", out=tmp_path / "quiet", **SHORT)
    assert capsys.readouterr().out == ""
    coterie.run("cobo-digits", out=tmp_path / "shown", progress=True, callbacks=[Notes()], **SHORT)
    assert "CoBo" in capsys.readouterr().out
