"""Sources and licences of `multilingual` and `topics` (built by `scripts/build_corpora.py`), the
part of them in a checkout of the repository, and their division between pretraining and clients.

No embedded base was pretrained on a document that a client of a recipe with `exclude_pretraining`
holds. The first two bases were pretrained on the other documents, today's on English prose alone
and DBpedia. The rule stays because the repository's part of the corpora follows it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from coterie.core.foreign import read_text, yaml_of

PART = "corpora"  # the folder of the repository: outside of the package, so no wheel has it
BUILD = "scripts/build_corpora.py"


class Origin(NamedTuple):
    """A source of text."""

    of: Sequence[str]  # the languages or the topic from this source
    what: str
    address: str
    licence: str


_SOURCES = yaml_of(read_text(Path(__file__).with_name("origins.yaml")))
MULTILINGUAL, TOPICS = (
    tuple(Origin(**source) for source in _SOURCES[corpus]) for corpus in ("multilingual", "topics")
)


def listed(origins: Sequence[Origin]) -> str:
    """Return a line per source: its topics, description, address and licence."""
    return "\n".join(f"  {', '.join(o.of)}: {o.what}, {o.address} ({o.licence})" for o in origins)


def in_checkout(files: Sequence[str]) -> dict[str, Path]:
    """Return the paths of files such as `topics/train.jsonl.gz` in the checkout, by name; {} if one
    is missing or this package is not in a checkout.
    """
    source = Path(__file__).resolve().parents[2]
    paths = {f"{PART}/{file}": source.parent / PART / file for file in files}
    return paths if source.name == "src" and all(path.is_file() for path in paths.values()) else {}


# 154 of 256 hash buckets: about 60 % of the documents of a corpus are for pretraining, the rest is
# for clients.
_PRETRAINING_BUCKETS = 154

# the clients of the quickstart federation: topics of the standard library, as glob patterns
STDLIB_TOPICS: Mapping[str, Sequence[str]] = yaml_of(
    read_text(Path(__file__).parent / "python/topics.yaml")
)


def seen_in_pretraining(corpus: str, key: str) -> bool:
    """Whether an embedded base may have been pretrained on the document `key` of `corpus`. For the
    corpus "multilingual" the key is the text, for "topics/<topic>" the document id.
    """
    if corpus == "topics/code" and any(
        fnmatch(key, pattern) for topic in STDLIB_TOPICS.values() for pattern in topic
    ):
        return False
    digest = hashlib.blake2b(f"{corpus}/{key}".encode(), digest_size=1).digest()
    return digest[0] < _PRETRAINING_BUCKETS
