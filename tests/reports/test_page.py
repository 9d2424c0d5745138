"""The report in a real browser, opened as a file: no requests, no errors, and every control does
what it says.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import opened
from figures import as_json, typed
from reports.samples import TEXT, classified, result, routing, write_metrics

from coterie.core.result.rows import row
from coterie.reports.html import write_comparison, write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

Make = Callable[..., str]


@pytest.fixture
def report(tmp_path: Path) -> Make:
    """Makes a report for so many clients; gives its address."""

    def make(count: int = 3) -> str:
        clients = {f"client-{k}": 20.0 + k for k in range(count - 1)} | {"<b>ben</b>": 30.0}
        (tmp_path / "routing.json").write_text(json.dumps(routing(tuple(clients))))
        write_metrics(tmp_path, tuple(clients))
        rows = [result(m, 4, shift, clients) for m, shift in (("local", 5.0), ("comigs-1g1s", 0.0))]
        write_report(tmp_path, typed(rows), "a description that goes on for a while")
        return (tmp_path / "report.html").as_uri()

    return make


def background(page: "Page", selector: str) -> str:
    return str(page.locator(selector).first.evaluate("e => getComputedStyle(e).backgroundColor"))


def shade(page: "Page", selector: str) -> tuple[tuple[float, ...], float]:
    """Red, green and blue of a background that lets the page's shine through, and how much of it
    there is.
    """
    *colour, fullness = map(float, re.findall(r"[\d.]+", background(page, selector)))
    return tuple(round(part, 2) for part in colour), fullness


def scrolls_sideways(page: "Page") -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def test_it_opens_from_disk_without_requests_or_messages(report: Make) -> None:
    address, requests, messages = report(), [], []
    with opened() as page:
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.goto(address)
        assert page.locator("h1").inner_text() == "r: CoMiGS-1G1S"
        assert page.locator("section").count() == 5
        assert page.locator(".cell").count() == 9
    assert [url for url in requests if not url.startswith("data:")] == [address]
    assert messages == []


def test_the_block_selector_changes_the_picture(report: Make) -> None:
    address = report()
    with opened() as page:
        page.goto(address)
        (generalist, whole), (specialist, _) = (
            shade(page, f".legend .{key}") for key in ("g0", "s0")
        )
        assert generalist != specialist
        token = ".cell.own .text .t"
        assert shade(page, token) == (
            specialist,
            pytest.approx(whole * 0.5, abs=0.01),
        )  # 25 and 75 %
        assert "underline" in page.locator(token).first.evaluate(
            "e => getComputedStyle(e).textDecorationLine"
        )
        page.get_by_text("first (1 of 5)").click()
        assert shade(page, token) == (
            generalist,
            pytest.approx(whole * 0.8, abs=0.01),
        )  # 90 and 10 %
        assert (
            page.locator(token).first.evaluate("e => getComputedStyle(e).textDecorationLine")
            == "none"
        )
        assert (
            page.locator(".cell.own .share:visible").first.inner_text()
            == "generalist 90 %, specialist 10 %"
        )
        page.keyboard.press("ArrowRight")  # the radio buttons by keyboard: the middle block
        assert page.locator("#block-middle").is_checked()
        assert shade(page, token) == (
            specialist,
            pytest.approx(whole * 0.2, abs=0.01),
        )  # 40 and 60 %


def test_weights_are_told_on_hover_by_keys_and_on_a_tap(report: Make) -> None:
    address = report()
    with opened() as page:
        page.goto(address)
        tip, tokens = page.locator("#tip"), page.locator(".cell.own").first.locator(".t")
        assert not tip.is_visible()
        tokens.nth(1).hover()
        assert tip.inner_text().split() == [
            "“alert(1)”",
            "generalist",
            "25.0",
            "%",
            "specialist",
            "75.0",
            "%",
        ]
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        tokens.nth(0).focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert TEXT[2] in tip.inner_text()
        page.locator("h1").hover()
        assert not tip.is_visible()
        tokens.nth(3).dispatch_event("pointerdown")
        assert "caf" in tip.inner_text()


def test_points_of_curves_tell_their_values(report: Make) -> None:
    address = report()
    with opened() as page:
        page.goto(address)
        page.locator("#training .panels:not(.broad) figure").first.locator(".target").nth(4).hover(
            force=True
        )
        assert page.locator("#tip").inner_text() == "CoMiGS-1G1S: 19.00 at 10 local iterations"


def test_it_follows_the_dark_scheme(report: Make) -> None:
    address = report()
    with opened(dark=True) as page:
        page.goto(address)
        assert background(page, "body") == "rgb(13, 17, 23)"
        assert (
            page.locator("svg .tick").first.evaluate("e => getComputedStyle(e).fill")
            == "rgb(157, 167, 177)"
        )
    with opened() as page:
        page.goto(address)
        assert background(page, "body") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("count", [3, 6])
def test_a_narrow_window_scrolls_only_downwards_and_shows_two_pictures(
    report: Make, count: int
) -> None:
    address = report(count)
    with opened(width=390) as page:
        page.goto(address)
        assert not scrolls_sideways(page)
        assert page.locator(".cell:visible h4").all_inner_texts() == [
            "model of client-0, own text",
            "model of client-0, text of client-1",
        ]


def test_many_clients_have_selectors(report: Make) -> None:
    address = report(6)
    with opened() as page:
        page.goto(address)
        assert page.locator(".cell:visible").count() == 2
        page.locator("select.model").select_option("<b>ben</b>")
        page.locator("select.text-of").select_option("client-3")
        shown = page.locator(".cell:visible h4").all_inner_texts()
        assert shown == ["model of <b>ben</b>, text of client-3", "model of <b>ben</b>, own text"]
        assert not scrolls_sideways(page)


def test_the_essentials_need_no_script(report: Make) -> None:
    address = report(6)
    with opened() as page:
        without = page.context.browser.new_context(java_script_enabled=False).new_page()
        without.goto(address)
        assert without.locator(".cell:visible").count() == 36
        before = (
            without.locator(".share-last").first.is_visible(),
            without.locator(".share-first").first.is_visible(),
        )
        without.get_by_text("first (1 of 5)").click()
        after = (
            without.locator(".share-last").first.is_visible(),
            without.locator(".share-first").first.is_visible(),
        )
        assert (before, after) == ((True, False), (False, True))
        assert without.locator("table").first.is_visible()


def test_a_comparison_fits_a_narrow_window(tmp_path: Path) -> None:
    rows = [
        as_json(row(m, typed([result(m, 4, shift), result(m, 4, shift + 1)])))
        for m, shift in (("local", 5.0), ("comigs-1g1s", 0.0))
    ]
    about = {key: result("local", 4, 0.0)[key] for key in ("recipe", "versions", "machine")}
    write_comparison(
        tmp_path,
        typed(about | {"rows": rows, "seeds": [0, 1], "notes": ["local: <b>unlike</b>"]}),
        "d",
    )
    with opened(width=390) as page:
        page.goto((tmp_path / "report.html").as_uri())
        assert not scrolls_sideways(page)
        page.locator(".dot").last.hover()
        assert page.locator("#tip").inner_text() == "CoMiGS-1G1S, <b>ben</b>: 26.50"


@pytest.fixture
def weighted(tmp_path: Path) -> str:
    """The address of the report of a classifier with collaboration weights."""
    write_report(tmp_path, typed([classified("local", -5.0), classified("cobo")]), "digits")
    return (tmp_path / "report.html").as_uri()


def fill(page: "Page", x: float, y: float) -> str:
    """The colour of what is drawn in the first heat map in field (x, y), of four times four."""
    find = """(map, [x, y]) => [...map.querySelectorAll("path[class^=w]")]
      .find((path) => path.isPointInFill(new DOMPoint(x + 0.5, y + 0.5)))"""
    path = page.locator("svg.heat").first.evaluate_handle(find, [x, y])
    return str(path.evaluate("path => getComputedStyle(path).fill"))


@pytest.mark.parametrize("dark", [False, True])
def test_the_slider_goes_through_training(weighted: str, dark: bool) -> None:
    with opened(dark) as page:
        page.on("console", lambda message: pytest.fail(message.text))
        page.goto(weighted)
        slider, told = page.locator("input.stage"), page.locator(".stages output")
        assert told.inner_text() == "30"
        within, between = fill(page, 1, 0), fill(page, 2, 0)
        assert within != between
        slider.focus()
        page.keyboard.press("Home")
        assert told.inner_text() == "10"
        assert slider.get_attribute("aria-valuetext") == "10 local iterations"
        assert fill(page, 1, 0) == fill(page, 2, 0)
        page.keyboard.press("ArrowRight")
        assert told.inner_text() == "20"
        page.keyboard.press("End")
        assert (fill(page, 1, 0), fill(page, 2, 0)) == (within, between)


def test_fields_tell_their_weights_to_a_pointer_and_to_keys(weighted: str) -> None:
    with opened() as page:
        page.goto(weighted)
        tip = page.locator("#tip")
        fields = page.locator("svg.heat .fields").first
        fields.scroll_into_view_if_needed()
        box = fields.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.875, box["y"] + box["height"] * 0.125)
        assert tip.inner_text() == "ann takes 0.10 from dan"
        page.mouse.move(box["x"] + box["width"] + 40, box["y"] - 30)
        assert not tip.is_visible()
        page.locator("input.stage").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Tab")
        assert tip.inner_text() == "ann takes 0.40 from dan"  # where the pointer was last
        page.keyboard.press("ArrowLeft")
        assert tip.inner_text() == "ann takes 0.40 from <b>ben</b>"
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")  # over the diagonal
        assert tip.inner_text() == "dan takes 0.40 from <b>ben</b>"
        page.keyboard.press("Escape")
        assert not tip.is_visible()


def test_collaboration_needs_no_script_and_fits_a_narrow_window(weighted: str) -> None:
    with opened(width=390) as page:
        page.goto(weighted)
        assert not scrolls_sideways(page)
        assert page.locator("input.stage").is_visible()
        without = page.context.browser.new_context(java_script_enabled=False).new_page()
        without.goto(weighted)
        assert not without.locator("input.stage").is_visible()
        assert without.locator("svg.heat").count() == 3
        assert without.locator("svg.heat").first.locator("path.w10").get_attribute("d")
