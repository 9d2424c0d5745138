"""What the keyboard in a browser costs: bytes that are loaded, seconds to the first suggestion, and
to those after one letter more.

    coterie export RUN --all --format web --out DIR
    python benchmarks/web_keyboard.py DIR [DIR ...] [--repeats 5] [--json FILE]

A headless Chromium loads each folder from `python -m http.server` on this machine, with an empty
cache each time; folders take turns. Then it types a text letter by letter, and waits after each.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import RESULTS, report
from playwright.sync_api import Browser, Page, sync_playwright

TEXT = "The number of people is"
# Writes a text as if it were typed; milliseconds until the first row and until all are of it.
TYPE = """async text => {
  const box = document.querySelector("#text"), start = performance.now();
  box.value = text;
  box.dispatchEvent(new Event("input"));
  const of = button => button.dataset.written && JSON.parse(button.dataset.written).text === text;
  const until = async here => {
    while (!here()) await new Promise(requestAnimationFrame);
    return performance.now() - start;
  };
  const rows = [...document.querySelectorAll(".row:not([hidden])")];
  const words = rows.map(row => row.querySelector("button"));
  return [await until(() => words.some(of)), await until(() => words.every(of))];
}"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the folder's address while the block runs."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, "--directory", str(folder)], **quiet) as server:
        port = server.stdout.readline().split(" port ")[1].split()[0]
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()


@contextmanager
def opened(browser: Browser, address: str, **settings: Any) -> Iterator[Page]:
    """Yield a page with an empty cache, once it has suggestions of the first client."""
    context = browser.new_context(**settings)
    page = context.new_page()
    page.goto(address)
    page.locator("button.word:not([disabled])").first.wait_for(timeout=120_000)
    yield page
    context.close()


def measured(browser: Browser, address: str) -> dict[str, float]:
    """Seconds to the first suggestion; milliseconds after each letter, the median."""
    start = time.perf_counter()
    with opened(browser, address) as page:
        found = {"first suggestion, s": time.perf_counter() - start}
        page.locator("html[data-settled]").wait_for()
        page.evaluate(TYPE, TEXT[:1])
        typed = [page.evaluate(TYPE, TEXT[:end]) for end in range(2, len(TEXT) + 1)]
    first, every = zip(*typed, strict=True)
    medians = {"first row, ms": statistics.median(first), "all rows, ms": statistics.median(every)}
    return found | medians


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "web_keyboard.json")
    args = parser.parse_args()
    taken: dict[Path, list[dict[str, float]]] = {folder: [] for folder in args.folders}
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(args.repeats):
            for folder, own in taken.items():
                with served(folder) as address:
                    own.append(measured(browser, address))
        version = browser.version
        browser.close()
    rows = []
    for folder, own in taken.items():
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        medians = {name: statistics.median(one[name] for one in own) for name in own[0]}
        best = {f"best {name}": min(one[name] for one in own) for name in own[0]}
        rows.append({"folder": folder.name, "bytes": sum(sizes), **medians, **best})
    report(rows, args.json, repeats=args.repeats, chromium=version)


if __name__ == "__main__":
    main()
