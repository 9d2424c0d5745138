"""The programs on the pages about methods and about Python run as they are printed there."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import coterie as library
from coterie.cli.base import app
from coterie.core.files import load, read_json
from coterie.methods import METHODS, Method
from coterie.methods.fedavg import FedAvg
from coterie.testing import CHECKS, Run, check_method
from coterie.testing import run as worlds
from coterie.testing.run import require_same_run

DOCS = Path(__file__).parents[1] / "docs"


def programs(page: str) -> list[str]:
    """The programs that are printed on a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


PROGRAMS = programs("write-a-method.md")
*METHODS_OF_THE_PAGE, CHECK, BY_HAND = PROGRAMS
SMALL = ("method.rounds=2", "method.local_steps=2", "compare_with=[]", "samples=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's programs in `my_methods.py`."""
    made = tmp_path_factory.mktemp("page")
    (made / "my_methods.py").write_text("".join(METHODS_OF_THE_PAGE), encoding="utf-8")
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


def test_the_readme_has_the_same_fedavg_and_names_what_there_is() -> None:
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    use, method = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert method == PROGRAMS[0]
    for name in re.findall(r"coterie\.(\w+)\(", use):
        assert callable(getattr(library, name))
    assert lines(use) <= 15


def test_fedavg_of_the_page_keeps_the_contract() -> None:
    checked = check_method("my_methods:MyFedAvg")
    assert set(checked.left_out) == {
        "language, batch_is_as_one_by_one",
        "language, clients_come_and_go",
        "pictures, clients_come_and_go",
    }


def test_the_check_of_the_page_says_that_the_other_keeps_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exec(compile(CHECK, "the check", "exec"), {})
    assert "FairFedAvg keeps the contract" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedRep", "APFL"])
def test_personal_methods_of_the_page_keep_the_contract(name: str) -> None:
    checked = check_method(f"my_methods:{name}")
    assert "flower" in checked.engines
    assert "language, batch_is_as_one_by_one" in checked.left_out
    assert len(checked.held["language"]) == len(CHECKS) - 1


def test_fedrep_of_the_page_trains_its_head_and_then_its_body() -> None:
    run = Run(METHODS["my_methods:FedRep"].method(rounds=1, local_steps=3), worlds.language())
    assert run.rounds(1).client("ann").iteration == 5 + 3


def test_apfl_of_the_page_adapts_its_mixture_and_keeps_it() -> None:
    method = METHODS["my_methods:APFL"].method(rounds=2, local_steps=2, alpha_lr=1.0)
    run = Run(method, worlds.language())
    run.rounds(2)
    states = run.engine.states()
    weights = {i: float(state["apfl/alpha"]) for i, state in states.items()}
    assert all(0 <= alpha <= 1 and alpha != 0.5 for alpha in weights.values())
    assert len(set(weights.values())) == len(weights)
    assert any(
        not torch.equal(state["apfl/v"], run.client(i).flat()) for i, state in states.items()
    )


@pytest.mark.parametrize("world", [worlds.language, worlds.pictures])
def test_fedavg_of_the_page_is_the_shipped_one(world: Callable[[], worlds.World]) -> None:
    methods = method_of("MyFedAvg"), FedAvg(rounds=2, local_steps=2)
    require_same_run(*(Run(method, world()).rounds(2) for method in methods), "FedAvg")


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
    exec(compile("".join(METHODS_OF_THE_PAGE), "my_methods.py", "exec"), names)
    exec(compile(BY_HAND, "the last program", "exec"), names)
    assert names["ask"].to["ann"]["a"].shape == (2,)  # type: ignore[attr-defined]


def test_the_page_about_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text("\n".join(programs("python.md")), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("page")  # a module: a method is found by its module and class
    said = capsys.readouterr().out
    assert "fedavg: about" in said
    assert [row.method for row in page.table.rows] == ["page:MyFedAvg", "local"]
