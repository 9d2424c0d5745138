"""The report as text: tables, curves, colours, and nothing that data could smuggle in."""

import json
import math
import re
from pathlib import Path

import pytest
from figures import as_json, typed
from reports.samples import ACCURACY, CLIENTS, TEXT, classified, result, routing, write_metrics

from coterie.core.result import Mixture
from coterie.core.result.rows import row, rows
from coterie.reports import chart, tokens
from coterie.reports.chart import Axes, Line, Style
from coterie.reports.html import write_comparison, write_report
from coterie.reports.parts import figure

ROWS = [result("pretrained", 0, 9.0), result("local", 4, 5.0), result("comigs-1g1s", 4, 0.0)]


@pytest.fixture
def routed(tmp_path: Path) -> str:
    """The report of a method with routers."""
    (tmp_path / "routing.json").write_text(json.dumps(routing()))
    write_metrics(tmp_path)
    write_report(tmp_path, typed(ROWS), "four <i>unlike</i> clients")
    return (tmp_path / "report.html").read_text()


def test_the_report_is_one_file_without_anything_from_elsewhere(routed: str) -> None:
    assert not re.search(r'(?:src|href)="(?!#|data:,")', routed)
    assert not re.search(r"url\(|@import|https?://", routed)
    for expected in (
        "Pretrained",
        "Local",
        "CoMiGS-1G1S",
        "21.00",
        "19.2 %</b> better than Local, the best other row: from 26.00 to 21.00",
        "<svg",
    ):
        assert expected in routed
    assert "<td class=best>21.00</td>" in routed
    assert "<td>26.00</td>" in routed


def test_what_comes_from_data_is_escaped(routed: str) -> None:
    for smuggled in ("<b>ben", "<i>unlike", "<script>alert", " <script>\n"):
        assert smuggled not in routed
    assert routed.count("<script>") == 1
    assert "&lt;script&gt;" in routed


def test_sections_are_there_only_where_there_is_something_to_show(
    routed: str, tmp_path: Path
) -> None:
    folder = tmp_path / "unrouted"
    write_report(folder, typed([result("fedavg", 4, 0.0)]), "")
    plain = (folder / "report.html").read_text()
    for section in ("texts", "routers"):
        assert f'<section id="{section}">' in routed
        assert f'href="#{section}"' in routed
        assert f'<section id="{section}">' not in plain
        assert f'href="#{section}"' not in plain
    assert "best other row" not in plain


def test_router_scores_have_a_line_for_each_block_and_kind(routed: str) -> None:
    section = routed[routed.index('id="routers"') : routed.index('id="texts"')]
    assert section.count("<figure>") == len(CLIENTS)
    assert section.count('class="line"') == len(CLIENTS) * 4 + 4  # and those of the legend
    assert "generalist, block 1: 0.80 at 40 local iterations" in section
    assert "specialist, block 1: 0.20 at 40 local iterations" in section
    assert "9.00" not in section  # what router steps saw on validation data


def test_known_routing_has_the_known_colours() -> None:
    page = tokens.routing(typed(routing(["ann"])))
    classes = re.findall(r'<span class="t ([^"]*)" style="[^"]*" data-w="([^"]*)">', page)
    assert len(classes) == len(TEXT)
    assert classes[0] == ("fg0 ms0 ls0", "900,100;400,600;250,750")
    assert classes[1] == ("fg0 mg0 ls0", "900,100;600,400;250,750")
    for shares in (
        "90 %, specialist 10 %",
        "49 %, specialist 51 %",
        "25 %, specialist 75 %",
    ):  # mean weights
        assert f"generalist {shares}" in page
    assert "first <small>(1 of 5)" in page
    assert "last <small>(5 of 5)" in page


def test_each_expert_has_a_colour_and_a_second_cue() -> None:
    mixture = tokens.experts(Mixture(2, 4))
    assert [e.name for e in mixture] == [
        "generalist 1",
        "generalist 2",
        *(f"specialist {k}" for k in range(1, 5)),
    ]
    assert len({e.cue for e in mixture}) == 6
    assert [e.name for e in tokens.experts(Mixture(1, 1))] == [
        "generalist",
        "specialist",
    ]


def test_a_client_with_one_expert_has_a_text_but_no_picture_of_its_own() -> None:
    found = routing(["ann", "ben"])
    del found["weights"]["ben"], found["experts"]["ben"]
    page = tokens.routing(typed(found))
    assert "text of <b>ben</b>" in page
    assert "model of <b>ben</b>" not in page


@pytest.mark.parametrize(
    ("blocks", "names"),
    [([0], ["only"]), ([0, 1], ["first", "last"]), ([0, 2, 4], ["first", "middle", "last"])],
)
def test_shallow_bases_have_fewer_blocks_to_choose_from(
    blocks: list[int], names: list[str]
) -> None:
    found = routing(["ann"]) | {"blocks": blocks, "depth": blocks[-1] + 1}
    found["weights"]["ann"]["ann"] = found["weights"]["ann"]["ann"][: len(blocks)]
    assert re.findall(r'id="block-(\w+)"', tokens.routing(typed(found))) == names


def test_points_lie_where_their_values_say() -> None:
    svg = chart.panel(
        "t",
        [Line([(0, 10.0), (5, 20.0), (10, math.inf)], "a", Style("#000"))],
        Axes("x", "y", (0, 20)),
    )
    targets = re.findall(r'class="target" cx="([\d.]+)%" cy="([\d.]+)"', svg)
    bottom, top = chart.HEIGHT - chart.BOTTOM, chart.TOP
    assert targets == [("0.00", f"{(top + bottom) / 2:.1f}"), ("100.00", f"{top:.1f}")]
    assert re.findall(r'text-anchor="end">([\d.]+)<', svg) == ["0", "5", "10", "15", "20"]


def test_a_diverged_method_does_not_break_the_page(tmp_path: Path) -> None:
    worst = result("local", 2, math.inf)
    write_report(tmp_path, typed([worst, result("comigs-1g1s", 2, 0.0)]), "")
    page = (tmp_path / "report.html").read_text()
    assert "∞" in page
    assert "nan" not in page


def test_of_many_clients_the_table_shows_the_ends_and_folds_the_rest(tmp_path: Path) -> None:
    clients = {f"client-{k}": 10.0 + k for k in range(20)}
    write_report(tmp_path, typed([result("local", 2, 0.0, clients)]), "")
    page = (tmp_path / "report.html").read_text()
    assert "best client" in page
    assert "<summary>All 20 clients</summary>" in page
    assert "<summary>16 more</summary>" in page


def test_of_very_many_clients_there_are_quantiles_and_the_worst_tenth(tmp_path: Path) -> None:
    """Perplexities 1 to 1000: what each line of the table must say is counted by hand."""
    values = {f"c{k}": float(k + 1) for k in range(1000)}
    found = result("fedavg", 1, 1.0, values)
    write_report(tmp_path, typed([found]), "")
    page = (tmp_path / "report.html").read_text()
    assert "1,000 clients, from the best to the worst" in page
    shown = dict(re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td>', page))
    wanted = {"best": 1, "10 %": 101, "25 %": 251, "median": 501, "75 %": 750, "90 %": 900}
    wanted |= {"worst": 1000, "mean of the worst tenth": 950.5}
    for name, value in wanted.items():
        assert float(shown[name].replace(",", "")) == pytest.approx(value, abs=1), name
    assert "c999 1,000.00, c998 999.00" in page
    assert len(set(re.findall(r"\bc\d+\b", page))) < 150  # no line for each


def test_it_says_when_texts_are_of_a_few_clients_only(routed: str, tmp_path: Path) -> None:
    write_report(tmp_path, typed([result("comigs-1g1s", 4, 0.0, CLIENTS | {"cleo": 9.0})]), "")
    assert "The first 2 of 3 clients." in (tmp_path / "report.html").read_text()
    assert "The first" not in routed


def test_figures_that_a_result_lacks_are_a_dash_not_a_zero(tmp_path: Path) -> None:
    older = result("local", 2, 0.0, peak_memory_bytes=None)
    for client in older["clients"].values():
        del client["state_bytes"]
    assert as_json(row("local", typed([older])))["state_bytes"] is None
    write_report(tmp_path, typed([older]), "")
    assert (tmp_path / "report.html").read_text().count("<td>-</td>") == 2


def test_unequal_budgets_are_said(tmp_path: Path) -> None:
    larger = result("local", 2, 0.0)
    for client in larger["clients"].values():
        client["trainable_parameters"] = 1500
    write_report(tmp_path, typed([larger, result("comigs-1g1s", 2, 0.0)]), "")
    assert (
        "local: +50% trainable parameters against comigs-1g1s"
        in (tmp_path / "report.html").read_text()
    )


def test_a_comparison_has_deviations_and_the_spread_between_clients(tmp_path: Path) -> None:
    rows = [
        as_json(row(m, typed([result(m, 4, shift), result(m, 4, shift + 1)])))
        for m, shift in (("local", 5.0), ("comigs-1g1s", 0.0))
    ]
    about = {key: ROWS[0][key] for key in ("recipe", "versions", "machine")}
    write_comparison(
        tmp_path,
        typed(about | {"rows": rows, "seeds": [0, 1], "notes": ["local: <b>unlike</b> `a<b`"]}),
        "<i>d</i>",
    )
    page = (tmp_path / "report.html").read_text()
    assert "21.50 ± 0.71" in page
    assert page.count('class="dot"') == 4
    assert "CoMiGS-1G1S, mean: 21.50 ± 0.71" in page
    assert "2 seeds (0, 1)" in page
    assert "local: &lt;b&gt;unlike&lt;/b&gt; <code>a&lt;b</code>" in page
    assert "<b>ben" not in page
    assert "<i>d" not in page


def test_a_classifier_is_told_in_its_own_metric(tmp_path: Path) -> None:
    results = [
        classified(m, shift) for m, shift in (("local", -4.0), ("oracle", 2.0), ("cobo", 0.0))
    ]
    write_report(tmp_path, typed(results), "digits")
    page = (tmp_path / "report.html").read_text()
    for expected in (
        "<h2>Test accuracy, %</h2>",
        "<b>71.50 %</b> mean test accuracy",
        "<b>4.0 points</b> better than Local, the best other row: from 67.50 to 71.50 %",
        "<b>100 %</b> of clients do better than alone",
        "higher is better",
        "MFLOPs per example, forward",
        "Mean over 4 clients",
        "Oracle: 73.50 at 30 local iterations",
        "oracle: is given the true clusters",
        'href="#weights">Collaboration</a>',
    ):
        assert expected in page
    assert re.findall(r'<th scope="row">(\w+)</th><td class=best>', page) == ["Oracle"]
    for absent in (
        "perplexity",
        "per token",
        "Lower is better",
        'id="routers"',
        'id="texts"',
        "nan",
    ):
        assert absent not in page
    scores = page[page.index('id="scores"') : page.index('id="training"')]
    assert re.findall(r"<td[^>]*>([^<]*)", scores)[:6] == [
        "67.50",
        "67.50",
        "0.500",
        "1.12",
        "-",
        "0.00",
    ]


def test_the_best_of_many_clients_is_the_one_with_the_highest_accuracy(tmp_path: Path) -> None:
    write_report(
        tmp_path,
        typed([classified("cobo", clusters={f"client-{k}": k // 2 for k in range(12)})]),
        "",
    )
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<td[^>]*>([\d.]+)</td><td[^>]*>([\d.]+)</td></tr>", page)[0] == (
        "81.00",
        "70.00",
    )


def test_a_comparison_shows_weights_error_curves_and_collaboration(tmp_path: Path) -> None:
    results = [
        classified(m, shift, seed=seed)
        for m, shift in (("local", -4.0), ("cobo", 0.0))
        for seed in (0, 1)
    ]
    for found in results:
        folder = tmp_path / found["method"] / f"seed-{found['seed']}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(found))
    about = {key: results[0][key] for key in ("recipe", "versions", "machine")}
    write_comparison(
        tmp_path,
        typed(about | {"rows": as_json(rows(typed(results))), "seeds": [0, 1], "notes": []}),
        "d",
    )
    page = (tmp_path / "report.html").read_text()
    assert ">W error</th>" in page
    assert ">Imp.%</th>" in page
    assert 'id="training"' in page
    assert 'id="weights"' in page
    assert "CoBo: 71.50 at 30 local iterations" in page


def test_results_of_language_models_are_of_perplexity(routed: str) -> None:
    assert "<h2>Test perplexity</h2>" in routed
    assert "lower is better" in routed
    assert "W error" not in routed
    assert '<th scope="col">loss</th>' not in routed
    assert ACCURACY["name"] not in routed


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (11320.456, "11,320.46"),
        (4e29, "4.00e+29"),
        (math.inf, "∞"),
    ],
)
def test_numbers_are_as_people_read_them(value: float, shown: str) -> None:
    assert figure(value) == shown
