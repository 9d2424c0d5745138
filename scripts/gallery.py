"""Make the reports of the gallery anew, from real runs: python scripts/gallery.py [NAME ...]

Each is the page that a command leaves, and is kept in docs/gallery/reports/ as it is: a run takes
minutes, so that the documentation site does not make it. Do it before a release. A report above
LARGEST is refused.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPORTS = Path(__file__).parents[1] / "docs/gallery/reports"
LARGEST = 1_000_000  # bytes of a report
COMMANDS = {
    "cobo-digits": "run cobo-digits",
    "ddome-digits": "run ddome-digits",
    "cobo-theorem": "reproduce cobo/theorem-1",
    "quickstart": "run quickstart",
}


def make(name: str) -> None:
    """Run a command, and keep its report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "coterie", *COMMANDS[name].split(), "--out", folder]
        subprocess.run(command, check=True)
        pages = sorted(Path(folder).rglob("*.html"), key=lambda page: len(page.parts))
        if not pages or pages[0].stat().st_size > LARGEST:
            sys.exit(f"{name}: no report, or one above {LARGEST:,} bytes: {pages[:1]}")
        REPORTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages[0], REPORTS / f"{name}.html")


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        make(name)
