"""Make the part of `multilingual` and `topics` that lies in the repository, from the full folder.

    python scripts/part_of_corpora.py --data ../shared/data [--out corpora] [--check]

The rows are those whose documents no embedded base was pretrained on
(`coterie.data.origins.seen_in_pretraining`), all of them. So a recipe with
`exclude_pretraining: true`, as all shipped ones are, reads the same text from the part as from the
full folder, whatever its bounds and seeds: `coterie.data.fetching.split` sees the same documents.
About 40 % of every language and topic is left (a third of the books, half of the mathematics), and
a work (an `id` of `topics`) is there as a whole or not at all. Rows are sorted by language, and by
topic and work, which compresses better; within them they stay in the order of the full files.

`topics/sources.tsv` lists every work with its address, as CC BY-SA and the GNU FDL ask for. What
else is to be said of sources and licences stands in `corpora/README.md`, which this script leaves
alone. The same input makes the same bytes (with the same zlib); `--check` writes nothing, and
compares contents.
"""

import argparse
import gzip
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from coterie.data.corpora import Multilingual, Topics
from coterie.data.origins import seen_in_pretraining

PART = Path(__file__).parents[1] / "corpora"
FULL = os.environ.get("COTERIE_DATA", PART.parents[1] / "shared/data")
SOURCES = "topics/sources.tsv"
ADDRESSES = {
    "books": "https://github.com/COST-ELTeC/ELTeC-eng/blob/master/{}.xml",
    "arxiv": "https://github.com/stacks/stacks-project/blob/master/{}.tex",
    "stackexchange": "https://quantumcomputing.stackexchange.com/q/{}",
    "code": "https://github.com/python/cpython/blob/v3.11.7/Lib/{}",
}
FOLDERS = {"ENG18740_Ouida": "level0/"}  # of ELTeC: the others are in level1
LICENCES = {
    "books": "public domain",
    "arxiv": "GFDL-1.2-or-later",
    "stackexchange": "CC-BY-SA",
    "code": "PSF-2.0",
}


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a JSON-lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def seen(row: dict[str, str]) -> bool:
    """Return whether an embedded base may have read the document of a row of either corpus."""
    if "topic" in row:
        return seen_in_pretraining(f"topics/{row['topic']}", row["id"])
    return seen_in_pretraining("multilingual", row["text"])


def address(topic: str, id: str) -> str:
    """Return where a work of a topic is to be found."""
    return ADDRESSES[topic].format(FOLDERS.get(id, "level1/") + id if topic == "books" else id)


def part(data: Path) -> dict[str, bytes]:
    """Return the contents of the part's files, uncompressed, by their paths below its folder."""
    kept = {
        file: sorted(
            (row for row in rows(data / file) if not seen(row)),
            key=lambda row: [row[c] for c in columns[:-1]],
        )
        for (file,), columns in (
            (Multilingual.files, Multilingual.columns),
            (Topics.files, Topics.columns),
        )
    }
    works = sorted({(row["topic"], row["id"]) for file in Topics.files for row in kept[file]})
    table = [
        "topic\tid\tlicence\taddress",
        *(f"{t}\t{id}\t{LICENCES[t]}\t{address(t, id)}" for t, id in works),
    ]
    lines = {
        file: [json.dumps(row, ensure_ascii=False) for row in found] for file, found in kept.items()
    }
    return {
        file: ("\n".join(found) + "\n").encode()
        for file, found in (lines | {SOURCES: table}).items()
    }


def compressed(content: bytes) -> bytes:
    """Return the content as gzip, without a name and a time in it."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def main() -> None:
    """Write the part, or compare it with what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=FULL, help="the full folder; default: $COTERIE_DATA"
    )
    parser.add_argument("--out", type=Path, default=PART, help="folder of the part")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if the part is another one"
    )
    args = parser.parse_args()
    for file, content in part(args.data).items():
        path = args.out / file
        if args.check:
            found = (
                gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            )
            if found != content:
                sys.exit(f"{path} is not what {args.data} comes to: run {sys.argv[0]}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressed(content) if path.suffix == ".gz" else content)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
