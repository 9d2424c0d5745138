"""Points of the curves between evaluations: they are there, of the right part, and change no
figure.
"""

import io
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reported
import torch
from figures import as_json
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.core.callback import Callback
from coterie.core.metrics import perplexity
from coterie.models.language import LanguageModel
from coterie.reports.progress import Terminal
from coterie.runs import run as runs
from coterie.runs.backends import LocalBackend
from coterie.runs.estimate import Estimate, RunEstimator, work
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

SETTINGS = (
    *(
        "method.name=comigs-1g1s",
        "method.rounds=3",
        "method.local_steps=2",
        "method.router_every=2",
        "method.router_steps=1",
        "model.dropout=0.1",
    ),
    *(
        "model.context=16",
        "training.batch_size=4",
        "compare_with=[pretrained, local]",
        "curve_every=2",
        "threads=1",
    ),
    *("keep=last", "patience=null", "evaluate_every=0", "training.experts.lr=0.01"),
)
TIMES = {"wall_s", "peak_memory_bytes", "curve"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Recipe:
    root = tmp_path_factory.mktemp("texts")
    for name in ("ann", "ben", "cleo"):
        (root / name).mkdir()
        for k in range(20):
            (root / name / f"{k:02d}.txt").write_text(
                f"{name} writes line {k} of a text that is not long. " * 3
            )
    return recipes.load("folders", [*SETTINGS, f"data.path={root}", f"model.base={tiny_base}"])


@pytest.fixture(scope="module")
def whole(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, as_json(reported.run(recipe, out))


class Operations(TorchDispatchMode):
    """Counts the tensor operations that are done in its block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def without(result: dict) -> dict:
    return {key: value for key, value in result.items() if key not in TIMES}


def rounds(result: dict) -> list[int]:
    return [point["round"] for point in result["curve"]["points"]]


def test_there_is_a_point_before_the_first_round_every_other_round_and_after_the_last(
    whole: tuple[Path, list[dict]],
) -> None:
    pretrained, local, own = whole[1]
    assert rounds(pretrained) == [0]
    assert rounds(local) == rounds(own) == [0, 2, 3]
    assert [point["iteration"] for point in own["curve"]["points"]] == [0, 4, 6]
    for client, base in pretrained["curve"]["points"][0][
        "clients"
    ].items():  # a fresh adapter is the base
        assert own["curve"]["points"][0]["clients"][client]["test"] == pytest.approx(
            base["test"], rel=1e-5
        )
    assert own["curve"]["points"][-1]["clients"] != own["curve"]["points"][0]["clients"]
    assert [e["round"] for e in own["evaluations"]] == [
        3
    ]  # the figures are of the whole sets, after the last round


def test_points_change_no_figure(
    recipe: Recipe, whole: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    plain = as_json(runs.run(recipe.model_copy(update={"curve_every": None}), tmp_path))
    assert [without(result) for result in plain] == [without(result) for result in whole[1]]
    assert all(result["curve"] is None for result in plain)
    for path in sorted(whole[0].glob("clients/*/adapter.safetensors")):
        assert (tmp_path / path.relative_to(whole[0])).read_bytes() == path.read_bytes()
    scores = [
        line
        for line in (whole[0] / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] != "curve"
    ]
    assert scores == (tmp_path / "metrics.jsonl").read_text().splitlines()


def test_a_point_is_of_evenly_spaced_windows(
    recipe: Recipe, whole: tuple[Path, list[dict]]
) -> None:
    prepared = LocalBackend().prepare(recipe)
    client = prepared.site.client("ben", {})
    assert isinstance(client.model, LanguageModel)
    test = prepared.problem.federation.clients["ben"].test
    assert test.windows > 8
    numbers = [int(k * (test.windows - 1) / 7) for k in range(8)]
    with torch.no_grad():
        expected = sum(
            client.model.score(iter([test.take(np.array([number]))])) for number in numbers
        )
    assert isinstance(expected, torch.Tensor)
    assert whole[1][-1]["curve"]["points"][0]["clients"]["ben"]["test"] == pytest.approx(
        perplexity(expected), rel=1e-5
    )


def test_after_an_interruption_the_curve_goes_on(
    recipe: Recipe, whole: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    class Stopping(Callback):
        def round(self, done: int) -> None:
            if done == 2:
                raise Stop

    alone = recipe.model_copy(update={"compare_with": ()})
    with pytest.raises(Stop):
        runs.run(alone, tmp_path, reporter=Stopping())
    (resumed,) = as_json(runs.run(alone, tmp_path, resume=True))
    assert resumed["curve"] == whole[1][-1]["curve"]


def test_any_kind_of_model_has_points(tmp_path: Path) -> None:
    small = (
        "method.rounds=2",
        "data.public=60",
        "model.common.pretraining.epochs=1",
        "curve_every=2",
        "compare_with=[]",
    )
    (result,) = as_json(
        reported.run(
            recipes.load("ddome-digits", [*small, "engine=loopback", "evaluate_every=2"]), tmp_path
        )
    )
    assert rounds(result) == [0, 2]
    assert result["curve"]["points"][0]["groups"].keys() == result["groups"].keys()
    assert (tmp_path / "report.html").exists()


def test_the_report_draws_them_and_says_of_what_they_are(whole: tuple[Path, list[dict]]) -> None:
    page = (whole[0] / "report.html").read_text()
    training = page[page.index("over training") :]
    assert "On 8 windows of each client's test set" in training
    drawn = re.findall(r"<circle", training[: training.index("Client by client")])
    assert len(drawn) >= 2 * 3  # two methods that train


def test_the_terminal_says_them() -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, width=160), rows=1) as terminal:
        terminal.begin("Local", 3, 0, ["a"])
        terminal.point(2, 34.5, 8)
    assert "after round 2: test perplexity 34.50 on 8 windows of each client" in out.getvalue()


def test_how_long_it_takes_is_said_before_it_begins_and_changes_no_figure(
    recipe: Recipe,
    whole: tuple[Path, list[dict]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes by the work that is done, and not by what else the machine does."""
    out = io.StringIO()
    with (
        Terminal(Console(file=out, width=160), rows=3) as terminal,
        Operations() as operations,
    ):
        clock = SimpleNamespace(monotonic=lambda: operations.count * 1e-6)
        monkeypatch.setattr("coterie.runs.estimate.time", clock)
        found = as_json(runs.run(recipe, tmp_path, reporter=terminal))
    assert [result["clients"] for result in found] == [result["clients"] for result in whole[1]]
    assert [result["curve"] for result in found] == [result["curve"] for result in whole[1]]
    first = out.getvalue().splitlines()[0]
    assert re.fullmatch(r"about \d+:\d\d in all, estimated from a few steps", first)
    assert len(terminal.expected) == 3
    pretrained, local, comigs = terminal.expected
    assert 0 < pretrained < local < comigs  # scoring; training too; and a router, of two experts


def test_a_row_that_is_done_takes_no_time(recipe: Recipe, whole: tuple[Path, list[dict]]) -> None:
    terminal = Terminal(Console(file=io.StringIO(), width=160), rows=3)
    runs.run(recipe, whole[0], resume=True, reporter=terminal)
    assert terminal.expected == [0.0, 0.0, 0.0]


def test_what_is_not_measured_is_expected_by_how_much_it_trains(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "coterie.runs.estimate.estimate",
        lambda prepared, _: Estimate(2 * work(prepared), 0, 0, 0, None),
    )
    rows = [
        LocalBackend().prepare(recipe.with_method(name))
        for name in ("local", "fedavg", "pretrained")
    ]
    monkeypatch.setattr("coterie.runs.estimate.MEASURED", 0.0)
    foresight = RunEstimator(seconds=1e-9)  # the first is measured, and uses that up
    for row in rows:
        foresight.add(row, done=False)
    assert list(foresight._known) == ["folders, local"]
    assert [seconds for seconds, _ in foresight.costs()] == pytest.approx(
        [2 * work(row) for row in rows]
    )


def test_more_methods_are_measured_where_they_take_long_and_parts_are_only_scored(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(prepared: Prepared, _: object) -> Estimate:
        time.sleep(0.01)
        return Estimate(seconds, seconds / 10, 0, 0, None)

    monkeypatch.setattr("coterie.runs.estimate.estimate", cost)
    rows = [LocalBackend().prepare(recipe.with_method(name)) for name in ("local", "fedavg")]
    for seconds, measured in ((0.1, 1), (7200.0, 2)):
        foresight = RunEstimator(seconds=0.005)
        for row in rows:
            foresight.add(row, done=False, part=row is rows[1])
        assert len(foresight._known) == measured
        assert foresight.costs()[0] == (seconds, seconds / 10)
    assert foresight.costs()[1] == (720.0, 720.0)


def test_quickstart_and_folders_have_points_every_round_or_two() -> None:
    assert recipes.load("quickstart").curve_every == 2
    assert recipes.load("folders").evaluate_every == 1  # which curves are of, then
