"""The division of the corpora's documents between pretraining and clients.

No embedded base was pretrained on a document that a client of a recipe with `exclude_pretraining`
holds. The first two bases were pretrained on the other documents, today's on English prose alone
and DBpedia. The rule stays because the repository's part of the corpora follows it.
"""

import hashlib
from fnmatch import fnmatch

# 154 of 256 hash buckets: about 60 % of the documents of a corpus are for pretraining, the rest is
# for clients.
_PRETRAINING_BUCKETS = 154

# The clients of the quickstart federation: four topics of the standard library, as glob patterns
# relative to its folder. They share a language (Python and the English of its documentation),
# differ in topic, and are small.
STDLIB_TOPICS: dict[str, tuple[str, ...]] = {
    "reference": ("pydoc_data/topics.py",),
    "network": (
        "ftplib.py",
        "http/cookiejar.py",
        "http/server.py",
        "imaplib.py",
        "ipaddress.py",
        "poplib.py",
        "socketserver.py",
        "ssl.py",
        "urllib/*.py",
        "wsgiref/*.py",
    ),
    "numbers": (
        "_pydecimal.py",
        "bisect.py",
        "calendar.py",
        "colorsys.py",
        "fractions.py",
        "heapq.py",
        "random.py",
        "statistics.py",
    ),
    "introspection": (
        "ast.py",
        "bdb.py",
        "dataclasses.py",
        "dis.py",
        "enum.py",
        "inspect.py",
        "pdb.py",
        "tokenize.py",
        "traceback.py",
        "typing.py",
    ),
}


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
