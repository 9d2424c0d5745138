"""Build the documentation site into build/website/site: python scripts/website/build.py [FOLDER]

Pages come from docs/ and from other files of the repository; those of methods and of the reference
are made from the code. Any warning fails the build. What a browser loads lies in the folder: no
script, style or font is from elsewhere.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from recipe_reference import WRITTEN

from coterie.core.version import HOME, __version__
from coterie.export import web
from website import methods, reference
from website.diagrams import drawn
from website.links import turned
from website.mathematics import typeset
from website.navigation import NAVIGATION, Entry
from website.tutorials import notebook

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
ELSEWHERE = re.compile(rb"https://(?:unpkg\.com|cdn\.jsdelivr\.net|api\.github\.com)/")
SHIM = "https://unpkg.com/iframe-worker/shim"
FIXED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "results/index.md",
    "README.md": "index.md",  # links to it lead to the first page
}


def places() -> dict[str, str]:
    """Return where files of the repository are on the site."""
    found = dict(FIXED)
    for path in sorted((REPOSITORY / "docs").rglob("*")):
        if path.is_file():
            own = path.relative_to(REPOSITORY / "docs").as_posix()
            found[f"docs/{own}"] = re.sub(r"(^|/)README\.md$", r"\1index.md", own)
    for path in sorted((REPOSITORY / "benchmarks/results").glob("*.md")):
        found.setdefault(f"benchmarks/results/{path.name}", f"results/{path.name}")
    found |= {"benchmarks/results": "results/index.md", "docs/methods": "methods/index.md"}
    found["examples"] = "examples.md"
    for path in sorted((REPOSITORY / "examples").glob("*.py")):
        found[f"examples/{path.name}"] = "examples.md"
    return found


def texts(known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every page: its path on the site, and its Markdown."""
    generated = {f"docs/methods/{slug}.md" for slug in methods.groups()} | {
        "docs/methods/README.md"
    }
    for source, place in known.items():
        path = REPOSITORY / source
        if place.endswith(".md") and path.suffix == ".md" and source != "README.md":
            own = source in generated
            slug = "index" if path.stem == "README" else path.stem
            text = (methods.index() if slug == "index" else methods.page(slug)) if own else None
            yield place, prepared(path.read_text("utf-8") if text is None else text, source, known)
    yield "examples.md", examples()
    yield from reference.pages().items()


def prepared(text: str, source: str, known: Mapping[str, str]) -> str:
    """Return a page of the repository as a page of the site."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL).replace(WRITTEN, "")
    # Generated parts have links as on the site already.
    text = drawn(turned(text, source, {**known, **{f"docs/{v}": v for v in made()}}))
    if source.startswith("docs/tutorials/") and not source.endswith("README.md"):
        name = f"{Path(source).stem}.ipynb"
        text = re.sub(r"^```text title=.*$", "```text", text, flags=re.MULTILINE)
        text += f"\n---\n\n[This page as a notebook]({name}), with its outputs.\n"
    formulas = ("docs/methods/", "docs/tutorials/", "docs/theory.md")
    return typeset(text) if source.startswith(formulas) else text


def made() -> list[str]:
    """Return the paths of the pages that are on the site alone."""
    return [*reference.pages(), "examples.md", "results/index.md"]


def examples() -> str:
    """Return the page of the programs in examples/."""
    parts = ["# Examples", "Small programs, as they lie in `examples/`. The tests run them."]
    for path in sorted((REPOSITORY / "examples").glob("*.py")):
        parts += [f"## `{path.name}`", f"```python\n{path.read_text('utf-8').strip()}\n```"]
    return "\n\n".join(parts)


def toml(entries: list[Entry]) -> str:
    """Return the navigation as a TOML array."""
    parts = []
    for entry in entries:
        if isinstance(entry, str):
            parts.append(json.dumps(entry))
        else:
            ((title, inside),) = entry.items()
            value = json.dumps(inside) if isinstance(inside, str) else toml(inside)
            parts.append(f"{{{json.dumps(title)} = {value}}}")
    return f"[{', '.join(parts)}]"


def complete(entries: list[Entry]) -> list[Entry]:
    """Return the navigation with the pages of all methods, in their order, and with the pages of
    docs/ that it does not name among the how-tos.
    """
    listed = json.dumps(entries)
    others = [
        path.name
        for path in sorted((REPOSITORY / "docs").glob("*.md"))
        if f'"{path.name}"' not in listed
    ]
    pages, grouped = methods.groups(), methods.by_group().items()
    own: list[Entry] = [
        {title: [{next(iter(pages[slug].values())).title: f"methods/{slug}.md"} for slug in slugs]}
        for title, slugs in grouped
    ]
    found: list[Entry] = []
    for entry in entries:
        ((title, inside),) = entry.items() if isinstance(entry, dict) else ((entry, entry),)
        more = {"Methods": ["methods/index.md", *own], "How-to": others}.get(title, [])
        if isinstance(inside, str):
            found.append(entry)
        else:
            found.append({title: [*inside, *more]})
    return found


def stage(folder: Path) -> None:
    """Write pages and settings to a folder, which zensical then builds."""
    shutil.rmtree(folder, ignore_errors=True)
    known = places()
    for source, place in known.items():
        path, target = REPOSITORY / source, folder / "docs" / place
        if source.startswith("docs/") and path.is_file() and path.suffix != ".md":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for place, text in texts(known):
        target = folder / "docs" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for path in sorted((REPOSITORY / "docs/tutorials").glob("*.md")):
        if path.stem != "README":
            written = json.dumps(notebook(path.read_text("utf-8")), indent=1)
            (folder / "docs/tutorials" / f"{path.stem}.ipynb").write_text(written, "utf-8")
    for name, content in web.programs().items():
        target = folder / "docs/gallery/keyboard" / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)
    (folder / "docs/assets").mkdir(exist_ok=True)
    for name in ("site.css", "worker.js"):
        shutil.copy(HERE / name, folder / "docs/assets" / name)
    settings = (HERE / "zensical.toml").read_text(encoding="utf-8")
    added = {
        "site_name": json.dumps(f"coterie {__version__}"),
        **({"repo_url": json.dumps(HOME)} if HOME else {}),
        "docs_dir": json.dumps("docs"),
        "site_dir": json.dumps("site"),
        "nav": toml(complete(NAVIGATION)),
    }
    lines = "".join(f"{key} = {value}\n" for key, value in added.items())
    settings = settings.replace("[project]\n", f"[project]\n{lines}", 1)
    source = f"paths = {json.dumps([str(REPOSITORY / 'src')])}\n"
    head = "[project.plugins.mkdocstrings.handlers.python]\n"
    (folder / "zensical.toml").write_text(settings.replace(head, head + source), encoding="utf-8")


def build(folder: Path) -> None:
    """Build the site; exits with what was said where there is a warning."""
    stage(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode or re.search(r"\b(warning|error)\b", said, re.IGNORECASE):
        sys.exit(f"{said}\nThe site has warnings, see above.")
    keep_at_home(folder / "site")
    print(f"open {folder / 'site/index.html'}")


def keep_at_home(site: Path) -> None:
    """Take from the scripts the addresses of servers, from which they load what no page here has:
    Mermaid, Pyodide, figures of repositories; and give pages that are opened as files our own
    substitute for workers.
    """
    for page in site.rglob("*.html"):
        home = os.path.relpath(site / "assets/worker.js", page.parent)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(SHIM, home), encoding="utf-8")
    for script in site.rglob("*.js"):
        found = script.read_bytes()
        if ELSEWHERE.search(found):
            script.write_bytes(ELSEWHERE.sub(b"./not-loaded/", found))


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "build/website")
