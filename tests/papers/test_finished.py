"""Statements of the papers: two-sided bounds, runs that are not finished, figures of a run, each
against a formulation of its own.
"""

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from figures import typed
from reports.samples import classified
from scipy import stats

from coterie.core.metrics import ACCURACY, PERPLEXITY
from coterie.core.result import ROUTING, Result, Routing
from coterie.papers import tables
from coterie.papers.checks import _verdicts
from coterie.papers.figures import Condition, Judgement, SeedFigures, at_share, seed_figures
from coterie.papers.reproduced import Verdict
from coterie.papers.tables import Better, Figure, Near, Statement

ABOUT = {"says": "s", "source": "p", "columns": ("c",)}
NEAR = Near(kind="near", rows=("a", "b"), best_of=("x",), within=2, points=True, **ABOUT)
BETTER = Better(better=("a",), than=("x",), **ABOUT)


def row(
    name: str,
    means: list[float],
    earlier: list[float] | None = None,
    share: float = 0.8,
    column: str = "c",
    metric: str = "accuracy",
    **seeds: list,
) -> dict:
    """A row with its means at the end, and after a share of its runs."""
    found = [SeedFigures(mean, {}) for mean in means]
    if earlier is not None:
        was = [SeedFigures(mean, {}, share=share) for mean in earlier]
        found = [replace(seed, earlier=e) for seed, e in zip(found, was, strict=True)]
    found = [
        replace(seed, **{key: values[k] for key, values in seeds.items()})
        for k, seed in enumerate(found)
    ]
    own = {"row": name, "title": name, "column": column, "mean": 0.0, "std": 0.0}
    about = ACCURACY.about if metric == "accuracy" else PERPLEXITY.about
    return own | {"metric": about, "seeds": [asdict(seed) for seed in found]}


def judged(statement: Statement, *rows: dict) -> Verdict:
    [verdict] = _verdicts(statement, typed(rows))
    return verdict


def figure(name: str, **bounds: object) -> Figure:
    return Figure(kind="figure", figure=name, row="a", **ABOUT | bounds)  # type: ignore[arg-type]


# Two-sided


def whole_interval(values: list[float], low: float, high: float) -> str:
    """The verdict on whether figures lie within bounds, by scipy's interval."""
    ends = stats.t.interval(0.95, len(values) - 1, fmean(values), stats.sem(values))
    if low <= ends[0] and ends[1] <= high:
        return "holds"
    return "does not hold" if ends[1] < low or ends[0] > high else "undecided"


def test_near_needs_the_whole_interval_of_every_row_on_both_sides() -> None:
    """With figures drawn at random, against scipy's intervals."""
    draw, seen = random.Random(0), set()
    for _ in range(300):
        centres = [draw.uniform(-4, 4) * draw.choice([0.2, 1]) for _ in range(2)]
        spread = draw.choice([0.05, 0.5])
        x = [draw.uniform(50, 90) for _ in range(3)]
        rows = {
            name: [value + draw.gauss(centre, spread) for value in x]
            for name, centre in zip("ab", centres, strict=True)
        }
        words = [
            whole_interval([v - w for v, w in zip(own, x, strict=True)], -2, 2)
            for own in rows.values()
        ]
        expected = next((w for w in ("does not hold", "undecided") if w in words), "holds")
        found = judged(NEAR, row("x", x), *(row(name, own) for name, own in rows.items()))
        assert found.word == expected
        seen.add(expected)
    assert seen == {"holds", "undecided", "does not hold"}


def test_an_interval_that_reaches_beyond_both_bounds_is_undecided() -> None:
    assert Condition("", [-9.0, 0.0, 9.0], -1, 1).surely is None
    assert Condition("", [0.0, 0.1, 0.2], -1, 1).surely is True
    assert [Condition("", [x, x + 0.1], -1, 1).surely for x in (-5.0, 5.0)] == [False, False]


@pytest.mark.parametrize(
    ("mean", "word"), [(71.0, "holds"), (80.0, "holds"), (67.0, "does not hold")]
)
def test_what_the_paper_calls_not_worse_may_be_better(mean: float, word: str) -> None:
    s = NEAR.model_copy(update={"rows": ("a",), "only_worse": "'competitive'"})
    assert judged(s, row("a", [mean, mean + 0.1]), row("x", [70.0, 70.1])).word == word
    lower = [
        row(name, [m, m + 0.1], metric="perplexity") for name, m in (("a", 140 - mean), ("x", 70))
    ]
    assert judged(s, *lower).word == word


def test_a_difference_that_the_paper_names_is_the_middle_of_the_bounds() -> None:
    s = NEAR.model_copy(update={"rows": ("a",), "about": -4.0})
    words = [
        judged(s, row("a", [70 + d, 70.1 + d]), row("x", [70.0, 70.1])).word for d in (-7, -4, 0)
    ]
    assert words == ["does not hold", "holds", "does not hold"]


def test_every_one_sided_statement_quotes_its_source() -> None:
    quoted = [
        s.only_worse
        for name in tables.names()
        for s in tables.load(name).statements
        if isinstance(s, Near) and s.only_worse is not None
    ]
    assert quoted
    assert all(words.startswith("'") and "no contradiction" in words for words in quoted)


# Across columns


def test_rows_of_another_column_less_a_row_of_each() -> None:
    """FedAvg's distance from the common expert, on texts and on images."""
    s = BETTER.model_copy(update={"better": ("a",), "than": ("a",), "minus": "x", "beside": "d"})
    here = [row("a", [70.0, 71.0]), row("x", [72.0, 73.1])]
    there = [row("a", [50.0, 52.0], column="d"), row("x", [70.0, 71.5], column="d")]
    found = judged(s, *here, *there)
    assert found.word == "holds"
    assert found.detail == "a -2.05 against a -19.75"
    swapped = [row(**{"name": "a", "means": [30.0, 31.0]}), here[1]]
    assert judged(s, *swapped, *there).word == "does not hold"
    assert list(_verdicts(s, typed(here))) == []
    assert list(_verdicts(s, typed([*here, there[0]]))) == []


# Finished


def state(values: list[float], bound: float) -> bool | None:
    """Whether figures are surely above a bound."""
    ends = stats.t.interval(0.95, len(values) - 1, fmean(values), stats.sem(values))
    return None if ends[0] <= bound < ends[1] else ends[0] > bound


def paces(now: list[float], was: list[float], share: float) -> list[float]:
    """How much accuracy rises in a fifth, seed by seed."""
    return [(b - a) / (1 - share) / 5 for a, b in zip(was, now, strict=True)]


def test_what_still_improves_and_could_turn_a_verdict_is_unfinished() -> None:
    """Against the interval after each of five more fifths at the same pace."""
    draw, seen = random.Random(1), set()
    for _ in range(400):
        share = draw.choice([0.5, 0.75, 0.8])
        rows = {}
        for name in "ax":
            end = [draw.gauss(70, 0.4) + 3 * (name == "a") * draw.choice([0, 1]) for _ in range(3)]
            rise = draw.choice([0, 0, 0.3, 1, 4, -3])
            rows[name] = end, [value - rise - draw.gauss(0, 0.2) for value in end]
        gains = [a - x for a, x in zip(rows["a"][0], rows["x"][0], strict=True)]
        rises = {name: paces(*of, share) for name, of in rows.items()}
        still = {name: fmean(of) > max(0.5, stdev(of)) for name, of in rises.items()}
        widens = [a - x for a, x in zip(rises["a"], rises["x"], strict=True)]
        move = fmean(widens) if any(still.values()) and abs(fmean(widens)) > stdev(widens) else 0
        later = {state([g + k * move for g in gains], 0) for k in range(6)}
        found = judged(BETTER, *(row(n, *of, share=share) for n, of in rows.items()))
        words = {True: "holds", False: "does not hold", None: "undecided"}
        assert found.word == ("unfinished" if len(later) > 1 else words[state(gains, 0)])
        assert found.unfinished is (len(later) > 1)
        assert {name: f"{name} +" in found.progress for name in "ax"} == still
        seen.add(found.word)
    assert seen == {"unfinished", "holds", "does not hold", "undecided"}


def test_a_lead_that_holds_whatever_comes_is_not_unfinished() -> None:
    a, x = [90.0, 90.1, 90.2], [60.0, 60.2, 60.1]
    behind = row("x", x, [value - 2 for value in x])
    assert judged(BETTER, row("a", a, a), behind).word == "holds"
    catching_up = row("x", x, [value - 7 for value in x])
    assert judged(BETTER, row("a", a, a), catching_up).word == "unfinished"
    both = row("a", a, [value - 7 for value in a])
    assert judged(BETTER, both, catching_up).word == "holds"


def test_a_statement_with_a_failure_that_stays_does_not_hold() -> None:
    def condition(mean: float, move: float) -> Condition:
        return Condition("", [mean, mean + 0.1, mean - 0.1], 0.0, strict=True, move=move)

    turning, lost = condition(-2.0, 1.0), condition(-2.0, 0.0)
    assert Judgement([turning]).unfinished
    assert not Judgement([turning, lost]).unfinished
    assert Judgement([condition(3.0, 0.0), condition(2.0, -1.0)]).unfinished
    assert not Judgement([condition(3.0, 0.0), condition(2.0, 1.0)]).unfinished
    assert not Judgement(
        [Condition("", [0.0, 5.0, -4.0], 0.0)]
    ).unfinished  # undecided, and finished


def test_perplexity_still_improves_by_more_than_a_hundredth() -> None:
    def word(before: float) -> str:
        a = row("a", [100.0, 100.1], [100.0, 100.1], metric="perplexity")
        x = row("x", [101.0, 101.1], [101 + before, 101.1 + before], metric="perplexity")
        return judged(BETTER, a, x).word

    assert [word(0.9), word(1.2), word(-5.0)] == ["holds", "unfinished", "holds"]


def test_what_was_scored_once_is_unknown_and_said_to_be() -> None:
    found = judged(BETTER, row("a", [80.0, 81.0]), row("x", [70.0, 70.5], [70.0, 70.5]))
    assert (found.word, found.progress) == ("holds", "last fifth unknown of a")
    finished = judged(
        BETTER, row("a", [80.0, 81.0], [80.0, 81.0]), row("x", [70.0, 70.5], [70.0, 70.5])
    )
    assert finished.progress == "no row still improves"


# A run at four fifths


def result(rounds: int = 10, **figures: object) -> Result:
    [typed_result] = typed([classified("cobo", rounds=rounds, **figures)])
    return typed_result


@pytest.mark.parametrize(("rounds", "last"), [(10, 8), (5, 4), (3, 2)])
def test_an_earlier_result_is_that_of_the_last_evaluation_before(rounds: int, last: int) -> None:
    whole = result(rounds)
    then = at_share(whole, 0.8)
    assert then is not None
    assert then.mean == whole.evaluations[last - 1].test
    for i, client in then.clients.items():
        assert client.test == whole.evaluations[last - 1].clients[i].test
    assert then.best == max(e.test for e in whole.evaluations[:last])
    for seed in seed_figures(lambda r: r.mean, [whole], (), [Path()], ()):
        assert seed.earlier is not None
        assert seed.earlier.share == pytest.approx(last / rounds)
        assert (seed.mean, seed.earlier.mean) == (whole.mean, then.mean)
    [fused] = seed_figures(lambda r: r.mean, [whole], (), [Path()], (), fused=True)
    assert fused.earlier is None


def test_one_evaluation_says_nothing_of_before_unless_nothing_is_trained() -> None:
    whole = result(10)
    once = replace(whole, evaluations=whole.evaluations[-1:])
    assert at_share(once, 0.8) is None
    untrained = replace(whole, evaluations=(replace(whole.evaluations[-1], iteration=0),))
    assert at_share(untrained, 0.8) is untrained


def test_the_w_error_from_a_share_of_the_run_on_is_the_largest_there() -> None:
    """Weights that become those of the clusters step by step, against a count of wrong ones."""
    whole = result(11)
    [seed] = seed_figures(lambda r: r.mean, [whole], (), [Path()], ())
    clusters = [*(whole.clusters or {}).values()]
    wrong = []
    for evaluated in whole.evaluations:
        pairs = [
            ((i, j), weight > 0.5)
            for i, of in enumerate(evaluated.weights or ())
            for j, weight in enumerate(of)
            if i != j
        ]
        wrong.append(fmean((clusters[i] == clusters[j]) != big for (i, j), big in pairs))
    assert wrong[0] > wrong[-1] == 0
    for since in (0.0, 0.3, 0.9, 1.0):
        shares = [e.iteration / whole.evaluations[-1].iteration for e in whole.evaluations]
        expected = max(error for error, share in zip(wrong, shares, strict=True) if share >= since)
        own = row("a", [1.0, 1.0], course=[seed.course] * 2)
        found = judged(figure("weights_error", since=since, at_most=expected), own)
        assert found.holds
        if expected:
            below = figure("weights_error", since=since, at_most=expected - 1e-6)
            assert not judged(below, own).holds


# Figures of a row


def test_bytes_are_those_of_training_clients_in_a_round_against_another_row() -> None:
    whole = result(4)
    for client in whole.clients.values():
        object.__setattr__(client, "bytes_up", 600)
        object.__setattr__(client, "bytes_down", 1000)
    [seed] = seed_figures(lambda r: r.mean, [whole], (), [Path()], ())
    assert seed.figures["bytes"] == 1600 / 4
    rows = [row(n, [1.0] * 2, figures=[{"bytes": b}] * 2) for n, b in (("a", 300.0), ("x", 400.0))]
    halves = figure("bytes", against="x", at_least=-55, at_most=-45)
    assert judged(halves, *rows).word == "does not hold"
    found = judged(figure("bytes", against="x", at_least=-30, at_most=-20), *rows)
    assert (found.word, "-25 %" in found.detail) == ("holds", True)


def test_when_a_level_is_first_reached() -> None:
    def course(*means: float) -> list[list[tuple[float, float, None]]]:
        return [[((k + 1) / len(means), mean, None) for k, mean in enumerate(means)]] * 2

    a = row("a", [9.0] * 2, course=course(40, 61, 55, 70))
    x = row("x", [9.0] * 2, course=course(10, 20, 30, 65))
    never = row("x", [9.0] * 2, course=course(10, 20, 30, 40))
    alone = figure("reached", level=60, at_most=50)
    assert "as good of a 50 " in judged(alone, a).detail
    assert (
        judged(figure("reached", level=60, against="x", at_most=-30), a, x).detail.count("-50 %")
        == 1
    )
    assert "-50 %" in judged(figure("reached", level=60, against="x", at_most=-30), a, never).detail
    of_a_row = figure("reached", level="common", at_most=100)
    assert "as good of a 100 " in judged(of_a_row, a, row("common", [66.0, 66.0])).detail
    assert list(_verdicts(alone, typed([row("a", [9.0] * 2, course=course(61))]))) == []


TEXTS = {
    "ann": ["The", " model", " of", " the", " house", ",", " stands"],
    "ben": [" if", " x", " return", " and", " 7"],
}


def test_which_tokens_go_to_generalists(tmp_path: Path) -> None:
    """Two generalists and a specialist, against counts token by token."""
    draw = random.Random(2)
    weights = {
        model: {
            text: [[[draw.random() for _ in range(3)] for _ in tokens] for _ in range(3)]
            for text, tokens in TEXTS.items()
        }
        for model in TEXTS
    }
    experts = {model: {"generalists": 2, "specialists": 1} for model in TEXTS}
    routing = {"texts": TEXTS, "experts": experts, "weights": weights}
    (tmp_path / ROUTING).write_text(json.dumps(Routing.from_json(routing).to_json()))
    names = ["function_first", "function_last", "foreign_first", "foreign_last"]
    [seed] = seed_figures(lambda r: r.mean, [result(4)], (), [tmp_path], names)
    function = {"ann": [0, 2, 3], "ben": [0, 3]}
    content = {"ann": [1, 4, 6], "ben": [1, 2]}
    for block, ending in ((0, "first"), (2, "last")):
        gaps, foreign = [], []
        for model in TEXTS:
            chosen = {
                text: [max(range(3), key=of.__getitem__) < 2 for of in weights[model][text][block]]
                for text in TEXTS
            }
            share = {
                kind: fmean(chosen[model][k] for k in places[model])
                for kind, places in (("function", function), ("content", content))
            }
            gaps.append(100 * (share["function"] - share["content"]))
            [other] = set(TEXTS) - {model}
            foreign.append(100 * (fmean(chosen[other]) - fmean(chosen[model])))
        assert seed.figures[f"function_{ending}"] == pytest.approx(fmean(gaps))
        assert seed.figures[f"foreign_{ending}"] == pytest.approx(fmean(foreign))
    nothing = seed_figures(lambda r: r.mean, [result(4)], (), [tmp_path / "none"], names)
    assert not set(names) & nothing[0].figures.keys()


def test_a_figure_that_not_all_runs_have_is_not_judged() -> None:
    rows = [row("a", [1.0, 1.0], figures=[{"gate_accuracy": 90.0}, {}])]
    assert list(_verdicts(figure("gate_accuracy", at_least=80), typed(rows))) == []
    assert math.isinf(figure("gate_accuracy").at_most)
