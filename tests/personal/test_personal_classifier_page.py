"""The page of classifiers in a real browser: one gives an image, or types a text, and sees what
each client's model says.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from browser import opened
from PIL import Image
from test_keyboard import free_port
from test_personal_classifier import base, images, kept, pool, single, split  # noqa: F401

import coterie
from coterie.models.artifact import Origin
from coterie.models.text import TextShape
from coterie.personal import PersonalClassifier, save_classifier

pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
from coterie.personal.ui.page import LARGEST, grouped, served


def settled(page, model: PersonalClassifier, given: object) -> None:
    """Wait until its client's row says what a model says."""
    (said,) = model.predict(given)
    row = page.locator(".result").filter(has_text=model.about.client).last
    answer = row.locator(".classes")
    answer.get_by_text(said.name).first.wait_for()
    shares = [int(share) for share in re.findall(r"(\d+)%", answer.inner_text())]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert abs(shares[0] - 100 * said.probability) <= 1
    assert row.locator(".expert").inner_text() == (
        f"expert {said.expert} of 1, 4" if model.experts else ""
    )
    first = row.locator(".bar").first
    whole, bar = first.evaluate(
        "b => [b.clientWidth, parseFloat(getComputedStyle(b, '::before').width)]"
    )
    assert abs(bar / whole - said.probability) < 0.02


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(images(1)[0, 0]).save(tmp_path / "photo.png")
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "large.png")
    return tmp_path / "photo.png"


def test_one_gives_an_image(tmp_path: Path, photo: Path) -> None:
    kept(tmp_path, pool(), names=("cat", "dog", "ship"))
    save_classifier(
        tmp_path / "clients/ben",
        "ben",
        single(),
        split(images(1)),
        (),
        Origin("fedavg", "digits", 1, 0),
    )
    models = coterie.load_all(tmp_path)
    with served(models, free_port()) as address, opened() as page:
        page.goto(address)
        page.get_by_text("height 4 and width 4").wait_for()
        page.locator("#image").set_input_files(photo)
        page.locator(".result").first.wait_for()
        for model in models.values():
            settled(page, model, photo)
        page.get_by_role("button", name="Remove the image").click()
        page.locator(".result").first.wait_for(state="detached")
        page.locator("#image").set_input_files(photo.with_name("large.png"))
        page.get_by_role("alert").get_by_text("no image of 4 x 4 pixels: it is 5 x 4").wait_for()


def test_one_types_a_text(tmp_path: Path, base: Path) -> None:  # noqa: F811
    model = kept(
        tmp_path,
        pool(shape=TextShape(str(base), 3, 12)),
        split(np.array([[5]])),
        ("yes", "no", "maybe"),
    )
    with served({"ann": model}, free_port()) as address, opened(dark=True, width=420) as page:
        page.goto(address)
        for text in ("abc", "quite another text"):
            page.locator("#text").fill(text)
            page.locator(".result").first.wait_for()
            page.wait_for_timeout(500)
            settled(page, model, text)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator("#text").fill(" ")
        page.locator(".result").first.wait_for(state="detached")


def test_equal_answers_are_one_row(tmp_path: Path, photo: Path) -> None:
    alike = single()
    for client in ("ben", "cleo", "dan"):
        save_classifier(
            tmp_path / "clients" / client,
            client,
            alike,
            split(images(1)),
            (),
            Origin("fedavg", "digits", 1, 0),
        )
    with served(coterie.load_all(tmp_path), free_port()) as address, opened() as page:
        page.goto(address)
        page.locator("#image").set_input_files(photo)
        page.get_by_text("ben, cleo, dan").wait_for()
        assert set(page.locator(".client:visible").all_inner_texts()) == {"ben, cleo, dan"}


def test_one_expert_says_one_thing_whatever_else_its_clients_have() -> None:
    classes, other = {"cat": 0.9, "dog": 0.1}, {"cat": 0.4, "dog": 0.6}
    four, three = "expert 4", "expert 3"
    answers = {
        "ann": (classes, four, " of 3, 4"),
        "ben": (classes, four, " of 1, 4"),
        "cleo": (other, three, " of 1, 3"),
    }
    assert grouped(answers | {"dan": (other, three, " of 1, 3")}) == [
        (["ann", "ben"], [("cat", 0.9), ("dog", 0.1)], four),
        (["cleo", "dan"], [("dog", 0.6), ("cat", 0.4)], f"{three} of 1, 3"),
    ]


DROP = """([name, bytes, type]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
  const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.querySelector("#drop").dispatchEvent(event);
}"""
HOSTILE = "<img src=x onerror='window.harmed = 1'>\u202eb"


def test_one_drops_an_image_and_hostile_names_are_text(tmp_path: Path, photo: Path) -> None:
    model = kept(tmp_path, pool(), names=(HOSTILE, "dog" * 60, "ship"))
    with served({HOSTILE: model}, 0) as address, opened(dark=True, width=390) as page:
        page.goto(address)
        page.locator("#drop").wait_for()
        page.evaluate(DROP, ["a.png", list(photo.read_bytes()), "image/png"])
        page.locator(".result").wait_for()
        shown = HOSTILE.replace("\u202e", "\\u202e")
        assert page.locator(".client .name").inner_text() == shown
        assert shown in page.locator(".classes").inner_text()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("() => window.harmed") is None
        assert page.locator("#preview").is_visible()
        for content, problem in (
            (b"GIF89a and no more", "the file is no PNG or JPEG image"),
            (b"\x89PNG\r\n\x1a\n and no more", "the file is no image of 4 x 4 pixels"),
            (photo.with_name("large.png").read_bytes(), "it is 5 x 4"),
        ):
            page.evaluate(DROP, ["a.png", list(content), "image/png"])
            page.get_by_role("alert").get_by_text(problem).wait_for()
            assert page.locator(".result").count() == 0
        size = f"() => new Blob([new Uint8Array({LARGEST + 1})])"
        answer = (
            f"async () => (await fetch('/classes', {{method: 'POST', body: ({size})()}})).status"
        )
        assert page.evaluate(answer) == 413
