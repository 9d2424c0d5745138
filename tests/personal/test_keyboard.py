"""The page in a real browser: one types, sees suggestions in the experts' colours, and chooses
one.
"""

import re
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import torch
from browser import browser_page, opened  # noqa: F401

import coterie
from coterie.core.errors import Refused
from coterie.models.layout import Layout
from coterie.personal import ManyModels
from coterie.personal.ui import keyboard
from coterie.personal.ui.keyboard import (
    BASE,
    EXAMPLES,
    OFFERED,
    SHOWN,
    most_disputed,
    offered,
    own_examples,
    with_base,
)
from coterie.personal.word_search import Word
from coterie.reports.parts import COLOURS

pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
from coterie.personal.ui.page import served


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def models(make_run):
    return coterie.load_all(
        make_run(
            "few",
            ann=Layout(specialists=2, rank=2),
            ben=Layout(rank=2, routing="equal"),
            cleo=Layout(rank=2),
        )
    )


@pytest.fixture
def address(models):
    with served(models, free_port()) as address:
        yield address


def shown(page) -> list[str]:
    return [button.inner_text() for button in page.locator("button.word").all()]


def settle(page, models, text: str) -> list[str]:
    """Wait until the suggestions are those of `text`, and return their words."""
    words = {client: model.next_words(text, SHOWN) for client, model in with_base(models).items()}
    wanted = [word.word for of_client in words.values() for word in of_client]
    page.wait_for_function(
        "n => document.querySelectorAll('button.word:not([hidden])').length == n", arg=len(wanted)
    )
    page.wait_for_function(
        "wanted => [...document.querySelectorAll('button.word:not([hidden])')].every((b, i) => "
        "b.innerText.split('\\n')[0] == wanted[i])",
        arg=wanted,
    )
    return wanted


def test_one_types_and_chooses(browser_page, address, models):  # noqa: F811
    page = browser_page
    page.goto(address)
    page.wait_for_selector("button.word.expert0, button.word.expert1, button.word.expert2")
    box = page.locator("#text")
    assert box.input_value() == ""  # nothing to erase
    page.keyboard.type("cab a")  # the box has the focus
    words = settle(page, models, "cab a")
    assert len(words) == SHOWN * 4
    clients = [text.strip() for text in page.locator(".client").all_inner_texts()]
    assert clients == ["ann", "ben", "cleo", BASE]
    for client, row in zip(models, range(3), strict=True):
        for place, word in enumerate(models[client].next_words("cab a", SHOWN)):
            button = page.locator("button.word").nth(row * SHOWN + place)
            assert f"{word.probability:.1%}" in button.inner_text()
            speaker = models[client].speaker(word)
            assert (
                re.search(rf"\b{speaker} \d+%", button.inner_text())
                if speaker
                else "·" not in button.inner_text()
            )
            style = f"expert{models[client].experts.index(speaker)}" if speaker else "unrouted"
            page.wait_for_function(
                "([i, style]) => "
                "document.querySelectorAll('button.word')[i].classList.contains(style)",
                arg=[row * SHOWN + place, style],
            )
    for place in (1, 3):
        before = box.input_value()
        client, word = list(models)[place // SHOWN], None
        word = models[client].next_words(before, SHOWN)[place % SHOWN]
        page.locator("button.word").nth(place).click()
        page.wait_for_function(
            "text => document.querySelector('#text').value == text",
            arg=before + word.insert,
        )
        settle(page, models, before + word.insert)
        page.wait_for_function("() => document.activeElement == document.querySelector('#text')")
    example = page.locator("button.example").first
    example.click()
    page.wait_for_function(
        "text => document.querySelector('#text').value == text", arg=example.inner_text()
    )
    page.wait_for_function("() => document.activeElement == document.querySelector('#text')")
    page.keyboard.type("x")
    page.wait_for_function(
        "text => document.querySelector('#text').value == text",
        arg=example.inner_text() + "x",
    )


def test_the_base_is_untrained_and_examples_are_those_that_divide(models):
    together = coterie.personal.ManyModels(models)
    base = with_base(models)[BASE]
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(base(ids).logits, base.backbone.model(ids).logits)
    told = {
        text: len({words[0].word for words in together.next_words(text, 1).values()})
        for text in EXAMPLES
    }
    offered = most_disputed(together, EXAMPLES)
    assert (
        sorted((told[text] for text in offered), reverse=True)
        == sorted(told.values(), reverse=True)[:OFFERED]
    )


@pytest.mark.parametrize("dark", [False, True])
def test_letters_and_colours_hold_on_either_ground(dark, address, models):
    with opened(dark, width=420) as page:
        page.goto(address)
        settle(page, models, "")
        legend = page.locator(".legend").inner_text()
        assert all(name in legend for name in ("G generalist", "S1 specialist", "S2 specialist"))
        ink, ground = page.locator("button.word").first.evaluate(
            "b => [getComputedStyle(b).color, getComputedStyle(b).backgroundColor]"
        )
        brightness = [
            sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 765 for colour in (ink, ground)
        ]
        assert abs(brightness[0] - brightness[1]) > 0.5
        assert (brightness[0] > brightness[1]) == dark
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.set_viewport_size({"width": 390, "height": 800})
        page.locator("button.word").first.evaluate(
            "b => b.firstChild.textContent = b.innerText = 'functions\\n9%'"
        )
        assert page.locator("button.word").first.evaluate("b => b.scrollWidth <= b.clientWidth")
        tops = page.locator("button.example").evaluate_all(
            "all => all.map(b => Math.round(b.getBoundingClientRect().top))"
        )
        assert len(set(tops)) <= 2  # two of them in a row


def test_only_this_machine_is_served(address):
    port = urlsplit(address).port
    listening = subprocess.run(
        ["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=False
    ).stdout
    ours = [
        line.split()[1]
        for line in listening.splitlines()
        if line.split()[3:4] == ["0A"] and f":{port:04X} " in line
    ]
    assert ours == [f"0100007F:{port:04X}"]


def test_a_taken_port_is_refused(models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(Refused, match=rf"port {port} is taken\n.*--port {port + 1}"),
            served(models, port),
        ):
            pass


def test_without_its_extra_the_message_names_the_command(tmp_path):
    code = "import sys; sys.modules['starlette'] = None; from coterie.cli.base import main; main()"
    command = [sys.executable, "-c", code, "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "the page needs starlette, which is not installed" in done.stderr
    assert "pip install -e '.[serve]'" in done.stderr


def test_colours_are_those_of_reports():
    style = (keyboard.assets() / "page.css").read_text("utf-8")
    assert re.findall(r"\.expert\d \{ --expert: (#\w+) \}", style) == list(COLOURS)


def test_two_tabs_are_answered_and_what_is_written_last_is_shown(address, models):
    with opened() as first:
        second = first.context.new_page()
        for page in (first, second):
            page.goto(address)
        first.locator("#text").press_sequentially("cab ab a", delay=5)
        second.locator("#text").press_sequentially("ab b cab", delay=5)
        settle(second, models, "ab b cab")
        settle(first, models, "cab ab a")


def test_who_is_shown_is_chosen(address, models):
    with opened() as page:
        page.goto(address)
        settle(page, models, "")
        page.get_by_text("Who is shown").click()
        page.get_by_role("checkbox", name="ben").uncheck()
        page.get_by_role("checkbox", name=BASE).uncheck()
        page.locator("#text").fill("cab a")
        two = [word.word for c in ("ann", "cleo") for word in models[c].next_words("cab a", SHOWN)]
        page.wait_for_function(
            "words => [...document.querySelectorAll('.row:not([hidden]) button')]"
            ".map(b => b.innerText.split('\\n')[0]).join() == words.join()",
            arg=two,
        )


def test_keys_alone_will_do_and_the_focus_is_seen(address, models):
    with opened() as page:
        page.goto(address)
        words = settle(page, models, "")
        page.locator("#text").focus()
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('.word')"):
                break
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"
        page.keyboard.press("Enter")
        page.wait_for_function(
            "text => document.querySelector('#text').value == text", arg=words[0]
        )


def test_a_stopped_server_is_said(models):
    with opened() as page:
        with served(models, 0) as address:
            page.goto(address)
            settle(page, models, "")
        page.locator("#text").fill("cab")
        page.get_by_role("alert").get_by_text("The server does not answer").wait_for()


def test_examples_are_the_clients_own_where_their_text_is_here(models, tmp_path):
    run = coterie.run(
        "quickstart",
        out=tmp_path / "run",
        method={"name": "pretrained", "rounds": 0},
        compare_with=[],
    )
    own = own_examples(run.folder, ["network", "numbers", "zoe"], chat=False)
    assert len(own) == 4
    documents = [text for parts in run.recipe.data.source().read().values() for text in parts[-1]]
    assert all(any(example in document for document in documents) for example in own)
    assert own_examples(run.folder / "clients/network", ["network"], chat=False) == own[:2]
    assert own_examples(run.folder, ["network"], chat=True) == []
    assert own_examples(tmp_path, ["network"], chat=False) == []
    together = coterie.personal.ManyModels(models)
    assert set(offered(together, False, own)) == set(own)
    few = offered(together, False, own[:1])
    assert few[0] == own[0]
    assert len(few) == OFFERED
    assert set(few[1:]) < set(EXAMPLES)


HOSTILE = (
    "[x](javascript:alert(1)) <img src=x onerror='window.harmed = 1'> **b** `c` "
    "www.evil.example $$x$$ 1. # h\u202e\x1b"
)


def test_hostile_names_and_words_are_text(models, monkeypatch):
    """Of the model that is served, and of what it suggests and the server says."""

    def hostile(self, texts, k=3, follow=True):
        return {client: [Word(HOSTILE, "x", 0.5, ())] for client in self.models}

    monkeypatch.setattr(ManyModels, "next_words", hostile)
    with served({HOSTILE: models["cleo"]}, 0) as address, opened() as page:
        page.goto(address)
        page.locator("button.word:not([disabled])").first.wait_for()
        shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")
        assert page.locator(".client").first.inner_text().strip() == shown
        assert page.locator(".row").first.get_attribute("aria-label") == shown
        assert page.locator("button.word").first.inner_text() == f"{shown}\n50.0%"
        page.evaluate(
            """async name => {
              const { printable } = await import("/keyboard.js");
              const lines = ["a\\u0000\\u2028\\ud800b", "a \\r\\n b\\n\\nc", "\\u200d\\u{e0041}"];
              window.shown = lines.map(line => [printable(line), printable(line, true)]).flat();
            }"""
        )
        assert page.evaluate("() => window.shown.join('|')") == "|".join(
            [r"a\u0000\u2028\ud800b"] * 2
            + ["a ↵ b ↵ c", "a \\u000d\n b\n\nc"]
            + ["\u200d\\ue0041"] * 2
        )
        assert page.locator("main img:visible").count() == 0
        assert page.evaluate("() => window.harmed") is None
