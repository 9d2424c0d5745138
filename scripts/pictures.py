"""The pictures of README and docs, made from real runs.

    coterie run quickstart --out RUN
    coterie run topics --set method=interpolation --set compare_with=[] --out TOPICS
    python scripts/pictures.py RUN TOPICS CHATS

Writes `docs/report.png`, the top of a run's report; `docs/keyboard.png`, the keyboard of
`coterie serve`, after a text that its clients continue in words of their own; and `docs/serve.png`,
a chat with the clients of CHATS, the run of the tutorial "Your own
chats". Needs Chromium or Chrome.
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import coterie
from coterie.personal.ui import page as local_page

DOCS = Path(__file__).parents[1] / "docs"
TEXT = "The state of the "
QUESTIONS = ("Could I have a cake on Friday?", "Could I have a novel on Monday?")
DRAFT = "Could I have two pies on Thursday?"
SCHEMES = (("light", 780), ("dark", 780), ("light", 390))


def report(browser: Browser, run: Path) -> Image.Image:
    """Return the top of a run's report."""
    page = browser.new_page(viewport={"width": 1020, "height": 1290})
    page.goto((run / "report.html").resolve().as_uri())
    shot = Image.open(io.BytesIO(page.screenshot()))
    page.close()
    return shot


def keyboard(browser: Browser, run: Path) -> Image.Image:
    """Return what `coterie serve` shows, large enough to be read on the first page."""
    with local_page.served(coterie.load_all(run), 0) as link:
        page = browser.new_page(color_scheme="light", viewport={"width": 780, "height": 715})
        page.goto(link)
        page.get_by_label("Text").fill(TEXT)
        page.locator("button.word:not([disabled])").first.wait_for()
        page.wait_for_timeout(1500)
        shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        page.close()
    return shot


def chat(browser: Browser, run: Path) -> Image.Image:
    """Return what `coterie serve --chat` shows: light, dark, and on a phone."""
    shots = []
    with local_page.served(coterie.load_all(run), 0, chat=True) as link:
        for scheme, width in SCHEMES:
            size = {"width": width, "height": 900}
            page = browser.new_page(color_scheme=scheme, viewport=size)
            page.goto(link)
            for turn, question in enumerate(QUESTIONS, start=1):
                page.get_by_label("Message").fill(question)
                page.keyboard.press("Enter")
                page.locator(f".turn >> nth={turn - 1}").wait_for()
                page.locator(".answer[aria-busy=true]").first.wait_for(state="detached")
            page.get_by_label("Message").fill(DRAFT)
            page.locator("button.word:not([disabled])").first.wait_for()
            page.wait_for_timeout(500)
            shots.append(Image.open(io.BytesIO(page.screenshot())))
            page.close()
    return side_by_side(shots)


def side_by_side(shots: list[Image.Image]) -> Image.Image:
    """Return pictures of equal height in a row."""
    whole = Image.new("RGB", (sum(shot.width for shot in shots), shots[0].height))
    left = 0
    for shot in shots:
        whole.paste(shot, (left, 0))
        left += shot.width
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run with a report")
    parser.add_argument("keyboard", type=Path, help="folder of a run on texts")
    parser.add_argument("chats", type=Path, help="folder of a run on conversations")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        pictures = {
            "report": report(browser, args.run),
            "keyboard": keyboard(browser, args.keyboard),
            "serve": chat(browser, args.chats),
        }
        browser.close()
    for name, shot in pictures.items():
        shot.convert("RGB").save(DOCS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
