"""The programs on the page about methods run as they are printed there."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conformance import test_forms
from conformance import test_methods as conformance
from conformance.test_forms import exchanges
from conformance.test_methods import World, assert_same_run, classifiers, language, pictures
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.core.files import load, read_json
from coterie.data.federation import Federation
from coterie.methods import METHODS, Method
from coterie.methods.fedavg import FedAvg
from coterie.models.classifier import Classifier

PAGE = Path(__file__).parents[1] / "docs/write-a-method.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
FIXTURES = (language, pictures)  # of the worlds below, by their names
NAMES = ("MyFedAvg", "FairFedAvg")
SMALL = ("method.rounds=2", "method.local_steps=2", "compare_with=[]", "samples=false")
TAKEN = {"method", "world", "tmp_path"}


def checks() -> list[str]:
    """The names of the conformance suite's checks of a method in a world."""
    found = {name: check for name, check in vars(conformance).items() if name.startswith("test_")}
    return [
        name
        for name, check in found.items()
        if {"method", "world"} <= set(inspect.signature(check).parameters) <= TAKEN
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's programs in `my_methods.py`."""
    made = tmp_path_factory.mktemp("page")
    (made / "my_methods.py").write_text("".join(PROGRAMS[:2]), encoding="utf-8")
    return made


@pytest.fixture(autouse=True)
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


def method_of(name: str, rounds: int = 2) -> Method:
    return METHODS[f"my_methods:{name}"].method(rounds=rounds, local_steps=2)


def lines(program: str) -> int:
    return sum(bool(line.strip()) for line in program.splitlines())


def test_fedavg_is_about_thirty_lines() -> None:
    assert lines(PROGRAMS[0]) <= 32


@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["language", "pictures"])
def test_the_programs_pass_the_conformance_suite(
    kind: str, name: str, check: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    function: Callable[..., None] = getattr(conformance, check)
    given = {
        "method": method_of(name),
        "world": request.getfixturevalue(kind),
        "tmp_path": tmp_path,
    }
    function(**{wanted: given[wanted] for wanted in inspect.signature(function).parameters})


@pytest.mark.parametrize("name", NAMES)
def test_replies_have_the_form_and_the_meaning_that_the_programs_declare(
    name: str, pictures: World
) -> None:
    found = exchanges(method_of(name), pictures)
    test_forms.test_every_reply_has_the_form_that_was_asked_for(found)
    test_forms.test_a_task_is_training_where_a_model_comes_and_goes_back_changed(found)


@pytest.mark.parametrize("name", NAMES)
def test_many_clients_at_once_are_as_one_by_one(tiny_pictures: Federation, name: str) -> None:
    kinds = (Classifier, conformance.OneByOne)
    one, other = (
        conformance.Run(method_of(name), classifiers(kind, tiny_pictures)).rounds(2)
        for kind in kinds
    )
    torch.testing.assert_close(one.server, other.server, rtol=1e-4, atol=1e-5)


def test_fedavg_of_the_page_is_the_shipped_one(language: World, pictures: World) -> None:
    for world in (language, pictures):
        methods = method_of("MyFedAvg"), FedAvg(rounds=2, local_steps=2)
        assert_same_run(*(conformance.Run(method, world).rounds(2) for method in methods))


def coterie(recipe: str, folder: Path, name: str, *settings: str) -> Path:
    """Run a recipe with a method by the command line; returns the run's folder."""
    out = folder / re.sub(r"\W", "-", f"{recipe}-{name}")
    words = [
        word
        for setting in (f"method.name={name}", *SMALL, *settings)
        for word in ("--set", setting)
    ]
    done = CliRunner().invoke(app, ["run", recipe, *words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_a_run_of_fedavg_of_the_page_is_one_of_the_shipped_one(
    folder: Path, tiny_base: Path
) -> None:
    settings = (f"model.base={tiny_base}", "model.context=16")
    ours, theirs = (
        coterie("quickstart", folder, name, *settings) for name in ("my_methods:MyFedAvg", "fedavg")
    )
    figures = [read_json(run / "result.json") for run in (ours, theirs)]
    assert figures[0]["mean"] == figures[1]["mean"]
    assert {i: own["test"] for i, own in figures[0]["clients"].items()} == {
        i: own["test"] for i, own in figures[1]["clients"].items()
    }
    states = [load(run / "checkpoints/round-00002/server.safetensors")[0] for run in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_the_page_s_comparison_shows_two_equal_rows(folder: Path) -> None:
    words = [
        "compare",
        "fedavg",
        "my_methods:MyFedAvg",
        "--recipe",
        "cobo-digits",
        "--seeds",
        "1",
        "--out",
        "compared",
    ]
    words += [word for setting in SMALL for word in ("--set", setting)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = {
        row["method"]: row["mean"] for row in read_json(folder / "compared/comparison.json")["rows"]
    }
    assert rows["fedavg"] == rows["my_methods:MyFedAvg"]
    assert "MyFedAvg" in done.output


def test_two_exchanges_in_a_round_weigh_clients_by_their_losses(folder: Path) -> None:
    plain = mean_of(coterie("cobo-digits", folder, "my_methods:MyFedAvg"))
    runs = [
        coterie("cobo-digits", folder / f"{q}", "my_methods:FairFedAvg", f"method.q={q}")
        for q in (0, 3)
    ]
    assert mean_of(runs[0]) == pytest.approx(plain, rel=1e-3)
    assert mean_of(runs[1]) != mean_of(runs[0])


def mean_of(run: Path) -> float:
    return float(read_json(run / "result.json")["mean"])


def test_clients_with_a_larger_loss_count_more() -> None:
    fair = METHODS["my_methods:FairFedAvg"].method(q=2.0)
    round = fair.round({"a": torch.zeros(1)}, ["ann", "ben", "cleo"], torch.Generator())
    assert next(round).name == "measure"
    ask = round.send(
        {
            i: {"loss": torch.tensor(loss, dtype=torch.float64)}
            for i, loss in (("ann", 1.0), ("ben", 3.0))
        }
    )
    assert list(ask.to) == ["ann", "ben"]  # cleo sent no loss
    with pytest.raises(StopIteration) as end:
        round.send({"ann": {"a": torch.tensor([0.0])}, "ben": {"a": torch.tensor([1.0])}})
    assert end.value.value["a"].item() == pytest.approx(9 / 10)


def test_a_method_is_tried_without_an_engine(folder: Path) -> None:
    names: dict[str, object] = {}
    exec(compile("".join(PROGRAMS[:2]), "my_methods.py", "exec"), names)
    exec(compile(PROGRAMS[2], "the third program", "exec"), names)
    assert names["ask"].to["ann"]["a"].shape == (2,)  # type: ignore[attr-defined]
