"""What reports tell of lost replies and of privacy: sentences under the scores, a figure, and
curves.
"""

import json
import re
from pathlib import Path

import pytest
from figures import as_json, typed
from reports.samples import result

from coterie.core.result.rows import comparability, rows
from coterie.reports import chart
from coterie.reports.chart import Line, Style
from coterie.reports.html import write_comparison, write_report

PRIVACY = {
    "epsilon": 3.912,
    "delta": 1e-5,
    "where": "central",
    "noise": 6.0,
    "clip": 8.0,
    "sampling": "4 exchanges",
    "covers": "<i>this</i>",
}


def report(folder: Path, lines: list[dict], **figures: object) -> str:
    """The page of a run of four rounds with these lines of metrics.jsonl."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder, typed([result("fedavg", 4, 0.0, **figures)]), "")
    return (folder / "report.html").read_text()


def spent(epsilon: float | None, clip: float, round: int) -> dict:
    about = {
        "kind": "privacy",
        "round": round,
        "iteration": 10 * round,
        "client": "",
        "delta": 1e-5,
        "clip": clip,
    }
    return about if epsilon is None else about | {"epsilon": epsilon}


def test_a_run_without_either_says_nothing(tmp_path: Path) -> None:
    page = report(tmp_path, [], lost={}, privacy=None)
    for absent in ("lost", "epsilon", 'id="privacy"', 'href="#privacy"'):
        assert absent not in page


def test_lost_replies_are_told_under_the_scores(tmp_path: Path) -> None:
    page = report(tmp_path, [], lost={"<b>ben</b>": 3, "ann": 1})
    scores = page[page.index('id="scores"') : page.index('id="training"')]
    assert (
        "fedavg: 4 replies were lost, rejected as invalid or missing (&lt;b&gt;ben&lt;/b&gt; 3, "
        "ann 1)" in scores
    )


def test_privacy_is_a_sentence_a_figure_and_two_curves(tmp_path: Path) -> None:
    lines = [
        spent(0.5 * r + k / 10, 8.0 - r, r) for r in (1, 2, 3, 4) for k in (0, 1)
    ]  # two exchanges in each round
    page = report(tmp_path, lines, privacy=PRIVACY)
    assert (
        "epsilon 3.91, delta 1e-05 (central, noise z = 6, clip C = 8): 4 exchanges. It covers "
        "&lt;i&gt;this&lt;/i&gt;." in page
    )
    assert "<b>3.91</b> epsilon at delta 1e-05, central" in page
    assert 'href="#privacy">Privacy</a>' in page
    assert re.findall(r"Epsilon at delta 1e-05: ([\d.]+) at (\d) rounds", page) == [
        (f"{0.5 * r + 0.1 * (r > 0):.2f}", str(r)) for r in range(5)
    ]
    assert re.findall(r"Clipping norm C: ([\d.]+) at (\d) rounds", page) == [
        (f"{8 - r:.2f}", str(r)) for r in range(5)
    ]


def test_what_stays_as_it_is_or_is_infinite_has_no_curve(tmp_path: Path) -> None:
    fixed = report(tmp_path, [spent(0.5 * r, 8.0, r) for r in (1, 2, 3, 4)], privacy=PRIVACY)
    assert "Epsilon at delta" in fixed
    assert "Clipping norm" not in fixed
    tried = report(
        tmp_path,
        [spent(2.0, 8.0, 4)],
        privacy=PRIVACY | {"experiment": True, "assumes": "an <i>experiment</i>"},
    )
    assert "epsilon, of an experiment, at delta 1e-05" in tried
    assert "It assumes: an &lt;i&gt;experiment&lt;/i&gt;." in tried
    assert "experiment" not in fixed
    endless = report(
        tmp_path, [spent(None, 8.0, r) for r in (1, 2, 3, 4)], privacy=PRIVACY | {"epsilon": None}
    )
    assert 'id="privacy"' not in endless
    assert "no finite epsilon" in endless
    assert "epsilon at delta" not in endless


def test_a_comparison_tells_both(tmp_path: Path) -> None:
    results = [result(m, 4, 0.0, lost={"ann": 2}, privacy=PRIVACY) for m in ("fedavg", "ditto")]
    table = as_json(rows(typed(results)))
    about = {key: results[0][key] for key in ("recipe", "versions", "machine")}
    write_comparison(
        tmp_path,
        typed(about | {"rows": table, "seeds": [0], "notes": comparability(typed(table))}),
        "",
    )
    page = (tmp_path / "report.html").read_text()
    assert page.count("2 replies were lost") == 2
    assert page.count("fedavg, ditto: epsilon 3.91") == 1


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (20, ["0", "5", "10", "15", "20"]),
        (45_000, ["0", "10k", "20k", "30k", "40k"]),
        (2e6, ["0", "500k", "1M", "1.5M", "2M"]),
        (1e30, ["0", "2e+29"]),
    ],
)
def test_large_figures_leave_room_for_the_name_of_their_axis(top: float, ticks: list[str]) -> None:
    svg = chart.panel(
        "t", [Line([(0, 0.0), (5, top)], "a", Style("#000"))], chart.Axes("x", "y", (0, top))
    )
    assert re.findall(r'text-anchor="end">([^<]+)<', svg)[: len(ticks)] == ticks
