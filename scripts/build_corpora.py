"""Build the corpora `multilingual` and `topics` from their public sources: a folder for `data.root`
or COTERIE_DATA.

    python scripts/build_corpora.py --out DIR [--characters N] [--only multilingual|topics]
        [--wikineural SOURCE] [--catalan SOURCE] [--novels SOURCE] [--stacks SOURCE] [--questions
        SOURCE] [--cpython SOURCE]

Sources are those of `coterie.data.origins`, with their licences; SOURCES.md beside the corpora
repeats them. WikiNEuRal is read from the Hub, the others are downloaded once into DIR/.sources.
Instead, SOURCE names what is on this machine already: for WikiNEuRal a copy of the Hub's data set,
for the others a folder (a clone) or an archive (.tar.gz), for questions a Posts.xml or its .7z,
which takes bsdtar or 7z to unpack, for CPython also the library of an installed Python.

Whole works are taken, in an order that hashes of their names fix, until a topic has enough text;
sentences of WikiNEuRal as they come. The same sources make the same rows. They are not the rows
that the published tables read, since sources change and sentences meet on other lines: the
repository's own part (corpora/) is for repeating those. With `exclude_pretraining` works of
`topics` that earlier embedded bases have seen are left out as ever; rows of `multilingual` are told
by their text, so here some may have sentences that it has seen.
"""

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path, PurePosixPath
from urllib.request import urlopen
from xml.etree import ElementTree

from coterie.data.origins import MULTILINGUAL, TOPICS, Origin, listed

WIKINEURAL = "Babelscape/wikineural"
ARCHIVES = {
    "catalan": "https://github.com/Softcatala/ca-text-corpus/archive/refs/heads/master.tar.gz",
    "novels": "https://github.com/COST-ELTeC/ELTeC-eng/archive/refs/heads/master.tar.gz",
    "stacks": "https://github.com/stacks/stacks-project/archive/refs/heads/master.tar.gz",
    "questions": TOPICS[2].address,
    "cpython": TOPICS[3].address,
}
SENTENCES, PIECE, SHORTEST = (
    8,
    4000,
    200,
)  # sentences of a row, characters of a piece of a work at most and at least
NO_CHAPTERS = {
    "preamble",
    "chapters",
    "fdl",
    "index",
    "my",
    "bibliography",
    "desirables",
}  # of the Stacks project's files
NO_MODULES = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "pydoc_data",
    "site-packages",
}  # folders of the standard library
TEI = "{http://www.tei-c.org/ns/1.0}"

Work = tuple[str, str]  # its id, and its text


def hashed(text: str) -> bytes:
    """Return what orders works and sentences by chance, the same everywhere."""
    return blake2b(text.encode(), digest_size=8).digest()


# Reading sources


def files(source: Path, pattern: str) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield the files of a folder, or of a tar archive with one folder in it, whose paths in
    that match a regular expression.
    """
    if source.is_dir():
        found = (
            (PurePosixPath(path.relative_to(source).as_posix()), path)
            for path in sorted(source.rglob("*"))
            if path.is_file()
        )
        yield from (
            (name, path.read_bytes()) for name, path in found if re.fullmatch(pattern, str(name))
        )
        return
    with tarfile.open(source) as archive:
        for member in archive:
            name = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if (
                member.isfile()
                and re.fullmatch(pattern, str(name))
                and (content := archive.extractfile(member))
            ):
                yield name, content.read()


def downloaded(address: str, folder: Path) -> Path:
    """Return the file of an address, fetched unless it is in the folder already."""
    path = folder / re.sub(r"\W+", "-", address.partition("://")[2].removesuffix(".tar.gz"))
    path = path.with_name(path.name + "".join(PurePosixPath(address).suffixes[-2:]))
    if not path.exists():
        print(f"downloading {address}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            with urlopen(address) as answer, open(part, "wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            sys.exit(
                f"{address} cannot be had ({error}): download it on another machine, and name it "
                f"by the option of this source"
            )
        part.rename(path)
    return path


def unpacked(source: Path, folder: Path) -> Path:
    """Return the Posts.xml of a dump of Stack Exchange: itself, in its folder, or out of its
    .7z.
    """
    if source.is_dir():
        return source / "Posts.xml"
    if source.suffix != ".7z":
        return source
    commands = {
        "bsdtar": ["-xf", str(source), "-C", str(folder), "Posts.xml"],
        "7z": ["e", f"-o{folder}", str(source), "Posts.xml"],
    }
    for program, options in commands.items():
        if found := shutil.which(program):
            subprocess.run([found, *options], check=True, stdout=subprocess.DEVNULL)
            return folder / "Posts.xml"
    sys.exit(
        f"{source}: neither bsdtar nor 7z is there to unpack it; install one, or name its "
        f"Posts.xml: --questions FILE"
    )


# Text


def joined(words: Iterable[str]) -> str:
    """Return separate words as a sentence: no space before a full stop, behind an apostrophe, or
    inside brackets and quotes.
    """
    text = re.sub(r"\s+([.,;:!?%)\]}»…])", r"\1", " ".join(words))
    text = re.sub(r"([(\[{«])\s+", r"\1", text)
    text = re.sub(r"(\w['\u2019])\s+(?=\w)", r"\1", text)
    return re.sub(r'"\s*([^"]*?)\s*"', r'"\1"', text).strip()


class _Plain(HTMLParser):
    """Gathers the text of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def plain(html: str) -> str:
    """Return the text of HTML."""
    parser = _Plain()
    parser.feed(html)
    parser.close()
    return re.sub(r"\n\s*\n+", "\n", "".join(parser.text)).strip()


def pieces(text: str) -> list[str]:
    """Return the text in pieces of at most PIECE characters, cut behind lines where there are
    any; scraps are left out.
    """
    found, rest = [], text
    while rest:
        end = len(rest) if len(rest) <= PIECE else rest.rfind("\n", 1, PIECE)
        end = end if end > 0 else PIECE
        found.append(rest[:end].strip())
        rest = rest[end:]
    return [piece for piece in found if len(piece) >= SHORTEST]


# Sources of sentences


def wikipedia(source: str, language: str) -> Iterator[str]:
    """Yield the sentences of one language of WikiNEuRal."""
    from datasets import load_dataset

    try:
        for row in load_dataset(source, split=f"train_{language}", streaming=True):
            yield joined(row["tokens"])
    except Exception as error:  # datasets raises whatever its readers and the network do
        sys.exit(
            f"{source}, train_{language}, cannot be read ({type(error).__name__}: {error}): name "
            f"a copy of it, --wikineural FOLDER"
        )


def catalan(source: Path) -> list[str]:
    """Return the sentences of the Catalan corpus, each once; those of its files, which are of a
    kind each, among one another.
    """
    lines = {
        line.strip()
        for _, content in files(source, r"data/[^/]+\.txt")
        for line in content.decode().splitlines()
    }
    return sorted((line for line in lines if " " in line), key=hashed)


def lines_of(sentences: Iterable[str], characters: int) -> Iterator[str]:
    """Yield rows of some sentences each, until there are so many characters."""
    remaining = iter(sentences)
    while characters > 0 and (row := " ".join(islice(remaining, SENTENCES))):
        yield row
        characters -= len(row)


# Sources of works


def novels(source: Path) -> Iterator[Work]:
    """Yield the novels of ELTeC: paragraphs, headings and verses of their bodies."""
    for name, content in files(source, r"level[01]/[^/]+\.xml"):
        body = ElementTree.fromstring(content).find(f"{TEI}text/{TEI}body")
        if body is not None:
            texts = (
                "".join(e.itertext())
                for e in body.iter()
                if e.tag in (f"{TEI}p", f"{TEI}head", f"{TEI}l")
            )
            yield name.stem, "\n".join(re.sub(r"\s+", " ", text).strip() for text in texts)


def chapters(source: Path) -> Iterator[Work]:
    """Yield the chapters of the Stacks project, as LaTeX from their first sections on, without
    what all of them end with.
    """
    for name, content in files(source, r"[^/]+\.tex"):
        body = re.search(
            r"\\tableofcontents(.*?)(?:\\input\{chapters\}|\\bibliography\{|\\end\{document\})",
            content.decode(),
            re.DOTALL,
        )
        if body and name.stem not in NO_CHAPTERS:
            yield name.stem, re.sub(r"\n{3,}", "\n\n", body[1])


def questions(posts: Path) -> Iterator[Work]:
    """Yield the questions of a dump of Stack Exchange with their answers."""
    asked: dict[str, list[str]] = {}
    for _, element in ElementTree.iterparse(posts):
        row = element.attrib
        if row.get("PostTypeId") == "1":
            asked.setdefault(row["Id"], []).insert(0, f"Q: {row['Title']}\n{plain(row['Body'])}")
        elif row.get("PostTypeId") == "2":
            asked.setdefault(row["ParentId"], []).append(f"A: {plain(row['Body'])}")
        element.clear()
    yield from (
        (id, "\n\n".join(posts)) for id, posts in asked.items() if posts[0].startswith("Q: ")
    )


def modules(source: Path) -> Iterator[Work]:
    """Yield the modules of CPython's standard library, without its tests: of a clone, an
    archive, or an installed Python's folder.
    """
    inside = source / "Lib" if (source / "Lib").is_dir() else source
    start = "" if inside.is_dir() else "Lib/"
    for name, content in files(inside, rf"{start}.*\.py"):
        if not NO_MODULES & set(name.parts):
            yield str(name).removeprefix(start), content.decode(errors="replace")


def enough(works: Iterable[Work], characters: int) -> Iterator[tuple[str, str]]:
    """Yield the pieces of whole works, with their ids, until there are so many characters."""
    for id, text in sorted(works, key=lambda work: hashed(work[0])):
        for piece in pieces(text):
            yield id, piece
            characters -= len(piece)
        if characters <= 0:
            return


# Writing


def write(path: Path, rows: Iterable[dict[str, str]], column: str) -> None:
    """Write rows as gzipped JSON lines, and say how many there are of each value of a column.
    Exits where a source gave none.
    """
    found: dict[str, int] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            found[row[column]] = found.get(row[column], 0) + 1
    print(
        f"{path}: {', '.join(f'{name} {count:,}' for name, count in found.items())} rows",
        flush=True,
    )
    wanted = {
        name for origin in (MULTILINGUAL if column == "language" else TOPICS) for name in origin.of
    }
    if missing := wanted - found.keys():
        sys.exit(f"nothing for {', '.join(sorted(missing))}: are its sources what they should be?")


def multilingual(
    wikineural: str, source: Callable[[str], Path], characters: int
) -> Iterator[dict[str, str]]:
    """Yield the rows of `multilingual`."""
    for language in sorted(language for origin in MULTILINGUAL for language in origin.of):
        sentences = (
            catalan(source("catalan")) if language == "ca" else wikipedia(wikineural, language)
        )
        for text in lines_of(sentences, characters):
            yield {"language": language, "text": text}


def topics(source: Callable[[str], Path], characters: int) -> Iterator[dict[str, str]]:
    """Yield the rows of `topics`."""
    with tempfile.TemporaryDirectory() as folder:
        works = {
            "arxiv": lambda: chapters(source("stacks")),
            "books": lambda: novels(source("novels")),
            "code": lambda: modules(source("cpython")),
            "stackexchange": lambda: questions(unpacked(source("questions"), Path(folder))),
        }
        for topic, of in works.items():
            for id, text in enough(of(), characters):
                yield {"topic": topic, "id": id, "text": text}


def said(origins: Iterable[Origin]) -> str:
    """Return a section of SOURCES.md."""
    return "\n".join(f"- {line.strip()}" for line in listed(list(origins)).splitlines())


def main() -> None:
    """Build what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder: for data.root, or COTERIE_DATA"
    )
    parser.add_argument(
        "--characters", type=int, default=2_700_000, help="of each language and topic, about"
    )
    parser.add_argument("--only", choices=("multilingual", "topics"), help="build one of the two")
    parser.add_argument(
        "--wikineural",
        default=WIKINEURAL,
        metavar="SOURCE",
        help="the Hub's data set, or a folder with a copy of it",
    )
    for name, address in ARCHIVES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="SOURCE", help=f"instead of {address}")
    args = parser.parse_args()

    def source(name: str) -> Path:
        given: Path | None = getattr(args, name)
        if given is not None and not given.exists():
            sys.exit(f"--{name} {given}: there is no such folder or file")
        return given or downloaded(ARCHIVES[name], args.out / ".sources")

    if args.only != "topics":
        write(
            args.out / "multilingual/train.jsonl.gz",
            multilingual(args.wikineural, source, args.characters),
            "language",
        )
    if args.only != "multilingual":
        write(args.out / "topics/train.jsonl.gz", topics(source, args.characters), "topic")
    text = f"# Sources\n\nmultilingual:\n\n{said(MULTILINGUAL)}\n\ntopics:\n\n{said(TOPICS)}\n\n"
    text += "Changed: selected, markup left out, joined, cut. A work's id names it in its source.\n"
    (args.out / "SOURCES.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
