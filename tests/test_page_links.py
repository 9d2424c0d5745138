"""Links between the pages of the repository lead somewhere, where the repository is browsed."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


def pages() -> list[str]:
    """Every Markdown file that is under version control, or will be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = {name for name in done.stdout.splitlines() if (REPOSITORY / name).exists()}
    return sorted(found) or [
        str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("docs/**/*.md")
    ]


def prose(path: Path) -> str:
    """A page without its programs and inline code."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, numbered where headings are equal."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: dict[str, int] = {}
    names = set()
    for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head)
        name = re.sub(r"[^\w -]", "", shown.lower()).strip().replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return names


@pytest.mark.parametrize("name", pages())
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    path = REPOSITORY / name
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name}: {link}"
