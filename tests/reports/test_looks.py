"""What a page looks like in a real browser: letters of one size, full rows, charts that can be
compared, and charts folded away.
"""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from browser import opened
from figures import as_json, typed
from reports.samples import CLIENTS, TEXT, classified, pooled, result, routing, write_metrics

from coterie.core.result.rows import rows
from coterie.reports import chart, marks, tokens
from coterie.reports.chart import Line, Style
from coterie.reports.html import write_comparison, write_report
from coterie.reports.marks import Interval
from coterie.reports.parts import page as whole_page

WIDTHS = (1280, 390)
LETTERS = """all => [...new Set(all.map(t => {
  const { a, b } = t.getScreenCTM();
  return (parseFloat(getComputedStyle(t).fontSize) * Math.hypot(a, b)).toFixed(1); }))]"""
GAPS = """all => all.filter(e => e.offsetParent && e.children.length > 1).map(e => {
  const last = e.lastElementChild.getBoundingClientRect(), whole = e.getBoundingClientRect();
  return Math.abs(whole.right - last.right); })"""


def unlike(count: int) -> dict[str, float]:
    """Clients whose perplexities are far apart."""
    return {f"client-{k}": 10.0 + 9 * k for k in range(count)}


def panels(page: str, start: str, stop: str) -> list[str]:
    """The charts of a part of a page."""
    part = page[page.index(start) : page.index(stop)]
    return re.findall(r'<svg class="plot".*?</figure>', part, re.DOTALL)


def heights(panel: str) -> list[str]:
    """What stands beside the vertical axis."""
    return re.findall(r'<text class="tick"[^>]*text-anchor="end">([^<]*)', panel)


@pytest.fixture
def kinds(tmp_path: Path) -> list[str]:
    """Addresses of pages with charts of every kind."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/routing.json").write_text(json.dumps(routing()))
    write_metrics(tmp_path / "a")
    write_report(
        tmp_path / "a",
        typed([result(m, 4, shift) for m, shift in (("local", 5.0), ("comigs-1g1s", 0.0))]),
        "",
    )
    write_report(tmp_path / "b", typed([classified("local", -5.0), classified("cobo")]), "")
    write_report(tmp_path / "c", typed([pooled("fedavg", -5.0, gate=False), pooled("ddome")]), "")
    seeds = [
        pooled(m, shift + seed, gate=m == "ddome", seed=seed)
        for m, shift in (("fedavg", -5.0), ("ddome", 0.0))
        for seed in (0, 1)
    ]
    about = {key: seeds[0][key] for key in ("recipe", "versions", "machine")}
    write_comparison(
        tmp_path / "d",
        typed(about | {"rows": as_json(rows(typed(seeds))), "seeds": [0, 1], "notes": []}),
        "",
    )
    row = Interval(5, 4, 6, "told", "#000")
    drawn = marks.intervals({"a row": row}, "x", (0, 10), 5)
    (tmp_path / "e.html").write_bytes(whole_page("t", "", drawn))
    return [
        (tmp_path / name).as_uri() for name in (*(f"{k}/report.html" for k in "abcd"), "e.html")
    ]


def test_letters_have_one_size_in_all_charts_and_windows_and_rows_are_full(
    kinds: list[str],
) -> None:
    with opened() as page:
        for width, address in product(WIDTHS, kinds):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.locator("svg text").evaluate_all(LETTERS) == ["12.0"], address
            assert max(page.locator(".tiles, .panels").evaluate_all(GAPS), default=0) < 3, address


def test_rows_are_full_however_many_clients_there_are(tmp_path: Path) -> None:
    with opened(width=1280) as page:
        for count in (1, 3, 5, 7, 14):
            write_report(tmp_path, typed([result("local", 2, 0.0, unlike(count))]), "")
            page.goto((tmp_path / "report.html").as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert max(page.locator(".tiles, .panels").evaluate_all(GAPS), default=0) < 3, count


@pytest.mark.parametrize(
    ("count", "least"), [(1, 1), (3, 3), (4, 4), (5, 3), (6, 3), (7, 4), (9, 3), (13, 4)]
)
def test_figures_are_dealt_to_rows_of_about_as_many(count: int, least: int) -> None:
    assert f"--columns:{least}" in chart.grid(["<figure></figure>"] * count)


def test_clients_are_compared_on_one_range(tmp_path: Path) -> None:
    write_report(
        tmp_path,
        typed([result(m, 4, shift, unlike(4)) for m, shift in (("local", 5.0), ("fedavg", 0.0))]),
        "",
    )
    page = (tmp_path / "report.html").read_text()
    charts = panels(page, "Client by client", 'id="costs"')
    assert len(charts) == 4
    assert len({tuple(heights(c)) for c in charts}) == 1
    ends = [float(label) for label in heights(charts[0])]
    assert ends[0] <= 15
    assert ends[-1] >= 30  # from the best client's to the worst's
    places = [
        [float(y) for y in re.findall(r'class="target" cx="[^"]*" cy="([^"]*)"', c)] for c in charts
    ]
    assert max(places[0]) > max(places[3])  # what is lower on the page is lower in perplexity


def test_a_single_point_is_drawn_where_no_line_can_be() -> None:
    quiet = Style("black", marked=False)
    one, two = ({"a": [Line([(1, 0.5), (2, 0.4)][:n], "a", quiet)]} for n in (1, 2))
    marker = '<svg x="100.00%"'
    assert marker in chart.panels(one, "x", "y")
    assert marker not in chart.panels(two, "x", "y")


def test_a_wide_range_of_perplexities_is_logarithmic() -> None:
    lines = {
        "a": [Line([(0, 2000.0), (1, 20.0)], "m", Style("#000"))],
        "b": [Line([(0, 200.0), (1, 20.0)], "m", Style("#000"))],
    }
    drawn = chart.panels(lines, "x", "perplexity", ratios=True)
    assert drawn.count(">perplexity, logarithmic</text>") == 2
    above = [float(y) for y in re.findall(r'class="target" cx="0.00%" cy="([^"]*)"', drawn)]
    below = [float(y) for y in re.findall(r'class="target" cx="100.00%" cy="([^"]*)"', drawn)]
    assert below[0] == below[1]
    assert below[0] - above[0] == pytest.approx(2 * (below[1] - above[1]), abs=0.3)
    assert "logarithmic" not in chart.panels(lines, "x", "accuracy")


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((20.0, 600.0), ["20", "50", "100", "200", "500"]),
        ((20.0, 90_000.0), ["100", "1000", "10k", "100k"]),
    ],
)
def test_a_logarithmic_range_has_ticks_within_a_decade_if_it_has_few(
    ends: tuple[float, float], ticks: list[str]
) -> None:
    lines = {"a": [Line([(0, ends[1]), (1, ends[0])], "m", Style("#000"))]}
    assert heights(chart.panels(lines, "x", "perplexity", ratios=True)) == ticks


def test_the_untrained_base_has_no_curve(tmp_path: Path) -> None:
    """It would press those of trained models together; a run of it alone shows it."""
    trained = [result(m, 4, shift, unlike(3)) for m, shift in (("local", 5.0), ("fedavg", 0.0))]
    base = result("pretrained", 0, 200.0, unlike(3))
    write_report(tmp_path, typed([base, *trained]), "")
    page = (tmp_path / "report.html").read_text()
    (whole,) = panels(page, 'id="training"', "Client by client")
    for panel in (whole, *panels(page, "Client by client", 'id="costs"')):
        assert "Pretrained" not in panel
        assert panel.count("<title>") == 2 * 4
    write_report(tmp_path, typed([base]), "")
    page = (tmp_path / "report.html").read_text()
    assert "Pretrained: " in panels(page, 'id="training"', "Client by client")[0]


def test_only_panels_of_one_kind_share_a_range() -> None:
    lines = {
        t: [Line([(0, least), (1, 2 * least)], "m", Style("#000"))]
        for t, least in (("a", 1.0), ("b", 2.0), ("c", 500.0))
    }
    one, two, three = panels(
        chart.panels(lines, "x", "y", kinds={"a": "near", "b": "near", "c": "far"}) + "STOP",
        "<div",
        "STOP",
    )
    assert heights(one) == heights(two) != heights(three)
    assert (
        len(
            {
                tuple(heights(p))
                for p in panels(chart.panels(lines, "x", "y") + "STOP", "<div", "STOP")
            }
        )
        == 1
    )


def test_charts_of_many_clients_are_folded_away_and_all_of_them_on_a_phone(tmp_path: Path) -> None:
    write_report(tmp_path, typed([result("local", 4, 0.0, unlike(30))]), "")
    visible = "all => all.filter(figure => figure.checkVisibility()).length"
    with opened() as page:
        for width, shown in ((1280, 4), (390, 0)):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto((tmp_path / "report.html").as_uri())
            figures = page.locator("#training .panels:not(.broad) figure")
            assert figures.count() == 24
            assert figures.evaluate_all(visible) == shown
            page.get_by_text("20 more").click()
            assert figures.evaluate_all(visible) == shown + 20
    write_report(tmp_path, typed([result("local", 4, 0.0, unlike(6))]), "")
    assert "The first" not in (tmp_path / "report.html").read_text()


def test_every_group_of_unseen_clients_is_in_cards_table_verdict_curves_and_maps(
    tmp_path: Path,
) -> None:
    write_report(tmp_path, typed([pooled("fedavg", -5.0, gate=False), pooled("ddome")]), "")
    page = (tmp_path / "report.html").read_text()
    cards = page[page.index('<ul class="tiles"') : page.index('id="scores"')]
    scores = page[page.index('id="scores"') : page.index('id="training"')]
    for group, accuracy, best_other in (
        ("aligned", "90.00", "85.00"),
        ("random", "60.00", "65.00"),
    ):
        assert f"<b>{accuracy} %</b> mean test accuracy of {group} (unseen)" in cards
        assert f"the best other row of {group} (unseen): from {best_other} to {accuracy} %" in cards
        assert f"gate accuracy of {group} (unseen)" in cards
        assert f">{group} (unseen)</th>" in scores
        assert f"{group} (unseen) ({accuracy} % against {best_other} %)" in scores
    charts = panels(page, 'id="training"', "Client by client")
    assert [re.findall('aria-label="([^"]*)', c)[0] for c in charts] == [
        f"Mean of {group} (unseen): test accuracy, % against rounds"
        for group in ("aligned", "random")
    ]
    assert heights(charts[0]) == heights(charts[1])
    training = page[page.index("Client by client") : page.index('id="labels"')]
    assert re.findall("<summary>([^<]*)", training) == [
        "2 clients, aligned (unseen)",
        "1 client, random (unseen)",
    ]
    assert len({tuple(heights(c)) for c in panels(page, "Client by client", 'id="labels"')}) == 1
    maps = page[page.index('id="experts"') : page.index("<h3>Gate accuracy")]
    assert "Test samples, aligned (unseen)" in maps
    assert "<summary>The same of random (unseen)</summary>" in maps


def test_a_token_is_as_full_of_colour_as_its_largest_weight_is_large() -> None:
    found = routing(["ann"])
    given = [[0.9, 0.1], [1.0, 0.0], [0.5, 0.5], [0.1, 0.9], *[[0.0, 1.0]] * (len(TEXT) - 4)]
    found["weights"]["ann"]["ann"] = [given] * 3
    fullness = re.findall(
        r'<span class="t (f[gs]0) [^"]*" style="--f:(\d+);--m:\d+;--l:\d+"',
        tokens.routing(typed(found)),
    )
    assert fullness[:5] == [
        ("fg0", "80"),
        ("fg0", "100"),
        ("fg0", "0"),
        ("fs0", "80"),
        ("fs0", "100"),
    ]
    assert tokens.lead([0.6, 0.2, 0.2]) == pytest.approx(0.4)
    assert tokens.lead([1.0]) == 1


@pytest.mark.parametrize("dark", [False, True])
def test_ninety_to_ten_does_not_look_like_all_to_one(tmp_path: Path, dark: bool) -> None:
    found = routing(tuple(CLIENTS))
    given = [[0.9, 0.1], [1.0, 0.0], *[[0.5, 0.5]] * (len(TEXT) - 2)]
    found["weights"]["ann"]["ann"] = [given] * 3
    (tmp_path / "routing.json").write_text(json.dumps(found))
    write_report(tmp_path, typed([result("comigs-1g1s", 4, 0.0)]), "")
    with opened(dark) as page:
        page.goto((tmp_path / "report.html").as_uri())
        shades = (
            page.locator(".cell.own")
            .first.locator(".t")
            .evaluate_all("all => all.map(t => getComputedStyle(t).backgroundColor)")
        )
    alphas = [float(re.findall(r"[\d.]+", shade)[-1]) for shade in shades]
    assert alphas[1] - alphas[0] > 0.1
    assert alphas[2] == 0
    assert alphas[0] == pytest.approx(0.8 * alphas[1], abs=0.01)
