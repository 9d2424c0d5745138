"""How long a run takes, said before it begins: of every kind of method, also one whose clients keep
nothing.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.core.protocol import Ask, Replies
from coterie.core.roles import GENERALIST
from coterie.core.tensors import nbytes
from coterie.engines.inprocess import InProcess
from coterie.models.language import LanguageModel
from coterie.models.windows import tokens_in
from coterie.runs import estimate as estimating
from coterie.runs.estimate import estimate
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load


def _write_texts(folder: Path) -> None:
    for client, letters in (("ann", "abc"), ("ben", "xyz")):
        (folder / client).mkdir()
        for k in range(12):
            words = " ".join(letters[(k + n) % 3] * (n % 4 + 1) for n in range(20))
            (folder / client / f"{k}.txt").write_text(words)


SHORT = ["method.rounds=2", "method.local_steps=2", "compare_with=[]", "evaluate_every=0"]


def _settings(folder: Path, base: Path, *more: str) -> list[str]:
    _write_texts(folder)
    place = [f"data.path={folder}", f"model.base={base}", "model.context=16"]
    return [*place, *SHORT, "keep=last", "patience=null", *more]


@pytest.mark.parametrize(
    "name", ["ddome", "ddome-shared", "fedmix", "ensemble", "fedavg", "scaffold"]
)
def test_a_federation_with_clients_never_seen_is_estimated(name: str) -> None:
    found = estimate(prepare(load("ddome-digits", [f"method.name={name}", *SHORT])))
    assert 0 < found.seconds < 600
    assert found.up > 0


def test_where_steps_are_long_rows_are_counted_and_nothing_is_computed(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path, tiny_base, "training.batch_size=4", "method.name=interpolation")
    prepared = prepare(load("folders", settings))

    def never(*_: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(LanguageModel, "gradient", never)
    monkeypatch.setattr(LanguageModel, "predictions", never)
    monkeypatch.setattr(estimating, "_pace", lambda prepared: (3e-6, 1e-6))
    found = estimate(prepared)
    problem = prepared.problem
    parts = [layout for _, layout in prepared.site.layouts["ann"].parts]
    flops = [problem.flops(layout, True) for layout in parts]
    trained = 2 * 2 * 4 * 2 * sum(flops)  # rounds, steps, rows, clients
    rows = sum(data.valid.windows + data.test.windows for data in prepared.site.data.values())
    scored = 1.5 * rows * len(parts) * flops[0]
    typed = 20 * 2 * sum(0.15 + 3e-9 * each for each in flops)  # words, clients
    assert found.seconds == pytest.approx(3e-6 * trained + 1e-6 * scored + typed, rel=0.02)
    assert found.once == pytest.approx(1e-6 * scored / 3 + typed, rel=0.02)
    assert found.up > 0
    assert found.down > 0


def test_what_follows_the_last_round_is_counted_once(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FDLoRA's fusion scores validation windows dozens of times, however many rounds there are."""
    settings = _settings(tmp_path, tiny_base, "words=null", "method.name=fdlora")
    monkeypatch.setattr(estimating, "_pace", lambda prepared: (3e-6, 1e-6))
    prepared = prepare(load("folders", settings))
    found, longer = (
        estimate(prepare(load("folders", [*settings, f"method.rounds={rounds}"])))
        for rounds in (2, 4)
    )
    (layout,) = set(prepared.site.layouts.values())
    row = 1e-6 * prepared.problem.flops(layout, True)
    data = prepared.site.data.values()
    scored = row * sum(of.valid.windows + of.test.windows for of in data) / 2
    evaluations = (found.once - scored) / row / (len(data) * 32)  # validation windows
    assert 20 < evaluations < 41
    assert longer.once == found.once
    assert longer.up == found.up  # of a round
    rows = 2 * 2 * prepared.recipe.training.batch_size * len(data)  # rounds, steps
    assert longer.seconds - found.seconds == pytest.approx(3 * row * rows, rel=0.02)


def test_a_run_of_pools_goes_to_its_end_from_the_command_line(tmp_path: Path) -> None:
    settings = [word for setting in SHORT for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", "ddome-digits", *settings, "--out", str(tmp_path / "r")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r/result.json").exists()


def test_what_only_begins_is_not_taken_for_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of its shape loads libraries, and in the second FedALA's weights of layers
    learn until they converge: seconds that do not come again.
    """
    measured, answered, seen = estimating._Trial.measure, InProcess.answer, list[list[int]]()

    def measure(trial: estimating._Trial, steps: int, few: int) -> float:
        seen.append([few])
        return measured(trial, steps, few)

    def answer(engine: InProcess, ask: Ask, round: int, phase: int) -> Replies:
        seen[-1].append(round)
        if round < 2:
            time.sleep(0.5)
        return answered(engine, ask, round, phase)

    monkeypatch.setattr(estimating._Trial, "measure", measure)
    monkeypatch.setattr(InProcess, "answer", answer)
    found = coterie.dry_run("cobo-digits", compare_with=[], method={"name": "local"})
    # one client, a few, and as the round is short all of them
    assert seen == [[few, 0, 1, 2] for few in (1, 2, 8)]
    assert found["local"].seconds < 0.5 * coterie.Recipe.load("cobo-digits").method["rounds"]


def test_what_clients_receive_after_a_stage_alone_is_counted(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path, tiny_base, "method.name=fdlora", "method.rounds=20")
    monkeypatch.setattr(estimating, "_pace", lambda prepared: (3e-6, 1e-6))
    prepared = prepare(load("folders", settings))
    found = estimate(prepared)
    theta = nbytes(prepared.blueprint.read(GENERALIST))
    assert (found.up, found.down) == (theta, theta + 1)  # and a mark


def test_a_dry_run_says_what_all_methods_take_together() -> None:
    said = (
        CliRunner()
        .invoke(app, ["run", "cobo-digits", "--dry-run", "--set", "method.rounds=2"])
        .stdout
    )
    assert "All 3 methods: about 0:0" in said


def test_the_pace_of_a_long_step_is_that_of_long_parts(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of few tokens costs more for each, and the first of all twice as much."""
    _write_texts(tmp_path)
    settings = [f"data.path={tmp_path}", f"model.base={tiny_base}", "model.context=64", *SHORT]
    prepared = prepare(
        load(
            "folders",
            [*settings, "training.batch_size=1", "method.name=local", "keep=last", "patience=null"],
        )
    )
    clock, steps = [0.0], list[int]()

    def step(model: LanguageModel, batch: Any, wrt: object) -> None:
        steps.append(tokens_in(batch))
        clock[0] += (1.5 + 0.02 * steps[-1]) * (2 if len(steps) == 1 else 1)

    monkeypatch.setattr(LanguageModel, "gradient", step)
    monkeypatch.setattr(estimating.time, "monotonic", lambda: clock[0])
    found = estimating._pace(prepared)
    assert found is not None
    batch = prepared.problem.federation.clients["ann"].train.batch(0, 1)
    rows, flops = len(batch), prepared.problem.flops(prepared.problem.base, True)
    assert found[0] * rows * flops < 1.5 * (1.5 + 0.02 * tokens_in(batch))
    assert sum(steps) < 3 * tokens_in(batch)
