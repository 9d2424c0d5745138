"""How many threads compute: chosen by what they gain now, and kept by a run that goes on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from figures import as_json

from coterie.core import threads
from coterie.core.callback import Callback
from coterie.core.protocol import Ask, Replies
from coterie.core.threads import Watch, choose
from coterie.engines.inprocess import InProcess
from coterie.runs import backends
from coterie.runs import run as runs
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


class Simulated:
    """A machine whose clocks stand still but for what is computed."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        passes: dict[int, float],
        others: float = 0.0,
        share: float = 1.0,
    ) -> None:
        self.now = self.own = self.busy = 0.0
        self.passes, self.others, self.share, self.done = passes, others, share, list[int]()
        monkeypatch.setattr("coterie.core.threads.time.monotonic", lambda: self.now)
        monkeypatch.setattr("coterie.core.threads.time.process_time", lambda: self.own)
        monkeypatch.setattr("coterie.core.threads._busy_seconds", lambda: self.busy)

    def work(self, number: int) -> None:
        seconds = self.passes[number]
        self.now += seconds
        self.own += self.share * number * seconds
        self.busy += (self.share * number + self.others) * seconds
        self.done.append(number)


@pytest.mark.parametrize(
    ("passes", "others", "share", "chosen"),
    [
        ({1: 0.050, 2: 0.028}, 0.0, 1.0, 2),  # a quiet machine
        ({1: 0.050, 2: 0.047}, 0.0, 1.0, 1),  # about as fast
        ({1: 0.050, 2: 0.400}, 0.0, 1.0, 1),  # slower, and seen after a single pass
        (
            {1: 0.090, 2: 0.050},
            1.0,
            0.5,
            1,
        ),  # others have the cores: one, though two seem faster at this moment
        (
            {1: 2.000, 2: 1.100},
            0.0,
            1.0,
            2,
        ),  # a large model: it is not tried for long
        ({1: 2.000, 2: 1.100}, 2.0, 0.4, 1),
    ],
)
def test_the_choice(
    passes: dict[int, float],
    others: float,
    share: float,
    chosen: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Simulated(monkeypatch, passes, others, share)
    assert choose(machine.work, 2) == chosen
    assert machine.now <= max(
        1.0, 2 * passes[1]
    )  # it takes no longer than a second, or than two passes of a large model
    assert 2 not in machine.done or not others  # under load nobody waits for two


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells what others compute")
def test_a_watch_tells_own_work_from_that_of_others() -> None:
    watch = Watch()
    spin(0.3)
    own = watch.look()
    assert own.own > 0
    assert own.own * 0.9 <= own.own + (own.others or 0) <= own.cores + 0.2
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)  # it starts, and then computes
        watch.look()
        time.sleep(0.5)
        theirs = watch.look()
    finally:
        neighbour.kill()
        neighbour.wait()
    assert theirs.own < 0.3
    assert (theirs.others or 0) > 0.2  # less than a core where tests run side by side


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has two threads, and whose number nobody has chosen."""
    for name in threads.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def tried(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have the trial come to a number where clients compute one by one; count how often it is
    made.
    """
    made: list[int] = []

    def trial(work: Callable[[int], object], most: int) -> int:
        work(1)  # it is real work, of any model
        made.append(most)
        return number

    monkeypatch.setattr(backends, "choose", trial)
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
    made, first, second = tried(monkeypatch, 2), Stopping(after=2), Stopping()
    runs.run(recipe, tmp_path / "whole")
    with pytest.raises(Stop):
        runs.run(recipe, tmp_path / "cut", reporter=first)
    assert made == [2, 2]
    made = tried(monkeypatch, 1)  # the machine is loaded now
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
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
    made = tried(monkeypatch, 1)
    found = as_json(
        runs.run(
            recipe.model_copy(update={"compare_with": ("pretrained", "local")}),
            tmp_path,
        )
    )
    assert made == [2]
    assert [row["machine"]["threads"] for row in found] == [1, 1, 1]


@pytest.mark.usefixtures("several")
def test_whoever_says_a_number_has_it(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tried(monkeypatch, 2)
    fixed = recipe.model_copy(update={"threads": 1})
    assert as_json(runs.run(fixed, tmp_path / "recipe"))[-1]["machine"]["threads"] == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    prepared = backends.LocalBackend().prepare(recipe)
    assert backends.choose_threads(prepared) == 2
    assert made == []


@pytest.mark.usefixtures("several")
def test_the_trial_changes_no_figure(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes.changed(recipe, {"model.dropout": 0.1})
    made = tried(monkeypatch, 2)
    (own,) = as_json(runs.run(recipe, tmp_path / "tried"))
    (fixed,) = as_json(runs.run(recipe.model_copy(update={"threads": 2}), tmp_path / "fixed"))
    assert made == [2]
    assert own["clients"] == fixed["clients"]


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
