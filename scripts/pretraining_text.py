"""English prose of open licences for the embedded base model: read from clones of public
repositories at fixed commits (`pretraining_sources.json`), freed of markup, and freed of what it
must not hold: other languages, program text, what stands twice, and what clients hold.
"""

import gzip
import hashlib
import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from html import unescape
from pathlib import Path

from coterie.data.origins import seen_in_pretraining

SOURCES = Path(__file__).with_name("pretraining_sources.json")
HELD_BUCKETS = 13  # of 256: about 5 % of the works are never trained on
SHINGLE = 13  # words in a row that a paragraph may not share with a client's text
# Chapters of ELTeC's novels are clients of `books`, so nothing of their authors is taken.
AUTHORS_OF_CLIENTS = (
    "gaskell", "machen", "skene", "disraeli", "wells", "clive", "ouida", "bulwer", "lytton_",
    "nesbit", "lyall",
)  # fmt: skip
COMMON_WORDS = frozenset(
    re.findall(
        r"\w+",
        "the of and to a in that it is was for on with as at by be his he i you not have had from "
        "but or an are this which they we she her him my your me their all so there were been will "
        "what do if would when no can out up has more who about them",
    )
)
TYPOGRAPHY = "“”‘’—–…é£"  # noqa: RUF001 - beside ASCII
# Front and back matter of Standard Ebooks, without a paragraph of the work.
MATTER = (
    "titlepage", "halftitlepage", "imprint", "colophon", "uncopyright", "toc", "loi", "endnotes",
    "dedication", "epigraph", "bibliography", "index", "glossary",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """A text of one kind of prose; `work` names the whole that is held back or trained on."""

    kind: str
    work: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Files of one repository at one commit, of one form."""

    kind: str
    form: str
    licence: str
    repository: str
    commit: str
    paths: tuple[str, ...]
    works: str  # "repository": all its files are one work; "file": every file or dialogue is one


def sources(listing: Path = SOURCES) -> list[Source]:
    """Read the list of sources; none may be by an author whom clients hold."""
    found = []
    for group in json.loads(listing.read_text(encoding="utf-8")):
        for repository, commit in group["repositories"].items():
            if any(author in repository.lower() for author in AUTHORS_OF_CLIENTS):
                raise SystemExit(f"{repository} is by an author whom clients hold: leave it out")
            shared = {key: group[key] for key in ("kind", "form", "licence", "works")}
            found.append(
                Source(**shared, repository=repository, commit=commit, paths=tuple(group["paths"]))
            )
    return found


# ---- clones -------------------------------------------------------------------------------------


def clone(folder: Path, repository: str) -> Path:
    """The git directory `folder`/owner+name of a repository, cloned from GitHub if missing."""
    path = folder / repository.replace("/", "+")
    if not path.exists():
        command = ["git", "clone", "--quiet", "--bare", f"https://github.com/{repository}.git"]
        subprocess.run([*command, str(path)], check=True)
    return path


def files(source: Source, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of the source's files, in the order of their names; a file that the clone
    lacks is passed over.
    """
    git = ["git", "-C", str(clone(folder, source.repository))]
    environment = os.environ | {"GIT_NO_LAZY_FETCH": "1"}
    tree = ["ls-tree", "-r", "-z", source.commit]
    listed = subprocess.run([*git, *tree], check=True, capture_output=True, env=environment).stdout
    blobs = {}
    for line in listed.decode().split("\0")[:-1]:
        about, name = line.split("\t", 1)
        if any(fnmatch(name, pattern) for pattern in source.paths):
            blobs[name] = about.split()[2]
    asked = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    read = subprocess.run(
        [*git, "cat-file", "--batch"], input=asked, capture_output=True, env=environment, check=True
    ).stdout
    for name, blob in blobs.items():
        head, _, read = read.partition(b"\n")
        if head.endswith(b" missing"):
            print(f"{source.repository} lacks {name} ({blob})", flush=True)
            continue
        size = int(head.split()[2])
        yield name, read[:size].decode("utf-8", errors="replace")
        read = read[size + 1 :]


# ---- markup -------------------------------------------------------------------------------------

BLOCKS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "para", "title", "item"))
DROPPED = frozenset(
    (
        "head", "metadata", "math", "table", "exercise", "media", "figure", "footnote", "equation",
        "code", "pre", "script", "style", "nav", "glossary", "sub", "sup",
    )
)  # fmt: skip


def tag(element: ET.Element) -> str:
    """The element's name without its namespace; nothing for comments and instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def words(text: str) -> str:
    """The text with every run of white space as one space, and no invisible joiners."""
    return re.sub(r"[\s\u00a0\u2009\u200a]+", " ", re.sub("[\u2060\u200b\ufeff\u00ad]", "", text))


def blocks(element: ET.Element) -> Iterator[str]:
    """Paragraphs and titles below an XML element; a paragraph with dropped content (formulas,
    tables) inside is dropped with it.
    """
    name, inside = tag(element), [tag(e) for e in element.iter()][1:]
    if name in DROPPED or not name:
        return
    if name in BLOCKS and not BLOCKS.intersection(inside):
        if not (DROPPED - {"sup", "sub", "footnote"}).intersection(inside):
            yield words("".join(flowing(element))).strip()
        return
    for child in element:
        yield from blocks(child)


def flowing(element: ET.Element) -> Iterator[str]:
    """The running text of an element, without the marks of notes."""
    name = tag(element)
    note = any(key.endswith("}type") and "noteref" in v for key, v in element.attrib.items())
    if name and not (name in DROPPED or note):
        yield " " if name == "br" else element.text or ""
        for child in element:
            yield from flowing(child)
            yield child.tail or ""


def xml(text: str) -> list[list[str]]:
    """XHTML or CNXML as one document of paragraphs."""
    text = re.sub(r"<!DOCTYPE[^>]*>", "", text)
    try:
        return [list(blocks(ET.fromstring(text.encode())))]
    except ET.ParseError:
        return []


def markdown(text: str) -> list[list[str]]:
    """Markdown of a web site, without front matter, program text, pictures, tags and addresses."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text.replace("\r", ""), flags=re.DOTALL)
    text = re.sub(r"```.*?```|~~~.*?~~~|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}", "", text, flags=re.DOTALL)
    text = re.sub(r"<(script|style|table|pre)\b.*?</\1>", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = unescape(re.sub(r"</?[a-zA-Z][^>]*>", "", text))
    text = re.sub(r"(?m)^\s*(\[[^\]]+\]:.*|[-=*_]{3,}|\|.*|\{:.*)$", "", text)
    text = re.sub(r"(?m)^\s*(#+|>|[-*+]|\d+\.)\s+", "\n", text)
    text = re.sub(r"(\*\*|__|(?<!\w)[*_](?=\w)|(?<=[\w.,!?])[*_](?!\w)|`)", "", text)
    text = re.sub(r"\\(\W)", r"\1", text)
    return [[words(block).strip() for block in re.split(r"\n\s*\n", text)]]


def conllu(text: str) -> list[list[str]]:
    """A treebank's sentences, joined to the paragraphs that it marks."""
    paragraphs: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("# newpar") or not paragraphs:
            paragraphs.append([])
        if line.startswith("# text = "):
            paragraphs[-1].append(line.removeprefix("# text = "))
    return [[words(" ".join(sentences)).strip() for sentences in paragraphs]]


def topical_chat(text: str) -> list[list[str]]:
    """Conversations, one line an utterance."""
    return [
        [words(f"- {turn['message']}").strip() for turn in conversation["content"]]
        for conversation in json.loads(text).values()
    ]


def guided_dialogue(text: str) -> list[list[str]]:
    """Dialogues with an assistant, one line an utterance."""
    return [
        [words(f"- {turn['utterance']}").strip() for turn in dialogue["turns"]]
        for dialogue in json.loads(text)
    ]


FORMS: dict[str, Callable[[str], list[list[str]]]] = {
    "xml": xml,
    "markdown": markdown,
    "conllu": conllu,
    "topical-chat": topical_chat,
    "guided-dialogue": guided_dialogue,
}


def documents(source: Source, folder: Path) -> Iterator[Document]:
    """The documents of one source, in a fixed order."""
    for name, text in files(source, folder):
        if name.endswith(".xhtml") and Path(name).stem.split("-")[0] in MATTER:
            continue
        for number, paragraphs in enumerate(FORMS[source.form](text)):
            work = source.repository
            work += "" if source.works == "repository" else f"/{name}#{number}"
            yield Document(source.kind, work, tuple(p for p in paragraphs if p))


def read(path: Path) -> Iterator[dict]:
    """The rows of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def abstracts(data: Path) -> Iterator[Document]:
    """DBpedia's abstracts; those of its test set count as held back."""
    for split in ("train", "test"):
        for number, row in enumerate(read(data / f"dbpedia14/{split}.jsonl.gz")):
            yield Document("encyclopedia", f"dbpedia14/{split}#{number}", (words(row["text"]),))


# ---- what is taken ------------------------------------------------------------------------------


def held_back(work: str) -> bool:
    """Whether a work is kept for evaluation and never trained on."""
    if work.startswith("dbpedia14/"):
        return work.startswith("dbpedia14/test")
    return hashlib.blake2b(f"held/{work}".encode(), digest_size=1).digest()[0] < HELD_BUCKETS


def english_prose(text: str) -> bool:
    """Whether a document is English (by its commonest words and letters) and not program text."""
    found = re.findall(r"[^\W\d_]+", text.lower())
    letters = sum(map(len, found))
    plain = sum(c.isascii() or c in TYPOGRAPHY for c in text)
    return (
        len(found) >= 20
        and sum(word in COMMON_WORDS for word in found) >= 0.22 * len(found)
        and letters >= 0.7 * len(text)
        and plain >= 0.98 * len(text)
        and sum(text.count(c) for c in "{}<>=;_\\|#") <= 0.01 * len(text)
    )


def shingles(text: str) -> Iterator[int]:
    """Hashes of all `SHINGLE` words in a row of a text."""
    found = re.findall(r"\w+", text.lower())
    for start in range(len(found) - SHINGLE + 1):
        yield hash(tuple(found[start : start + SHINGLE]))


def clients(data: Path, kept_back: bool = False) -> dict[str, list[str]]:
    """The texts that clients may hold, by corpus; with `kept_back` only those that no embedded
    base has seen, not the one before this either.
    """
    texts: dict[str, list[str]] = {}
    for row in read(data / "topics/train.jsonl.gz"):
        if not (kept_back and seen_in_pretraining(f"topics/{row['topic']}", row["id"])):
            texts.setdefault(row["topic"], []).append(row["text"])
    for row in read(data / "multilingual/train.jsonl.gz"):
        if not (kept_back and seen_in_pretraining("multilingual", row["text"])):
            texts.setdefault(row["language"], []).append(row["text"])
    for split in ("test", "train"):
        for row in read(data / f"ag_news/{split}.jsonl.gz"):
            texts.setdefault("ag_news", []).append(row["text"])
    return texts


class Sieve:
    """Lets pass what may be trained on or evaluated on: English prose, once, that no client holds.

    Args:
        held_by_clients: Texts of which no `SHINGLE` words in a row may pass.
    """

    def __init__(self, held_by_clients: Iterable[str]) -> None:
        self.forbidden = {s for text in held_by_clients for s in shingles(text)}
        self.seen: set[bytes] = set()
        self.dropped = {"not English prose": 0, "held by clients": 0, "twice": 0}

    def reason(self, paragraph: str) -> str:
        """Why a paragraph is left out, or nothing."""
        if any(shingle in self.forbidden for shingle in shingles(paragraph)):
            return "held by clients"
        if len(paragraph) < 60:
            return ""
        key = hashlib.blake2b(paragraph.lower().encode(), digest_size=8).digest()
        if key in self.seen:
            return "twice"
        self.seen.add(key)
        return ""

    def __call__(self, document: Document) -> str:
        """The text of a document, paragraphs as lines; empty if nothing is left."""
        if not english_prose(" ".join(document.paragraphs)):
            self.dropped["not English prose"] += sum(map(len, document.paragraphs))
            return ""
        kept = []
        for paragraph in document.paragraphs:
            if why := self.reason(paragraph):
                self.dropped[why] += len(paragraph)
            else:
                kept.append(paragraph)
        return "\n".join(kept) if sum(map(len, kept)) >= 120 else ""


def gather(
    listing: list[Source], folder: Path, data: Path
) -> tuple[dict[str, list[str]], dict[str, list[str]], list[dict]]:
    """All texts by kind, for training and held back, and a row for every repository (kind, name,
    licence, bytes). Held-back works pass the sieve first: what stands in both is not trained on.
    """
    sieve = Sieve(text for texts in clients(data).values() for text in texts)
    rows = {s.repository: {"kind": s.kind, "licence": s.licence, "bytes": 0} for s in listing}
    rows["dbpedia14"] = {"kind": "encyclopedia", "licence": "CC BY-SA 3.0", "bytes": 0}
    found = [(d, s.repository) for s in listing for d in documents(s, folder)]
    found += [(d, "dbpedia14") for d in abstracts(data)]
    parts: tuple[dict[str, list[str]], ...] = ({}, {})
    for held in (True, False):
        for document, repository in found:
            if held_back(document.work) == held and (text := sieve(document)):
                parts[held].setdefault(document.kind, []).append(text)
                rows[repository]["bytes"] += 0 if held else len(text.encode())
    print("left out, characters:", sieve.dropped, flush=True)
    return parts[0], parts[1], [{"repository": name} | row for name, row in rows.items()]
