"""The documentation site: complete, without broken links, and without anything from elsewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import opened
from static_files import serving

import coterie
from coterie.methods import METHODS

REPOSITORY = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """What a page leads to, loads, and can be led to; and its words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.words: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.anchors |= {own[name] or "" for name in ("id", "name") if name in own}
        found = own.get("href") if tag == "a" else own.get(LOADED.get(tag, ""))
        if found:
            (self.links if tag == "a" else self.loads).append(found)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@cache
def read(path: Path) -> Page:
    return Page(path)


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    """The pages of the site, without the reports in the gallery, which are tested where they are
    made.
    """
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html" and path.parent.name != "reports":
            yield path, read(path)


def test_every_link_leads_to_a_file_and_a_place_in_it(site: Path) -> None:
    for path, page in pages(site):
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target.suffix == ".html" and target.parent.name != "reports":
                assert unquote(parts.fragment) in read(target).anchors, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in pages(site):
        assert not [link for link in page.loads if urlsplit(link).netloc], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text("utf-8")), path
    for path in [*site.rglob("*.js"), *site.rglob("*.html"), *site.rglob("*.css")]:
        found = path.read_text("utf-8")
        hosts = ("unpkg.com", "jsdelivr", "cdnjs", "googleapis", "gstatic", "api.github.com")
        assert not [host for host in hosts if f"//{host}" in found or f".{host}" in found], path


def test_every_method_has_a_page_with_its_algorithm_and_its_code(site: Path) -> None:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        from website.methods import groups
    finally:
        sys.path.pop(0)
    found = groups()
    assert {name for names in found.values() for name in names} == set(METHODS)
    written = {path.stem for path in (REPOSITORY / "docs/methods").glob("*.md")} - {"README"}
    assert written == set(found)
    for slug, entries in found.items():
        html = (site / f"methods/{slug}.html").read_text("utf-8")
        for anchor in ("algorithm", "the-code", "in-a-recipe", "measured", "when-to-use-it"):
            assert f'id="{anchor}"' in html, f"{slug}: {anchor}"
        said = "".join(read(site / f"methods/{slug}.html").words)
        method = next(iter(entries.values())).method
        file = Path(sys.modules[method.__module__].__file__ or "")
        assert file.read_text("utf-8").strip() in said, slug


def test_formulas_are_mathematics(site: Path) -> None:
    count = 0
    for path in (site / "theory.html", *sorted((site / "methods").glob("*.html"))):
        html = path.read_text("utf-8")
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
        assert "$$" not in text, path
        assert not re.search(r"\\[a-z]{3,}", text), path  # a command that was not understood
        assert not re.search(r"</p>\s*<math|</math>\s*<p>", html), path  # no paragraph of its own
        count += html.count("<math")
    assert count > 150


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = read(site / "reference/coterie.html").anchors
    names = {f"coterie.{name}" for name in coterie.__all__ if name != "__version__"}
    assert names <= anchors


def test_every_command_is_in_the_reference(site: Path) -> None:
    said = "".join(read(site / "reference/command-line.html").words)
    for command in ("run", "compare", "tune", "export", "serve", "audit", "reproduce"):
        assert f"coterie {command}" in said


def test_docstrings_are_understood_by_the_tool(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("griffe", reason="no griffe (pip install -e '.[docs]')")
    program = """
import griffe, logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
def read(thing):
    for member in thing.members.values():
        if not member.is_alias:
            member.docstring and member.docstring.parse("google")
            read(member)
read(griffe.load("coterie", search_paths=[sys.argv[1]]))
"""
    command = [sys.executable, "-c", program, str(Path(coterie.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_search_finds_a_page_without_a_network(site: Path) -> None:
    with opened(width=1300) as page:
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.get_by_placeholder("Search").filter(visible=True).last.fill("Nesterov")
        page.get_by_text("FDLoRA").filter(visible=True).first.wait_for(timeout=15_000)


def test_the_gallery_s_keyboard_suggests_words(site: Path) -> None:
    """What is kept of it still fits the programs that the package has today."""
    with serving(site) as served, opened(width=390) as page:
        page.goto(f"{served.address}gallery/keyboard/index.html")
        page.locator("html[data-settled]").wait_for(timeout=120_000)
        assert page.locator("button.word:not([disabled])").count() > 4
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_on_a_phone(site: Path, dark: bool) -> None:
    with opened(dark=dark, width=390, height=800) as page:
        for name in ("index", "methods/comigs", "architecture", "reference/coterie", "privacy"):
            page.goto((site / f"{name}.html").as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, f"{name}: {wide}"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark


def test_a_warning_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zensical", reason="no zensical (pip install -e '.[docs]')")
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from website import build

    def broken(folder: Path) -> None:
        (folder / "docs").mkdir()
        (folder / "docs/index.md").write_text("# Page\n\n[nowhere](nowhere.md)\n")
        (folder / "zensical.toml").write_text('[project]\nsite_name = "a"\n')

    monkeypatch.setattr(build, "stage", broken)
    with pytest.raises(SystemExit, match="does not exist"):
        build.build(tmp_path)


def test_every_page_of_docs_can_be_reached(site: Path) -> None:
    known = {path.resolve() for path, _ in pages(site)}
    home = read(site / "index.html").links + read(site / "own-text.html").links
    reached = {(site / link.partition("#")[0]).resolve() for link in home}
    for path in (REPOSITORY / "docs").glob("*.md"):
        page = (site / f"{path.stem}.html").resolve()
        assert page in known
        assert page in reached, path.name
