"""Runs in the time that one has: what is scored between rounds, and what is chosen by `--time`."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coterie import personal
from coterie.core.errors import RecipeError, Refused
from coterie.core.metrics import best, perplexity
from coterie.core.result import Result
from coterie.runs import budget, run
from coterie.runs.budget import advice, planned
from coterie.runs.estimate import Estimate
from coterie.runs.problems.auto import SCORED, rows_of
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe, load

ROUNDS = 4
SMALL = (
    *("model.context=16", "training.batch_size=4", "training.experts.lr=0.2", "samples=false"),
    *(f"method.rounds={ROUNDS}", "method.local_steps=3", "curve_every=null", "patience=null"),
    *("training.experts.schedule=constant", "training.micro_batch=null", "evaluate_rows=2"),
    "words=null",
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("people")
    for client, words in (("ann", "cat sat mat"), ("ben", "add two numbers")):
        (root / client).mkdir()
        rng = random.Random(client)
        for k in range(40):
            text = " ".join(rng.choices(words.split(), k=20))
            (root / client / f"{k:02d}.txt").write_text(text)
    return root


def small(texts: Path, base: Path, *more: str) -> Recipe:
    return load("folders", [*SMALL, f"data.path={texts}", f"model.base={base}", *more])


@pytest.mark.parametrize("method", ["fedavg", "interpolation"])
def test_between_rounds_some_rows_are_scored_and_at_the_end_everything(
    texts: Path, tiny_base: Path, tmp_path: Path, method: str
) -> None:
    recipe = small(texts, tiny_base, f"method.name={method}", "compare_with=[local]")
    run.run(recipe, tmp_path / "run")
    data = prepare(recipe).site.data
    for folder in (tmp_path / "run", tmp_path / "run" / "baselines" / "local"):
        result = Result.read(folder)
        assert len(result.evaluations) == ROUNDS + 1
        for client, of in result.clients.items():
            test = data[client].test
            assert of.predictions == len(test) - 1  # every token but the first
            curve = {e.round: e.clients[client] for e in result.evaluations}
            assert {scores.predictions for scores in curve.values()} == {2 * 16}
            if result.method != "interpolation":  # whose parts have rounds of their own
                valids = [float(scores.valid or 0) for scores in curve.values()]
                assert curve[of.kept_round or 0].valid == best(valids, result.metric)
            model = personal.load(folder, client)
            score = torch.tensor(model.score(test.scoring(4)), dtype=torch.float64)
            assert of.test == pytest.approx(perplexity(score), rel=1e-4)


def test_rows_between_rounds_need_a_choice_of_rounds(texts: Path, tiny_base: Path) -> None:
    with pytest.raises(RecipeError, match="evaluate_rows: needs keep: best"):
        small(texts, tiny_base, "keep=last")
    with pytest.raises(RecipeError, match="final_rows: needs evaluate_rows"):
        small(texts, tiny_base, "evaluate_rows=null", "final_rows=3")


def test_the_end_too_may_be_scored_on_some(texts: Path, tiny_base: Path, tmp_path: Path) -> None:
    recipe = small(texts, tiny_base, "method.name=fedavg", "compare_with=[]", "final_rows=3")
    (result,) = run.run(recipe, tmp_path / "run")
    assert {of.predictions for of in result.clients.values()} == {3 * 16}


@pytest.mark.parametrize("steps", [10, 40, 100])
def test_scoring_takes_a_fifth_of_a_round(steps: int) -> None:
    rows, _ = rows_of(steps, 8, 1)
    scoring, training = 2 * rows * 0.4, steps * 8  # in rows trained on
    assert scoring / (scoring + training) < 0.2
    assert rows >= SCORED * steps * 8


def costs(per_row: float, once: float, seen: list[Recipe]) -> object:
    """Stand in for `estimates`: so many seconds of a token trained on, and some once."""

    def estimates(recipe: Recipe, *_: object) -> Iterator[tuple[SimpleNamespace, Estimate]]:
        seen.append(recipe)
        method, rows = recipe.build_method(), recipe.training.batch_size
        tokens = method.rounds * method.local_steps * rows * recipe.model.context  # type: ignore[union-attr]
        yield SimpleNamespace(), Estimate(per_row * tokens + once, once, 0, 0, None)

    return estimates


@pytest.mark.parametrize("minutes", [0.5, 1, 3, 30])
def test_what_is_chosen_ends_in_the_time_and_uses_it(
    texts: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, minutes: float
) -> None:
    fields = ["training.batch_size=8", "model.context=128", "method.rounds=25"]
    recipe = small(texts, tiny_base, *fields, "method.local_steps=40", f"time={minutes}m")
    recipe = recipe.model_copy(update={"auto": ("method.local_steps", "training.batch_size")})
    monkeypatch.setattr(budget, "resolved", lambda recipe, *_, **__: (recipe, ""))
    per_row = 1000 / (25 * 40 * 8 * 128)  # 1,000 seconds and a few more as it is
    monkeypatch.setattr(budget, "estimates", costs(per_row, 5.0, []))
    chosen, (line,) = planned(recipe)
    method = chosen.build_method()
    tokens = method.rounds * method.local_steps * chosen.training.batch_size * 128
    takes = per_row * tokens + 5
    assert takes < 60 * minutes
    assert takes > 0.6 * min(60 * minutes, 1000)
    assert method.rounds >= budget.LEAST_ROUNDS
    assert f"{method.rounds} rounds of {method.local_steps} iterations" in line
    if minutes == 30:
        assert chosen == recipe


def test_a_time_that_is_too_short_is_refused_and_says_which_is_not(
    texts: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "estimates", costs(1.0, 5.0, []))
    with pytest.raises(Refused, match=r"time: 60 s are too few: 3 rounds take about \d+ s"):
        planned(small(texts, tiny_base, "time=1m"))


@pytest.mark.parametrize(
    ("fields", "left", "rounds", "steps"),
    [
        (["method.rounds=25", "method.local_steps=40"], 300, 12, 40),
        (["method.rounds=4", "method.local_steps=40"], 300, 4, 20),
        (["method.rounds=2", "method.local_steps=40"], 300, 2, 20),
        (["method.rounds=25", "method.local_epochs=1"], 120, 5, 3),
    ],
)
def test_few_rounds_and_rounds_of_epochs_use_the_time_that_is_left(
    texts: Path, tiny_base: Path, fields: list[str], left: float, rounds: int, steps: int
) -> None:
    recipe = small(texts, tiny_base, *fields)
    most = recipe.build_method()
    chosen = budget._smaller(recipe, ["method.local_steps"], most, left, 600.0).build_method()
    assert (chosen.rounds, chosen.local_steps) == (rounds, steps)


def test_a_run_of_hours_is_told_how_to_take_one(texts: Path, tiny_base: Path) -> None:
    recipe = small(texts, tiny_base)
    assert advice(recipe, 3000.0, 0.0) is None
    # of 2 hours 1,000 s are not iterations: of an hour with a tenth to spare 2,240 s remain
    least = int((3240 - 1000) / (7200 - 1000) * ROUNDS * 3)
    hint = f"about 2.0 hours: about {least} iterations of a client in place of {ROUNDS * 3}"
    assert hint in str(advice(recipe, 7200.0, 1000.0))
    assert "1.0 of them for scores at the end" in str(advice(recipe, 7200.0, 3600.0))
    none = small(texts, tiny_base, "method.name=pretrained", "method.rounds=0")
    assert "2.0 of them for scores" in str(advice(none, 7200.0, 7200.0))


def test_a_time_in_which_not_even_the_scores_end_is_refused(
    texts: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "estimates", costs(1.0, 100.0, []))
    with pytest.raises(Refused, match=r"loading and the last scores take about 11\d s"):
        planned(small(texts, tiny_base, "time=1m", "evaluate_rows=null"))


def test_the_last_scores_are_as_many_as_take_a_fifth_of_the_time(
    texts: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(texts, tiny_base, "time=100", "evaluate_rows=2")
    prepared, took = prepare(recipe), Estimate(40.0, 40.0, 0, 0, None)
    monkeypatch.setattr(budget, "estimates", lambda *_: iter([(prepared, took)]))
    chosen, _ = planned(recipe)
    final = chosen.final_rows
    assert final is not None
    assert final > 2
    splits = [s for data in prepared.site.data.values() for s in (data.valid, data.test)]
    shares = [
        sum(min(rows, s.windows) for s in splits) / sum(s.windows for s in splits)
        for rows in (final, final + 1)
    ]
    assert 40 * shares[0] <= 0.2 * 0.9 * 100 < 40.5 * shares[1]


def test_a_run_goes_on_with_what_was_chosen_for_it(tmp_path: Path) -> None:
    """Also one without text, and one that was stopped before any row with rounds began."""
    recipe = load("cobo-digits", ["time=60"])
    chosen, _ = planned(recipe)
    (tmp_path / "recipe.yaml").write_text(recipes.dump(chosen))
    assert planned(recipe, tmp_path) == (chosen, [])
    first = tmp_path / "stopped" / "baselines" / "pretrained"
    first.mkdir(parents=True)
    row = load(
        "cobo-digits", ["training.batch_size=7", "method.name=pretrained", "method.rounds=0"]
    )
    (first / "recipe.yaml").write_text(
        "\n".join(line for line in recipes.dump(row).splitlines() if line != "  rounds: 0")
    )
    again, (line,) = planned(recipe, tmp_path / "stopped")
    assert again.training.batch_size == 7
    assert "in 1 minutes" in line


def test_no_round_begins_that_would_end_too_late(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    recipe = small(texts, tiny_base, "method.name=fedavg", "compare_with=[]")
    (result,) = run.execute_all([(recipe, tmp_path / "r")], run.Callback(), until=time.monotonic())
    assert result.rounds == 1
    assert set(result.clients) == {"ann", "ben"}


def test_a_part_trains_no_further_than_the_whole_whose_time_was_over(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """It is scored beside the whole, which would have to mix the same model."""
    recipe, now = small(texts, tiny_base), time.monotonic()
    rows = [(recipe.with_method("local"), tmp_path / "local"), (recipe, tmp_path)]
    local, whole = run.execute_all(rows, run.Callback(), within=tmp_path, until=now)
    assert local.part_of == "interpolation"
    assert (local.rounds, whole.rounds) == (1, 1)
    for i, of in whole.clients.items():
        assert of.parts is not None
        assert local.clients[i].test == of.parts["local"].test


def test_times_are_read_with_their_unit(texts: Path, tiny_base: Path) -> None:
    given = ("90", "30m", "2h", "45s")
    read = [small(texts, tiny_base, f"time={value}").time for value in given]
    assert read == [90, 1800, 7200, 45]
    with pytest.raises(RecipeError, match="time"):
        small(texts, tiny_base, "time=soon")
