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
from coterie.personal.ui.keyboard import (
    BASE,
    EXAMPLES,
    OFFERED,
    SHOWN,
    most_disputed,
    served,
    with_base,
)


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
    pytest.importorskip("gradio", reason="no gradio (pip install -e '.[serve]')")
    with served(models, free_port()) as address:
        yield address


def shown(page) -> list[str]:
    return [button.inner_text() for button in page.locator("button.word").all()]


def settle(page, models, text: str) -> list[str]:
    """Wait until the suggestions are those of `text`, and return their words."""
    words = {client: model.next_words(text, SHOWN) for client, model in with_base(models).items()}
    wanted = [word.word for of_client in words.values() for word in of_client]
    page.wait_for_function(
        "n => document.querySelectorAll('button.word').length == n", arg=len(wanted)
    )
    page.wait_for_function(
        "wanted => [...document.querySelectorAll('button.word')].every((b, i) => "
        "b.innerText.split('\\n')[0] == wanted[i])",
        arg=wanted,
    )
    return wanted


def test_one_types_and_chooses(browser_page, address, models):  # noqa: F811
    page = browser_page
    page.goto(address)
    page.wait_for_selector("button.word.expert0, button.word.expert1, button.word.expert2")
    box = page.locator("#text textarea")
    assert box.input_value() == ""  # nothing to erase
    page.keyboard.type("cab a")  # the box has the focus
    words = settle(page, models, "cab a")
    assert len(words) == SHOWN * 4
    assert list(dict.fromkeys(page.locator(".client").all_inner_texts())) == [
        "ann",
        "ben",
        "cleo",
        BASE,
    ]
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
            "text => document.querySelector('#text textarea').value == text",
            arg=before + word.insert,
        )
        settle(page, models, before + word.insert)
        page.wait_for_function("document.activeElement == document.querySelector('#text textarea')")
    example = page.locator("button.example").first
    example.click()
    page.wait_for_function(
        "text => document.querySelector('#text textarea').value == text", arg=example.inner_text()
    )
    page.wait_for_function("document.activeElement == document.querySelector('#text textarea')")
    page.keyboard.type("x")
    page.wait_for_function(
        "text => document.querySelector('#text textarea').value == text",
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
    pytest.importorskip("gradio", reason="no gradio (pip install -e '.[serve]')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(Refused, match=rf"port {port} is taken\n.*--port {port + 1}"),
            served(models, port),
        ):
            pass


def test_without_gradio_the_message_names_the_command(models, tmp_path):
    (tmp_path / "gradio.py").write_text("raise ImportError('not here')")
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from coterie.cli.base import main; main()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "pip install -e '.[serve]'" in done.stderr
