"""Make the reports of the gallery anew, from real runs: python scripts/gallery.py [NAME ...]

Each is the page that a command leaves, and is kept in docs/gallery/reports/ as it is: a run takes
minutes, so that the documentation site does not make it. Do it before a release. A report above
LARGEST is refused. The quickstart's models are kept, too, in docs/gallery/keyboard/: an export to
a browser's keyboard without its programs, which the site takes from the package.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from coterie.export import web

GALLERY = Path(__file__).parents[1] / "docs/gallery"
REPORTS, KEYBOARD = GALLERY / "reports", GALLERY / "keyboard"
LARGEST = 1_000_000  # bytes of a report
COMMANDS = {
    "cobo-digits": "run cobo-digits",
    "ddome-digits": "run ddome-digits",
    "cobo-theorem": "reproduce cobo/theorem-1",
    "cobo-table1": "reproduce cobo/table1 --columns digits --seeds 1",
    "quickstart": "run quickstart",
}
WEB = "--all --format web --precision int8"
ABOUT = {"README.md", "export.json", "SHA256SUMS"}  # for who has the folder alone


def make(name: str) -> None:
    """Run a command, and keep its report."""
    with tempfile.TemporaryDirectory() as folder:
        coterie(*COMMANDS[name].split(), "--out", folder)
        pages = sorted(Path(folder).rglob("*.html"), key=lambda page: len(page.parts))
        if not pages or pages[0].stat().st_size > LARGEST:
            sys.exit(f"{name}: no report, or one above {LARGEST:,} bytes: {pages[:1]}")
        REPORTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages[0], REPORTS / f"{name}.html")
        if name == "quickstart":
            keep_keyboard(Path(folder))


def keep_keyboard(run: Path) -> None:
    """Export a run's models to a browser's keyboard, and keep what is of them alone."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "web"
        coterie("export", str(run), *WEB.split(), "--out", str(folder))
        left_out = {*web.programs(), *ABOUT}
        shutil.rmtree(KEYBOARD, ignore_errors=True)
        KEYBOARD.mkdir()
        for file in folder.iterdir():
            if file.is_file() and file.name not in left_out:
                shutil.copyfile(file, KEYBOARD / file.name)


def coterie(*arguments: str) -> None:
    """Run a command of coterie."""
    subprocess.run([sys.executable, "-m", "coterie", *arguments], check=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        make(name)
