"""The pictures of README and docs, made from real runs.

    coterie run quickstart --out RUN
    coterie run topics --set method.rounds=15 --set compare_with=[] --out TOPICS
    coterie export TOPICS --all --format web --out DIR
    python scripts/pictures.py RUN DIR

Writes `docs/report.png`, the top of a run's report, and `docs/keyboard.png`, the keyboard of a web
export, light, dark and on a phone, after a text that its clients continue in words of their own.
Needs Chromium or Chrome.
"""

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from web_keyboard import TYPE, opened, served

DOCS = REPOSITORY / "docs"
TEXT = "The state of the "


def report(browser: Browser, run: Path) -> Image.Image:
    """Return the top of a run's report."""
    page = browser.new_page(viewport={"width": 1020, "height": 1290})
    page.goto((run / "report.html").resolve().as_uri())
    shot = Image.open(io.BytesIO(page.screenshot()))
    page.close()
    return shot


def keyboard(browser: Browser, folder: Path) -> Image.Image:
    """Return what a web export shows: light, dark, and on a phone."""
    shots = []
    with served(folder) as address:
        for scheme, width in (("light", 780), ("dark", 780), ("light", 390)):
            size = {"width": width, "height": 820}
            with opened(browser, address, color_scheme=scheme, viewport=size) as page:
                page.evaluate(TYPE, TEXT)
                shots.append(Image.open(io.BytesIO(page.screenshot())))
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
    parser.add_argument("keyboard", type=Path, help="folder of a web export")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        pictures = {
            "report": report(browser, args.run),
            "keyboard": keyboard(browser, args.keyboard),
        }
        browser.close()
    for name, shot in pictures.items():
        shot.convert("RGB").save(DOCS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
