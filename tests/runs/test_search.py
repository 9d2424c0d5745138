"""The search for settings against naive formulations, on objectives in closed form."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.callback import Callback
from coterie.core.result import ROUNDS
from coterie.reports.progress import SearchTerminal, Terminal
from coterie.runs.recipes.recipe import changed, load
from coterie.runs.tuning.search import (
    LOST,
    Effort,
    Field,
    Judged,
    Score,
    Search,
    SearchResult,
    Trial,
    densified,
    halving,
    sweep,
    thinned,
    together,
)
from coterie.runs.tuning.trials import TrialRuns

LR, RHO = "training.experts.lr", "method.rho"
GRID = Field(LR, (0.25, 0.5, 1.0, 2.0))


def alone(search: Search, objective: Callable[[Trial], float]) -> SearchResult:
    return together({0: search}, lambda batch: [(objective(trial),) for _, trial in batch])[0]


def distance(candidate: Mapping[str, Any], optimum: float, key: str = LR) -> float:
    """How far a value is from the optimum, in octaves."""
    return abs(math.log2(candidate[key] / optimum))


def test_rungs_have_the_candidates_and_rounds_that_one_computes_by_hand() -> None:
    found = alone(
        halving([GRID], Effort(trials=8), rounds=40), lambda t: distance(t.candidate, 0.9)
    )
    rungs = [[j for j in found.judged if j.rung == k] for k in (0, 1, 2)]
    assert [len(rung) for rung in rungs] == [8, 4, 2]
    assert [{j.trial.share for j in rung} for rung in rungs] == [{1 / 4}, {1 / 2}, {1}]
    for before, after in itertools.pairwise(rungs):
        best = sorted(before, key=lambda j: j.score)[: len(after)]
        assert {j.trial.candidate[LR] for j in best} == {j.trial.candidate[LR] for j in after}
    assert found.at_edge == ()


def test_few_rounds_make_fewer_rungs_with_as_many_candidates_in_the_first() -> None:
    for rounds, shares in ((1, [1]), (2, [1 / 2, 1]), (4, [1 / 4, 1 / 2, 1])):
        effort = Effort(trials=6)
        assert effort.shares(rounds) == shares
        found = alone(halving([GRID], effort, rounds), lambda t: distance(t.candidate, 0.9))
        counts = [sum(j.rung == k for j in found.judged) for k in range(len(shares))]
        assert counts == [6, 3, 1][: len(shares)]


@given(
    st.lists(st.floats(-6, 6), min_size=8, max_size=8),
    st.integers(1, 12),
    st.integers(2, 4),
)
def test_halving_is_what_a_naive_loop_finds(noise: list[float], trials: int, eta: int) -> None:
    field = Field(LR, tuple(float(2**k) for k in range(8)))

    def objective(trial: Trial) -> float:
        return noise[int(math.log2(trial.candidate[LR]))] + trial.share

    effort = Effort(trials, eta=eta, extensions=0)
    found = alone(halving([field], effort, rounds=1000), objective)
    alive = [c[LR] for c in thinned(densified([field], trials), trials, [field])]
    score: dict[float, float] = {}
    if trials > 8:  # values between those that the noise is of
        return
    for k in range(3):
        share = eta ** -(2 - k)
        alive = alive[: max(1, trials // eta**k)]
        score = {lr: noise[int(math.log2(lr))] + share for lr in alive}
        alive = sorted(alive, key=lambda lr: (score[lr], lr))
    assert found.chosen is not None
    assert found.chosen.trial.candidate[LR] == alive[0]


@given(st.floats(-7, 7))
def test_the_optimum_of_a_convex_function_is_found_outside_of_the_grid_too(octaves: float) -> None:
    optimum = 0.7 * 2**octaves
    found = alone(
        halving([GRID], Effort(trials=4, extensions=10), rounds=40),
        lambda t: distance(t.candidate, optimum) ** 2,
    )
    assert found.chosen is not None
    assert (
        distance(found.chosen.trial.candidate, optimum) < 1.01
    )  # a neighbour on a grid of octaves
    assert found.at_edge == ()
    beyond = [j.trial.candidate[LR] for j in found.judged if j.rung is None]
    assert all(j.trial.share == 1 for j in found.judged if j.rung is None)
    steps = [2.0 * 2**k for k in range(1, 11)] if octaves > 0 else [2.0**-k for k in range(3, 13)]
    assert beyond == pytest.approx(steps[: len(beyond)], rel=2e-3)


def test_where_the_limit_is_reached_the_best_is_said_to_lie_at_the_edge() -> None:
    other = Field(RHO, (1.0, 10.0, 100.0))
    found = alone(
        halving([GRID, other], Effort(trials=12, extensions=3), rounds=1),
        lambda t: -math.log(t.candidate[LR]) + distance(t.candidate, 10, RHO),
    )
    assert found.at_edge == (LR,)
    assert [j.trial.candidate[LR] for j in found.judged if j.rung is None] == [4, 8, 16]
    assert found.chosen is not None
    assert found.chosen.trial.candidate == {LR: 16, RHO: 10}


def test_a_grid_is_not_extended_where_the_recipe_refuses_or_values_have_no_ratio() -> None:
    momentum = Field("training.experts.momentum", (0.45, 0.9))
    kinds = Field("method.pairs", ("mixed", "constant"))
    zero = Field(RHO, (0.0, 0.1))

    def objective(trial: Trial) -> float:
        values = trial.candidate
        return -values[momentum.key] + values[RHO] + (values[kinds.key] == "mixed")

    found = alone(
        halving(
            [momentum, kinds, zero],
            Effort(trials=8),
            rounds=1,
            allowed=lambda trial: trial.candidate[momentum.key] < 1,
        ),
        objective,
    )
    assert found.chosen is not None
    assert dict(found.chosen.trial.candidate) == {momentum.key: 0.9, kinds.key: "constant", RHO: 0}
    assert (len(found.judged), found.at_edge) == (8, ())


graded = st.builds(
    lambda low, ratio, count: tuple(float(f"{low * ratio**k:.4g}") for k in range(count)),
    st.floats(1e-4, 10),
    st.floats(1.5, 4),
    st.integers(2, 5),
)
choices = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True).map(tuple)


@given(
    st.lists(st.tuples(graded, st.lists(graded | choices, max_size=2)), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(1, 50),
)
@settings(max_examples=60)
def test_every_method_gets_the_same_effort_whatever_fields_it_has(
    methods: list[tuple[tuple[float, ...], list[tuple[Any, ...]]]], trials: int, rounds: int
) -> None:
    effort = Effort(trials)
    counts = set()
    for rate, others in methods:
        fields = [Field(LR, rate), *(Field(f"method.f{k}", v) for k, v in enumerate(others))]
        own = {field.key: field.values[-1] for field in fields}
        found = alone(
            halving(fields, effort, rounds, own), lambda t: hash(str(t)) % 97 + t.candidate[LR]
        )
        first = [j.trial.candidate for j in found.judged if j.rung == 0]
        assert own in first
        assert len({str(sorted(c.items())) for c in first}) == len(first)
        assert all(c[f.key] in f.values or f.graded for c in first for f in fields)
        rungs = len(effort.shares(rounds))
        counts.add(tuple(sum(j.rung == k for j in found.judged) for k in range(rungs)))
        assert sum(j.rung is None for j in found.judged) <= effort.extensions
    assert counts == {tuple(max(1, trials // 2**k) for k in range(len(effort.shares(rounds))))}


def test_a_grid_that_is_made_denser_keeps_the_values_that_were_given() -> None:
    [dense] = densified([GRID], 8)
    assert set(GRID.values) < set(dense.values)
    assert len(dense.values) == 10
    ratios = {round(b / a, 2) for a, b in zip(dense.values, dense.values[1:], strict=False)}
    assert ratios == {1.26}
    chosen = [c[LR] for c in thinned([dense], 8, [GRID])]
    assert set(GRID.values) < set(chosen)
    assert len(chosen) == 8
    whole = Field(ROUNDS, (2, 3))  # there is nothing between them
    assert densified([whole], 8) == [whole]


def test_what_is_thinned_out_of_a_large_grid_lies_evenly_in_every_field() -> None:
    fields = [Field(f"f{k}", (1.0, 2.0, 4.0, 8.0)) for k in range(3)]
    points = thinned(fields, 16)
    for field in fields:
        counts = [sum(point[field.key] == value for point in points) for value in field.values]
        assert min(counts) >= 2
        assert max(counts) <= 6


def test_trials_that_are_lost_lose_and_of_equal_ones_the_smaller_value_is_taken() -> None:
    def objective(trial: Trial) -> float:
        return math.inf if trial.candidate[LR] > 0.6 else 1.0

    found = alone(halving([GRID], Effort(trials=4, extensions=2), rounds=8), objective)
    assert found.chosen is not None
    assert found.chosen.trial.candidate[LR] == 0.25
    beyond = [j.trial.candidate[LR] for j in found.judged if j.rung is None]
    assert beyond == [0.125]  # no better, so that it is not gone further
    assert found.at_edge == ()
    every = alone(halving([GRID], Effort(trials=4), rounds=8), lambda trial: math.inf)
    assert every.chosen is not None
    assert every.chosen.score == LOST


def test_fewer_rounds_are_chosen_only_where_they_are_surely_better() -> None:
    def objective(trial: Trial) -> float:
        return distance(trial.candidate, 1.0) + trial.share

    effort, asked = Effort(trials=4), list[tuple[Judged, Judged]]()

    def never(one: Judged, other: Judged) -> bool:
        asked.append((one, other))
        return False

    for shorter, share in ((None, 1), (never, 1), (lambda one, other: True, 1 / 16)):
        found = alone(halving([GRID], effort, 16, shorter=shorter), objective)
        assert found.chosen is not None
        assert found.chosen.trial == Trial({LR: 1.0}, share)
    assert all(one.trial.share < other.trial.share == 1 for one, other in asked)


def test_rounds_that_are_at_the_lower_edge_are_halved_further_until_there_is_one() -> None:
    found = alone(
        halving([GRID], Effort(trials=2), 16, shorter=lambda one, other: True), lambda t: t.share
    )
    assert found.chosen is not None
    assert found.chosen.trial.share == 1 / 16
    assert ROUNDS not in found.at_edge


@given(st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 1)), st.integers(0, 4)))
def test_a_plain_sweep_goes_key_after_key(scores: dict[tuple[int, int], int]) -> None:
    grid = {"a": (0, 1, 2), "b": (0, 1)}
    found = alone(
        sweep(grid, extensions=0), lambda t: scores.get((t.candidate["a"], t.candidate["b"]), 5)
    )
    a = min((0, 1, 2), key=lambda value: scores.get((value, 0), 5))
    b = min((0, 1), key=lambda value: scores.get((a, value), 5))
    assert found.chosen is not None
    assert found.chosen.trial.candidate == {"a": a, "b": b}
    assert len(found.judged) == 5
    assert alone(sweep({}), lambda t: 0.0) == SearchResult(None)


@given(
    st.permutations([0.1, 0.2, 0.4]),
    st.floats(1e-3, 10.0),
    st.sampled_from(["nothing", "one below", "one above"]),
)
def test_a_sweep_extends_a_grid_whose_best_lies_at_its_edge(
    values: list[float], optimum: float, refused: str
) -> None:
    limit = {"nothing": (0.0, math.inf), "one below": (0.1, math.inf), "one above": (0.0, 0.4)}
    least, most = limit[refused]
    grid = {LR: values, RHO: (0, "a choice")}
    found = alone(
        sweep(grid, lambda t: least <= t.candidate[LR] <= most),
        lambda t: distance(t.candidate, optimum),
    )
    reachable = [v for k in range(-4, 7) if least <= (v := 0.1 * 2.0**k) <= most]
    best = min(reachable, key=lambda v: distance({LR: v}, optimum))
    assert found.chosen is not None
    assert found.chosen.trial.candidate[LR] == pytest.approx(best, rel=1e-3)
    beyond = [j.trial.candidate[LR] for j in found.judged if j.rung is None]
    assert len(beyond) <= 4
    assert not set(beyond) & set(values)
    ended = len(beyond) == 4 and best == (reachable[0] if optimum < 0.1 else reachable[-1])
    assert found.at_edge == ((LR,) if ended else ())


def test_searches_go_on_side_by_side_and_find_what_each_finds_alone() -> None:
    optima = {"near": 0.9, "far": 50.0, "below": 0.01}
    batches: list[list[str]] = []

    def evaluate(batch: Sequence[tuple[str, Trial]]) -> list[Score]:
        batches.append([key for key, _ in batch])
        return [(distance(trial.candidate, optima[key]),) for key, trial in batch]

    effort = Effort(trials=4)
    found = together({key: halving([GRID], effort, 40) for key in optima}, evaluate)
    assert list(found) == list(optima)
    for key, optimum in optima.items():
        own = alone(halving([GRID], effort, 40), lambda t, o=optimum: distance(t.candidate, o))
        assert found[key] == own
    assert [len(batch) for batch in batches[:3]] == [12, 6, 3]
    assert len(batches) == 3 + max(
        sum(j.rung is None for j in own.judged) for own in found.values()
    )


def test_a_search_is_not_estimated_by_steps_of_each_of_its_runs() -> None:
    assert Callback.shows_estimate is SearchTerminal.shows_estimate is False
    assert Terminal.shows_estimate


def test_routers_learn_as_often_in_a_run_of_fewer_rounds() -> None:
    recipe = load("quickstart")
    trials = TrialRuns[str](
        lambda name, settings, seed: (changed(recipe, {"method.name": name, **settings}), Path()),
        (0,),
    )

    def shorter(name: str, share: float, **candidate: Any) -> Mapping[str, Any]:
        return trials.settings(name, Trial(candidate, share))

    every, steps = "method.router_every", "method.router_steps"
    assert shorter("comigs-1g1s", 1 / 4) == {ROUNDS: 2, every: 4, steps: 1}
    assert shorter("comigs-1g1s", 1 / 2, **{every: 8}) == {ROUNDS: 5, every: 4, steps: 2}
    assert shorter("comigs-1g1s", 1, **{LR: 0.1}) == {LR: 0.1}
    assert shorter("pfedmoe", 1 / 2, **{LR: 0.1}) == {LR: 0.1, ROUNDS: 5}
