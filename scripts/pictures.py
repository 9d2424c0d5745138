"""The pictures of README and docs, made from real runs.

    coterie run quickstart --out RUN
    coterie run topics --set method=interpolation --set compare_with=[] --out TOPICS
    coterie run team --out TEAM
    python scripts/pictures.py RUN TOPICS CHATS TEAM

Writes `docs/report.png`, the top of a run's report; `docs/keyboard.png`, the keyboard of
`coterie serve`, after a text that its clients continue in words of their own; `docs/serve.png`, a
chat with the clients of CHATS, the run of the tutorial "Your own chats"; and `docs/team.png`, one
question to the assistants of TEAM, before training, alone and together. `-` in place of a run
leaves its picture as it is. Needs Chromium or Chrome.
"""

import argparse
import io
import shutil
from html import escape
from pathlib import Path

import yaml
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import coterie
from coterie.data.synthetic import Team
from coterie.personal.model import PersonalModel
from coterie.personal.ui import page as local_page
from coterie.personal.ui.keyboard import BASE, with_base

DOCS = Path(__file__).parents[1] / "docs"
TEXT = "The state of the "
QUESTIONS = ("Could I have a cake on Friday?", "Could I have a novel on Monday?")
DRAFT = "Could I have two pies on Thursday?"
# of the picture of the team: its place, relation and wording
ASKED = ("bell tower", "is run by", "Who runs the bell tower?")
STYLE = """
body { margin: 0; padding: 22px 26px; width: 968px; font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; } p { margin: 0 0 12px; color: #555; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top;
padding: 8px 12px 8px 0; border-top: 1px solid #ddd; } th { color: #555; font-weight: 600; }
td.name { white-space: nowrap; } small { color: #777; display: block; }
.right { color: #00664b; } .wrong { color: #a63c00; }
"""
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


def team(browser: Browser, run: Path) -> Image.Image:
    """Return a question and the answers of the base, and of each one's model alone and together."""
    alone, together = (
        {i: m for i, m in coterie.load_all(folder).items() if isinstance(m, PersonalModel)}
        for folder in (run / "baselines/local", run / "baselines/fedavg")
    )
    place, relation, question = ASKED
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    facts = Team(seed=recipe["data"]["seed"]).facts()
    told = {i: (place, relation) in {fact[:2] for fact in mine} for i, (mine, _) in facts.items()}
    value = next(v for mine, _ in facts.values() for p, r, v in mine if (p, r) == (place, relation))

    def answered(model: PersonalModel) -> str:
        answer = model.answer(question, do_sample=False).strip()
        kind = "right" if value in answer else "wrong"
        text = escape(answer).replace("\n", "<br>")
        return f"<td class={kind}>{text}</td>"

    base = with_base(alone)[BASE]
    before = base.answer(question, do_sample=False, max_new_tokens=40).strip()
    rows = "".join(
        f"<tr><td class=name>{i}<small>{'was told' if told[i] else 'was never told'}</small></td>"
        f"{answered(alone[i])}{answered(together[i])}</tr>"
        for i in alone
    )
    heading = (
        "<th></th><th>trained alone</th><th>trained together (FedAvg after its local steps)</th>"
    )
    page = browser.new_page(viewport={"width": 1020, "height": 400})
    page.set_content(
        f"<style>{STYLE}</style><h1>{question}</h1><p>Before training: {escape(before)} ...</p>"
        f"<table><tr>{heading}</tr>{rows}</table>"
    )
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    page.close()
    return shot


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
    draw = {"report": report, "keyboard": keyboard, "serve": chat, "team": team}
    for name in draw:
        parser.add_argument(name, type=Path, metavar="RUN")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, of in draw.items():
            if (run := getattr(args, name)) != Path("-"):
                of(browser, run).convert("RGB").save(DOCS / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
