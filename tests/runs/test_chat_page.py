"""`coterie serve --chat` in a real browser: one asks several people, who answer side by side, token
by token; one stops them, begins anew, and sees what is hostile as text.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import opened
from chat_bases import write_chat_base
from random_models import write_models
from test_run_chats import SAID, base, learned, texts  # noqa: F401

import coterie
from coterie.core.errors import DataError
from coterie.data.chats.messages import user
from coterie.models.layout import Layout
from coterie.personal import PersonalModel
from coterie.personal.ui.keyboard import BASE, MESSAGES, SHOWN, own_examples

pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
from coterie.personal.ui import page as local_page
from coterie.personal.ui.page import served

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = '<img src=x onerror="window.harmed = 1"><b>\u202ebold</b>'


@pytest.fixture(scope="module")
def models(learned: coterie.Run) -> dict[str, PersonalModel]:  # noqa: F811
    return learned.load_all()


@pytest.fixture(scope="module")
def address(models: dict[str, PersonalModel]) -> Iterator[str]:
    problems: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_page, "TEMPERATURE", 0)  # what was learned by heart, always
        with served(models, 0, chat=True, report=problems.append) as link:
            yield link
    assert problems == []


@pytest.fixture
def unending(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pages that are served, on which no token ends an answer."""
    pages: list[Any] = []
    made = local_page.LanguagePage.__init__

    def remembered(self: Any, *given: Any) -> None:
        made(self, *given)
        self.preparation.chat_ends = frozenset()
        pages.append(self)

    monkeypatch.setattr(local_page.LanguagePage, "__init__", remembered)
    return pages


@pytest.fixture
def endless(
    models: dict[str, PersonalModel], unending: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A page whose answers take seconds, and its scheduler."""
    from coterie.personal.running_batch import RunningBatch

    step = RunningBatch.step

    def slowly(batch: RunningBatch) -> Any:
        time.sleep(0.05)
        return step(batch)

    monkeypatch.setattr(RunningBatch, "step", slowly)
    with ExitStack() as stack:
        link = stack.enter_context(served(models, 0, chat=True))
        yield link, unending[0].scheduler, stack.close


def ask(page: "Page", text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def settled(page: "Page") -> list[list[str]]:
    """The lines of the last turn's bubbles, once all have ended."""
    page.wait_for_function("() => document.querySelector('.answer')")
    page.wait_for_function("() => !document.querySelector('.answer[aria-busy=true]')")
    answers = page.locator(".turn").last.locator(".answer").all_inner_texts()
    return [[line for line in text.split("\n") if line] for text in answers]


def test_people_answer_side_by_side_and_go_on(address: str) -> None:
    with opened(width=1280) as page:
        page.goto(address)
        assert not page.get_by_role("button", name="New chat").is_visible()
        for client in SAID:
            assert page.get_by_role("checkbox", name=client).is_checked()
        assert not page.get_by_role("checkbox", name=BASE).is_checked()
        page.get_by_role("checkbox", name="ben").uncheck()
        ask(page, "hello")
        assert settled(page) == [["ann", SAID["ann"][1]]]
        assert page.locator(".sent").all_inner_texts() == ["hello"]
        assert page.get_by_label("Message").input_value() == ""
        page.get_by_role("checkbox", name="ben").check()
        page.get_by_label("Message").fill("who")
        page.keyboard.press("Shift+Enter")
        assert page.get_by_label("Message").input_value() == "who\n"
        page.get_by_label("Message").fill("who")
        page.keyboard.press("Enter")
        ann, ben = settled(page)
        assert ben == ["ben", SAID["ben"][1]]
        assert ann[0] == "ann"
        boxes = [box.bounding_box() for box in page.locator(".turn").last.locator(".answer").all()]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0
        assert page.evaluate("() => document.activeElement.id") == "message"


def test_what_was_said_is_context_and_stays_with_each(address: str, models: Any) -> None:
    """Each is asked with its own answers, as OpenAI's protocol has them."""
    with opened() as page:
        requests: list[Any] = []
        page.on(
            "request",
            lambda r: requests.append(r.post_data_json) if r.url.endswith("/chat") else None,
        )
        page.goto(address)
        page.get_by_role("checkbox", name="ben").uncheck()
        ask(page, "hello")
        settled(page)
        page.get_by_role("checkbox", name="ben").check()
        ask(page, "who")
        settled(page)
    first, second = requests
    assert first["chats"] == [{"client": "ann", "messages": [user("hello")]}]
    answer = {"role": "assistant", "content": SAID["ann"][1]}
    assert second["chats"] == [
        {"client": "ann", "messages": [user("hello"), answer, user("who")]},
        {"client": "ben", "messages": [user("who")]},
    ]


def test_suggestions_for_the_answer_stay_under_the_box(address: str, models: Any) -> None:
    def suggested(message: str, answer: str) -> list[str]:
        return [
            word.word
            for model in models.values()
            for word in model.next_words(model.chats.opened([user(message)], answer), SHOWN)
        ]

    def shown(page: "Page") -> list[str]:
        buttons = page.locator(".row:visible button.word:visible").all_inner_texts()
        return [text.split("\n")[0] for text in buttons]

    with opened() as page:
        page.goto(address)
        assert not page.get_by_label("Answer, word by word").is_visible()
        example = page.locator("button.example").first
        assert example.inner_text() in MESSAGES
        example.click()
        assert page.get_by_label("Message").input_value() == example.inner_text()
        page.get_by_label("Message").fill("hello")
        page.locator("button.word.expert0, button.word.expert1").first.wait_for()
        until(lambda: shown(page) == suggested("hello", ""))
        first = page.locator("button.word").first
        word = first.inner_text().split("\n")[0]
        first.click()
        until(lambda: page.get_by_label("Answer, word by word").input_value().strip() == word)
        answer = page.get_by_label("Answer, word by word").input_value()
        until(lambda: shown(page) == suggested("hello", answer))


def until(holds: Any) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_answers_come_token_by_token_and_stop(endless: Any) -> None:
    link, scheduler, _ = endless
    with opened() as page:
        page.goto(link)
        ask(page, "hello")
        answers = page.locator(".answer p").first
        page.wait_for_function("() => document.querySelector('.answer p').textContent.length > 3")
        before = answers.inner_text()
        page.wait_for_timeout(400)
        assert len(answers.inner_text()) > len(before)
        assert page.locator(".answer[aria-busy=true]").count() == 2
        # another tab, and the suggestions of this one, are answered meanwhile
        other = page.context.new_page()
        other.goto(link)
        other.get_by_label("Message").fill("who")
        other.locator("button.word:not([disabled])").first.wait_for()
        page.get_by_label("Message").fill("who")
        page.locator("button.word:not([disabled])").first.wait_for()
        assert page.locator(".answer[aria-busy=true]").count() == 2
        page.get_by_role("button", name="Stop").click()
        assert all(lines[-1] == "stopped" for lines in settled(page))
        kept = answers.inner_text()
        until(lambda: not scheduler._work)  # nobody writes on
        page.wait_for_timeout(300)
        assert answers.inner_text() == kept
        assert not page.get_by_role("button", name="Stop").is_visible()
        ask(page, "hello")
        page.wait_for_function("() => document.querySelectorAll('.turn').length == 2")
        page.get_by_role("button", name="New chat").click()
        until(lambda: not scheduler._work)
        assert page.locator(".turn").count() == 0


def test_it_ends_within_a_second_while_answers_are_written(endless: Any) -> None:
    link, _, end = endless
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    browser.open(link)
    address = f"{link.partition('?')[0]}chat"
    body = json.dumps({"chats": [{"client": "ann", "messages": [user("hello")]}]}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    begun = threading.Event()

    def read() -> None:
        for _ in browser.open(request):
            begun.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(10)
    started = time.monotonic()
    end()
    assert time.monotonic() - started < 2
    thread.join(5)
    assert not thread.is_alive()


def test_more_people_answer_than_a_browser_has_connections(
    base: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    people = {f"p{i}": Layout(rank=2) for i in range(10)}
    with (
        served(coterie.load_all(write_models(tmp_path, base, people)), 0, chat=True) as link,
        opened() as page,
    ):
        page.goto(link)
        page.get_by_role("checkbox").nth(len(people)).wait_for(state="attached")
        for box in page.get_by_role("checkbox").all():
            box.check()
        ask(page, "hello")
        assert [lines[0] for lines in settled(page)] == [*people, BASE]


@pytest.mark.parametrize("dark", [False, True])
def test_hostile_texts_and_names_are_text_and_a_phone_shows_all(
    dark: bool,
    base: Path,  # noqa: F811
    tmp_path: Path,
    unending: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    from coterie.personal.api.answers import Decoder

    (model,) = coterie.load_all(write_models(tmp_path, base, {"ann": Layout(rank=2)})).values()
    long = "a" * 300
    monkeypatch.setattr(Decoder, "add", lambda self, token: f"{HOSTILE} {long}\n")
    monkeypatch.setattr(local_page, "ANSWER", 2)
    with (
        served({HOSTILE: model}, 0, chat=True, examples=[HOSTILE]) as link,
        opened(dark=dark, width=390) as page,
    ):
        complaints: list[str] = []
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.goto(link)
        page.locator("button.example").first.click()
        page.locator("button.word:not([disabled])").first.wait_for()
        page.get_by_role("button", name="Send").click()
        ((name, *lines),) = settled(page)
        shown = HOSTILE.replace("\u202e", "\\u202e")
        assert name == shown
        assert f"{shown} {long}" in lines
        assert page.locator(".sent").inner_text() == shown
        assert page.locator("main img:visible, main b:visible").count() == 0
        assert page.evaluate("() => window.harmed") is None
        page.get_by_label("Message").fill(HOSTILE)
        page.wait_for_timeout(300)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        ink, ground = page.evaluate(
            "() => [getComputedStyle(document.querySelector('.answer p')).color, "
            "getComputedStyle(document.querySelector('.answer')).backgroundColor]"
            ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 765)"
        )
        assert (ink > ground) == dark
        assert abs(ink - ground) > 0.5
        assert complaints == []


def test_a_chat_that_has_become_too_long_says_so(address: str) -> None:
    with opened() as page:
        page.goto(address)
        ask(page, "a b c d " * 400)
        lines = settled(page)
        assert all("The maximum context length here is" in line[-1] + line[1] for line in lines)


def test_requests_that_are_none_are_refused_by_name(address: str) -> None:
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    browser.open(address)
    place = f"{address.partition('?')[0]}chat"
    for messages, problem in (([], "messages"), ([{"role": 1}], "messages"), ([{}], "messages")):
        body = json.dumps({"chats": [{"client": "ann", "messages": messages}]}).encode()
        request = urllib.request.Request(place, body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            browser.open(request)
        assert refused.value.code == 400
        assert problem in json.loads(refused.value.read())["error"]["message"]


def test_without_a_chat_template_it_does_not_begin(tmp_path: Path) -> None:
    plain = write_chat_base(tmp_path / "base", None)
    models = coterie.load_all(write_models(tmp_path, plain, {"ann": Layout(rank=2)}))
    with pytest.raises(DataError, match="the base has no chat template"), served(models, 0, True):
        pass


def test_examples_are_messages_that_were_answered(learned: coterie.Run) -> None:  # noqa: F811
    assert own_examples(learned.folder, ["ann", "ben"], chat=True) == ["hello", "who"]
    assert own_examples(learned.folder, ["ann"], chat=False) == []
