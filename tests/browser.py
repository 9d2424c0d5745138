"""A real headless Chromium for pages that we make: `from browser import browser_page`, or the
context manager `opened()`.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def executable() -> str:
    """The path of a Chromium, or a skip."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium on the PATH (Debian: apt-get install chromium)")
    return found


@contextmanager
def opened(dark: bool = False, width: int = 1000, height: int = 800) -> Iterator["Page"]:
    """An empty page. What it asks of other machines is refused, and fails the test when the page is
    closed, as does an error in a script.

    Args:
        dark: Whether the person prefers a dark ground.
        width: Of the window, in pixels.
        height: Likewise.
    """
    sync = pytest.importorskip(
        "playwright.sync_api", reason="no playwright (pip install playwright)"
    )
    outside: list[str] = []
    errors: list[str] = []

    def local_only(route: "Route") -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("http", "https", "ws", "wss") and address.hostname not in (
            "127.0.0.1",
            "localhost",
        ):
            outside.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    path = executable()
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            context = browser.new_context(
                color_scheme="dark" if dark else "light",
                viewport={"width": width, "height": height},
            )
            page = context.new_page()
            page.route("**/*", local_only)
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page
        finally:
            browser.close()
    assert not outside, f"the page asked other machines: {outside}"
    assert not errors, f"errors in the page's scripts: {errors}"


@pytest.fixture
def browser_page() -> Iterator["Page"]:
    """`opened()` as a fixture."""
    with opened() as page:
        yield page
