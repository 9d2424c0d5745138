"""How many threads compute: the cores, which clients at once share; a run keeps its number."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from figures import as_json

from coterie.core import threads
from coterie.core.callback import Callback
from coterie.core.protocol import Ask, Replies
from coterie.engines.inprocess import InProcess
from coterie.runs import backends
from coterie.runs import run as runs
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

SHORT = (
    "method.name=comigs-1g1s",
    *("method.rounds=3", "method.local_steps=2", "method.router_every=2", "method.router_steps=1"),
    *("model.context=16", "training.batch_size=4", "compare_with=[]"),
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Recipe:
    """Products so small that a second thread does nothing: it is the numbers that these tests
    are about.
    """
    root = tmp_path_factory.mktemp("texts")
    for name in ("ann", "ben"):
        (root / name).mkdir()
        for k in range(40):
            (root / name / f"{k:02d}.txt").write_text(
                f"{name} writes line {k} of a text that is not long. " * 3
            )
    return recipes.load("folders", [*SHORT, f"data.path={root}", f"model.base={tiny_base}"])


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has two threads, and whose number nobody has chosen."""
    for name in threads.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def choosing(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have runs choose a number of threads; count how often they choose."""
    made: list[int] = []

    def choice(prepared: Prepared) -> int:
        made.append(number)
        return number

    monkeypatch.setattr(backends, "choose_threads", choice)
    monkeypatch.setattr(backends, "clients_at_once", lambda prepared: 1)
    return made


class Stop(Exception):
    pass


class Stopping(Callback):
    """Stops a run behind a round."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.seen = after, set[int]()

    def round(self, done: int) -> None:
        self.seen.add(torch.get_num_threads())
        if done == self.after:
            raise Stop


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.usefixtures("several")
def test_a_run_that_goes_on_keeps_its_threads(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, first, second = choosing(monkeypatch, 2), Stopping(after=2), Stopping()
    runs.run(recipe, tmp_path / "whole")
    with pytest.raises(Stop):
        runs.run(recipe, tmp_path / "cut", reporter=first)
    assert made == [2, 2]
    made = choosing(monkeypatch, 1)  # a machine of one core
    runs.run(recipe, tmp_path / "cut", resume=True, reporter=second)
    assert made == []
    assert first.seen == second.seen == {2}
    ours, whole = result(tmp_path / "cut"), result(tmp_path / "whole")
    assert ours["machine"]["threads"] == 2
    assert ours["clients"] == whole["clients"]  # to the bit
    assert torch.get_num_threads() == 2  # it is the caller's own again


@pytest.mark.usefixtures("several")
def test_rows_of_a_command_compute_alike(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = choosing(monkeypatch, 1)
    found = as_json(
        runs.run(
            recipe.model_copy(update={"compare_with": ("pretrained", "local")}),
            tmp_path,
        )
    )
    assert made == [1]
    assert [row["machine"]["threads"] for row in found] == [1, 1, 1]


@pytest.mark.usefixtures("several")
def test_whoever_says_a_number_has_it(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = recipe.model_copy(update={"threads": 1})
    assert as_json(runs.run(fixed, tmp_path / "recipe"))[-1]["machine"]["threads"] == 1
    prepared = backends.LocalBackend().prepare(recipe)
    monkeypatch.setattr(backends, "clients_at_once", lambda prepared: 2)
    assert backends.choose_threads(prepared) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert backends.choose_threads(prepared) == 2


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(("number", "said"), [(None, (2, 1)), (1, (2, 1)), (2, (1, 2))])
def test_cores_are_for_several_clients_at_once(
    number: int | None,
    said: tuple[int, int],
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = set[tuple[int, int]]()
    own = InProcess.answer

    def answer(self: InProcess, ask: Ask, round: int, phase: int) -> Replies:
        made.add((self.at_once, torch.get_num_threads()))
        return own(self, ask, round, phase)

    monkeypatch.setattr(InProcess, "answer", answer)
    monkeypatch.setattr(backends, "STEP_S", 0.0)  # a step of this model is short
    runs.run(recipe.model_copy(update={"threads": number}), tmp_path)
    assert made == {said}


@pytest.mark.usefixtures("several")
def test_clients_compute_one_by_one_in_short_steps_without_memory_or_with_dropout(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = backends.LocalBackend().prepare(recipe)
    monkeypatch.setattr(backends, "STEP_S", 60.0)  # what a step takes depends on the machine
    assert backends.clients_at_once(prepared) == 1
    monkeypatch.setattr(backends, "STEP_S", 0.0)
    prepared = backends.LocalBackend().prepare(recipe)  # of a base it is measured once
    assert backends.clients_at_once(prepared) == 2
    random = recipes.changed(recipe, {"model.dropout": 0.1})
    assert backends.clients_at_once(backends.LocalBackend().prepare(random)) == 1
    monkeypatch.setattr(backends, "free_memory", lambda: 0)
    assert backends.clients_at_once(prepared) == 1


def test_the_command_line_has_threads_sleep_soon_unless_the_environment_says_how_they_wait() -> (
    None
):
    def spins(**given: str) -> str:
        code = "import os, sys; from coterie.cli import base; "
        code += "base.app = lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
        environment = {k: v for k, v in os.environ.items() if k not in threads._WAITING} | given
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; base.main()"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.strip()

    assert spins() == "1000 False"  # PyTorch's runtime reads it when it is loaded
    assert spins(GOMP_SPINCOUNT="5") == "5 False"
    assert spins(OMP_WAIT_POLICY="ACTIVE") == "None False"
