"""What a paper's statement comes to over seeds: paired differences, their interval, and the verdict
by it.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from figures import typed
from reports.samples import classified
from scipy import stats

from coterie.papers.checks import _verdicts
from coterie.papers.figures import Condition, Judgement, SeedFigures, _weights_error, seed_figures
from coterie.papers.reproduced import Verdict
from coterie.papers.tables import Better, Figure, Near, Reproduction


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


LOWER = Better(says="s", source="p", columns=("c",), better=("a",), than=("x",))


def judged(statement: Better | Near | Figure, *rows: dict) -> Verdict:
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


NEAR = Near(
    kind="near", says="", source="", columns=("c",), rows=("a",), best_of=("x",), within=0.05
)


def test_near_is_the_share_of_each_seed_against_its_bound() -> None:
    s = NEAR
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


def test_a_row_may_stand_in_on_either_side() -> None:
    """A row with the leak is compared with another one with the leak."""
    s = LOWER.model_copy(update={"only_with": {"the leak": {"a": "leaky a", "x": "leaky x"}}})
    a, x = row("a", [3.0, 3.1, 3.2]), row("x", [2.0, 2.1, 2.3])
    leaky = row("leaky a", [5.0, 5.1, 5.2])
    other = row("leaky x", [6.0, 6.2, 6.1])
    assert judged(s, a, x, leaky, other).word == "holds only with the leak"
    assert judged(s, a, x, leaky, row("leaky x", [4.0, 4.1, 4.2])).word == "does not hold"
    assert judged(s, a, x, leaky).word == "does not hold"  # not all were run


def test_rows_that_stand_in_must_be_rows() -> None:
    known = {"columns": {}, "rows": {}, "title": ""}
    other = {"says": "", "source": "", "columns": [], "better": [], "than": []}
    with pytest.raises(ValueError, match="no such row or column: ghost"):
        Reproduction.model_validate(
            known | {"statements": [other | {"only_with": {"x": {"ghost": "ghost"}}}]}
        )


def test_whom_a_client_favours_is_judged_against_the_next_of_the_others() -> None:
    s = Figure(
        kind="figure",
        figure="favour ca es",
        row="a",
        at_least=0,
        strict=True,
        says="",
        source="",
        columns=("c",),
    )

    def weighted(*weights: tuple[float, float, float]) -> dict:
        """Weights of ca for es, de and nl in two evaluations, the second the first's mean."""
        seeds = []
        for es, de, nl in weights:
            evaluations = [
                {"round": k, "iteration": k, "test": 1.0, "weights": [[0, *row], *[[0] * 4] * 3]}
                for k, row in ((1, (es - 0.1, de, nl)), (2, (es + 0.1, de, nl)))
            ]
            clients = {i: {"test": 1.0} for i in ("ca", "es", "de", "nl")}
            own = {"clients": clients, "rounds": 2, "evaluations": evaluations, "wall_s": 1.0}
            [result] = typed([own | {"mean": 1.0, "mean_synced": 1.0}])
            seeds += seed_figures(lambda r: r.mean, [result], (), [Path()], {"favour ca es"})
        return row("a", []) | {"seeds": [asdict(seed) for seed in seeds]}

    clear = judged(s, weighted((0.5, 0.3, 0.2), (0.52, 0.3, 0.18), (0.51, 0.29, 0.2)))
    assert clear.word == "holds"
    assert "of a +0.213" in clear.by
    assert (
        judged(s, weighted((0.5, 0.3, 0.2), (0.3, 0.32, 0.38), (0.4, 0.3, 0.3))).word == "undecided"
    )


def test_who_has_no_weights_favours_nobody() -> None:
    plain = classified("local")
    for evaluated in plain["evaluations"]:
        evaluated.pop("weights")
    [result] = typed([plain])
    one, other = [*result.clients][:2]
    [seed] = seed_figures(lambda r: r.mean, [result], (), [Path()], {f"favour {one} {other}"})
    assert not any(name.startswith("favour") for name in seed.figures)


def test_what_is_not_finite_has_no_interval() -> None:
    assert Condition("", [1.0, math.inf]).interval is None
    assert Judgement([Condition("", [1.0, math.inf])]).surely is None


@pytest.mark.parametrize("size", [2, 3, 6])
def test_perfect_weights_in_five_digits_have_no_error(size: int) -> None:
    """Thirds of five digits do not sum to 1."""
    clusters = {f"c{k}": int(k < size) for k in range(2 * size)}
    share = round(1 / size, 5)
    result = typed(classified("fc", clusters=clusters))
    rows = [[share * (a == b) for b in clusters.values()] for a in clusters.values()]
    evaluated = replace(result.evaluations[-1], weights=rows)
    assert _weights_error(result, evaluated) == pytest.approx(0, abs=1e-3)
