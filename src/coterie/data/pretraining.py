"""The division of the corpora's documents between pretraining and clients.

No embedded base was pretrained on a document that a client of a recipe with `exclude_pretraining`
holds. The first two bases were pretrained on the other documents, today's on English prose alone
and DBpedia. The rule stays because the repository's part of the corpora follows it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from coterie.core.foreign import read_text, yaml_of

# 154 of 256 hash buckets: about 60 % of the documents of a corpus are for pretraining, the rest is
# for clients.
_PRETRAINING_BUCKETS = 154

# the clients of the quickstart federation: topics of the standard library, as glob patterns
STDLIB_TOPICS: Mapping[str, Sequence[str]] = yaml_of(
    read_text(Path(__file__).parent / "python/topics.yaml")
)


def seen_in_pretraining(corpus: str, key: str) -> bool:
    """Whether an embedded base may have been pretrained on the document `key` of `corpus`.

    For the corpus "multilingual" the key is the text, for "topics/<topic>" the document id.
    """
    if corpus == "topics/code" and any(
        fnmatch(key, pattern) for topic in STDLIB_TOPICS.values() for pattern in topic
    ):
        return False
    digest = hashlib.blake2b(f"{corpus}/{key}".encode(), digest_size=1).digest()
    return digest[0] < _PRETRAINING_BUCKETS
