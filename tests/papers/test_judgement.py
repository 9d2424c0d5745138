"""What a paper's statement comes to over seeds: paired differences, their interval, and the verdict
by it.
"""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
from figures import typed
from reports.samples import classified
from scipy import stats

from coterie.papers.checks import Condition, Judgement, _verdicts
from coterie.papers.reproduced import SeedFigures, Verdict, seed_figures
from coterie.papers.tables import Better, Favours, Improved, Lower, Near, Reproduction


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    """Of scipy's, on the two rows themselves."""
    ours, theirs = [41.2, 40.7, 41.9, 40.1], [43.0, 42.9, 43.4, 41.0]
    part = Condition("", [b - a for a, b in zip(ours, theirs, strict=True)])
    found = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    assert part.interval == pytest.approx((found.low, found.high))


def row(name: str, means: list[float], **clients: list[float]) -> dict:
    seeds = [
        asdict(SeedFigures(mean, {i: values[k] for i, values in clients.items()}))
        for k, mean in enumerate(means)
    ]
    return {"row": name, "title": name, "column": "c", "mean": 0.0, "std": 0.0, "seeds": seeds}


LOWER = Lower(says="s", source="p", columns=("c",), lower=("a",), than=("x",))


def judged(statement: Lower | Better | Near | Improved, *rows: dict) -> Verdict:
    [verdict] = _verdicts(statement, typed(rows))
    return verdict


def test_what_a_seed_does_to_both_rows_cancels() -> None:
    """Rows that spread by 10 over seeds, but always differ by about 1."""
    a, x = row("a", [30.0, 40.0, 50.0]), row("x", [31.0, 40.9, 51.1])
    verdict = judged(LOWER, a, x)
    assert (verdict.word, verdict.surely) == ("holds", True)
    assert "gain of a over x +1.00 (interval +0.75 to +1.25)" in verdict.by
    assert judged(LOWER, row("a", [31.0, 40.9, 51.1]), row("x", [30.0, 40.0, 50.0])).word == (
        "does not hold"
    )


def test_a_difference_that_seeds_alone_may_make_is_undecided() -> None:
    verdict = judged(LOWER, row("a", [1.0, 2.0, 3.0]), row("x", [2.0, 1.5, 5.0]))
    assert verdict.holds
    assert (verdict.word, verdict.state) == ("undecided", None)


def test_a_single_seed_has_no_interval_and_is_judged_by_itself() -> None:
    verdict = judged(LOWER, row("a", [1.0]), row("x", [2.0]))
    assert (verdict.word, verdict.surely, verdict.by) == ("holds", None, "")


def test_rows_without_chance_are_decided() -> None:
    assert judged(LOWER, row("a", [1.0] * 3), row("x", [2.0] * 3)).word == "holds"
    assert judged(LOWER, row("a", [2.0] * 3), row("x", [2.0] * 3)).word == "does not hold"


def test_every_part_of_a_statement_must_hold() -> None:
    s = LOWER.model_copy(update={"than": ("x", "y")})
    a, x, y = row("a", [1.0, 1.1, 0.9]), row("x", [5.0, 5.1, 5.2]), row("y", [1.0, 1.3, 0.6])
    assert judged(s, a, x, y).word == "undecided"
    assert "gain of a over y" in judged(s, a, x, y).by  # the part that decides
    worse = row("y", [0.5, 0.55, 0.45])
    assert judged(s, a, x, worse).word == "does not hold"


def test_clients_and_seeds_that_agree_are_counted() -> None:
    a = row("a", [2.0, 2.0], ann=[1.0, 1.0], ben=[3.0, 3.0])
    x = row("x", [3.0, 3.0], ann=[2.0, 2.0], ben=[4.0, 2.5])
    assert "for 3 of 4 clients and seeds" in judged(LOWER, a, x).by


def test_a_statement_of_some_clients_is_paired_over_these() -> None:
    a = row("a", [9.0, 9.0], ann=[1.0, 1.2], ben=[17.0, 17.0])
    x = row("x", [3.0, 3.0], ann=[2.0, 2.2], ben=[4.0, 4.0])
    assert judged(LOWER.model_copy(update={"clients": ("ann",)}), a, x).word == "holds"
    assert judged(LOWER, a, x).word == "does not hold"


def test_near_is_the_share_of_each_seed_against_its_bound() -> None:
    s = Near(kind="near", says="", source="", columns=("c",), row="a", best_of=("x",), within=0.05)
    assert judged(s, row("a", [10.1, 20.3]), row("x", [10.0, 20.0])).word == "holds"
    close = judged(s, row("a", [10.1, 20.9]), row("x", [10.0, 20.0]))
    assert close.word == "undecided"
    assert "a against x +2.75 % (interval" in close.by


def test_what_holds_only_with_something_else_says_so() -> None:
    s = LOWER.model_copy(update={"only_with": {"the leak": {"a": "leaky"}}})
    a, x = row("a", [3.0, 3.1, 3.2]), row("x", [2.0, 2.1, 2.3])
    better, worse = row("leaky", [1.0, 1.1, 1.2]), row("leaky", [4.0, 4.1, 4.2])
    assert judged(s, a, x, better).word == "holds only with the leak"
    assert judged(s, a, x, worse).word == "does not hold"
    assert judged(s, a, x).word == "does not hold"
    assert judged(s, row("a", [1.0, 1.1, 1.3]), x, worse).word == "holds"


def test_rows_that_stand_in_must_be_rows() -> None:
    known = {"columns": {}, "rows": {}, "title": ""}
    other = {"says": "", "source": "", "columns": [], "lower": [], "than": []}
    with pytest.raises(ValueError, match="no such row or column: ghost"):
        Reproduction.model_validate(
            known | {"statements": [other | {"only_with": {"x": {"ghost": "ghost"}}}]}
        )


def test_whom_a_client_favours_is_judged_against_each_other_client() -> None:
    s = Favours(kind="favours", says="", source="", columns=("c",), row="a", client="ca", most="es")

    def weighted(*weights: tuple[float, float, float]) -> dict:
        seeds = [
            asdict(SeedFigures(0.0, {}, weights={"ca": {"es": es, "de": de, "nl": nl}}))
            for es, de, nl in weights
        ]
        return row("a", []) | {"seeds": seeds}

    clear = judged(s, weighted((0.5, 0.3, 0.2), (0.52, 0.3, 0.18), (0.51, 0.29, 0.2)))
    assert clear.word == "holds"
    assert "es 0.510, de 0.297, nl 0.193" in clear.detail
    assert "above that for de by +0.213" in clear.by
    open_ = judged(s, weighted((0.5, 0.3, 0.2), (0.3, 0.32, 0.38), (0.4, 0.3, 0.3)))
    assert open_.word == "undecided"


def test_weights_are_means_over_evaluations() -> None:
    plain = classified("local")
    for evaluated in plain["evaluations"]:
        evaluated.pop("weights")
    results = typed([classified("cobo"), plain])
    with_weights, without = (
        seed_figures([0.0], [result], (), [Path()], {"weights"})[0].weights for result in results
    )
    assert without is None
    assert with_weights is not None
    clients = list(results[0].clients)
    at = [e.weights[0][1] for e in results[0].evaluations if e.weights is not None]
    assert with_weights[clients[0]][clients[1]] == pytest.approx(sum(at) / len(at))


def test_what_is_not_finite_has_no_interval() -> None:
    assert Condition("", [1.0, math.inf]).interval is None
    assert Judgement([Condition("", [1.0, math.inf])]).surely is None
