"""Federations on which personal methods are compared: the papers' and topics' corpora, and folders
of unlike people made of the same data.

Two sizes: `small`, where a row takes half a minute on one thread, and `full`, of the shipped
recipes.
"""

import gzip
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Of every small run. Each client's tokens are seen about three times, as in CoMiGS.
SMALL: Mapping[str, Any] = {
    "data": {"train_tokens": 4000, "valid_tokens": 1200, "test_tokens": 2000},
    "method": {"rounds": 6, "local_steps": 8},
    "training": {"batch_size": 4},
    "evaluate_every": 2,
}
FULL: Mapping[str, Any] = {"evaluate_every": 2}
# `folders` as it was when the first rows were kept: ten rounds, whatever validation says
AS_KEPT: Mapping[str, Any] = {
    "method": {"name": "comigs-1g1s", "rounds": 10, "router_every": 15, "router_steps": 5},
    "patience": None,
    "evaluate_rows": None,
}
ROUTERS = {"router_every": 12, "router_steps": 4}  # a third of a router step per local iteration

CORPORA = {  # by shipped recipe
    "agnews-ood": "agnews-ood",
    "agnews-id": "agnews-id",
    "multilingual": "multilingual",
    "topics": "topics",
    "quickstart": "quickstart",
    "languages-topics": "languages-topics",
}
Writer = Mapping[str, tuple[str, int]]  # by client: the source of its text, and its training tokens
FOLDERS: Mapping[str, Writer] = {
    "two-alike": {
        "ann": ("news:1", 4000),
        "ben": ("news:1", 4000),
        "carl": ("topics:code", 4000),
        "dora": ("multilingual:it", 4000),
    },
    "unlike-sizes": {
        "little": ("topics:stackexchange", 2000),
        "much": ("topics:stackexchange", 40000),
        "news": ("news:2", 4000),
        "templates": ("templates", 4000),
    },
    # From here on: not looked at before the table of regret was made.
    "strangers": {
        "novels": ("topics:books", 4000),
        "dutch": ("multilingual:nl", 4000),
    },
    "scarce": {  # eight who have a page or two, each of four subjects twice
        f"{name}-{number}": (f"news:{label}", 800)
        for label, name in enumerate(("world", "sports", "business", "science"))
        for number in (1, 2)
    },
    "one-apart": {  # five who write about the same, and an office with much of one form
        **{f"sports-{number}": ("news:1", 2500) for number in range(1, 6)},
        "office": ("templates", 12000),
    },
    "mixed": {
        "german-1": ("multilingual:de", 6000),
        "german-2": ("multilingual:de", 1500),
        "programs": ("topics:code", 20000),
        "proofs": ("topics:arxiv", 4000),
        "questions": ("topics:stackexchange", 4000),
        "letters": ("templates", 1500),
    },
}
# Of `never_worse.py`: languages, trades, and code beside prose, in unlike amounts.
PEOPLE: Mapping[str, Writer] = {
    "own-languages": {
        "catalan": ("multilingual:ca", 8000),
        "spanish": ("multilingual:es", 3000),
        "french": ("multilingual:fr", 5000),
        "dutch": ("multilingual:nl", 12000),
    },
    "own-trades": {
        "physician": ("trades:physician", 3000),
        "lawyer": ("trades:lawyer", 5000),
        "engineer": ("trades:engineer", 8000),
        "broker": ("trades:broker", 8000),
    },
    "own-code-prose": {
        "programmer": ("topics:code", 5000),
        "beginner": ("topics:code", 2000),
        "novelist": ("topics:books", 5000),
        "reader": ("topics:books", 2000),
    },
}
TRADES = {  # words of news that one trade reads and the others do not
    "physician": r"hospital|patients?|doctors?|disease|drug|vaccine|cancer|medical|surgery|clinic",
    "lawyer": r"court|judge|lawsuit|jury|trial|prosecutors?|attorney|sued|ruling|verdict",
    "engineer": r"software|server|chips?|processor|linux|microsoft|wireless|browser|network",
    "broker": r"stocks?|shares|profit|dollar|investors?|earnings|quarter|prices",
}
CHARACTERS = 4  # of a token, at most: folders hold at least as much text as is asked for


def recipe_of(name: str, size: str, cache: Path) -> tuple[str, dict[str, Any]]:
    """Return a shipped recipe and what of it is changed, for one federation of one size.

    Raises:
        KeyError: There is no such federation.
    """
    changes = json.loads(json.dumps(dict(SMALL if size == "small" else FULL)))
    changes |= {"compare_with": [], "curve_every": None, "samples": False}
    if name in CORPORA:
        return CORPORA[name], changes
    writers = FOLDERS[name]
    factor = 1 if size == "small" else 8
    folder = cache / f"{name}-{size}"
    if not folder.is_dir():
        write_folders(folder, writers, factor)
    of_clients = [tokens * factor for _, tokens in (writers[i] for i in sorted(writers))]
    bounds = changes.setdefault("data", {})
    changes["data"] = {"path": str(folder), "valid_tokens": 1200, "test_tokens": 2000} | bounds
    changes["data"]["train_tokens"] = of_clients
    if size == "small":
        changes["model"] = {"context": 64}
    method = {**AS_KEPT["method"], **changes.get("method", {})}
    return "folders", {**changes, **AS_KEPT, "method": method}


def write_folders(folder: Path, writers: Writer, factor: int) -> None:
    """Write the text of each client as train, valid and test, no document in two of them."""
    taken: dict[str, int] = {}
    for client, (source, tokens) in writers.items():
        documents = _documents(source)
        (folder / client).mkdir(parents=True)
        for split, size in (
            ("train", tokens * factor),
            ("valid", max(1200, tokens // 4)),
            ("test", 2500 * factor),
        ):
            start = taken.get(source, 0)
            end, characters = start, 0
            while characters < size * CHARACTERS * 1.3 and end < len(documents):
                characters += len(documents[end])
                end += 1
            lines = (json.dumps({"text": text}) for text in documents[start:end])
            (folder / client / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
            taken[source] = end


def _documents(source: str) -> Sequence[str]:
    """Return the documents of a source, `corpus:category`, in an order of their own."""
    corpus, _, category = source.partition(":")
    if corpus == "templates":
        return _templates()
    root = Path(os.environ["COTERIE_DATA"])
    if corpus == "trades":
        texts = (row["text"] for row in _rows(root / "ag_news"))
        return [text for text in texts if _trade(text) == category]
    file, column = {
        "news": ("ag_news", "label"),
        "topics": ("topics", "topic"),
        "multilingual": ("multilingual", "language"),
    }[corpus]
    found = [row["text"][:1500] for row in _rows(root / file) if str(row[column]) == category]
    random.Random(0).shuffle(found)
    return found


def _rows(corpus: Path) -> list[dict[str, Any]]:
    with gzip.open(corpus / "train.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def _trade(text: str) -> str | None:
    """Return the trade with two words in a text at least, and twice those of any other."""
    words = {trade: len(re.findall(rf"\b({of})\b", text.lower())) for trade, of in TRADES.items()}
    second, first = sorted(words.values())[-2:]
    return max(words, key=lambda i: words[i]) if first >= max(2, 2 * second) else None


def _templates() -> Sequence[str]:
    """Return invoices and reminders that differ in names and numbers alone."""
    draw = random.Random(0)
    names = ("Miller", "Jones", "Garcia", "Chen", "Novak", "Rossi", "Dubois", "Kim", "Okafor")
    things = ("bolts", "hinges", "brackets", "hoses", "filters", "pumps", "valves", "cables")
    form = (
        "Dear {0},\n\nplease find below invoice number {1} for {2} {3} of {4} {5}. The amount of "
        "{6}.{7:02} EUR is due within {8} days. Our reference is {9}-{10}.\n\nWith kind regards,\n"
        "{11} & Sons"
    )
    months = ("January", "March", "May", "June", "September", "November")
    return [
        form.format(
            draw.choice(names),
            draw.randint(10000, 99999),
            draw.randint(2, 900),
            draw.choice(things),
            draw.choice(months),
            draw.randint(2019, 2026),
            draw.randint(20, 9000),
            draw.randint(0, 99),
            draw.choice((14, 30, 60)),
            draw.choice("ABCDEF"),
            draw.randint(100, 999),
            draw.choice(names),
        )
        for _ in range(3000)
    ]
