"""Documents split by seed: equal ones stay in one split for all clients that have them, as do, on
request, nearly equal ones by their shingles (Broder, 1997).
"""

import json
import math
import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.core.protocol import ClientId, derive_seed

Splits = list[list[str]]  # texts of each part
Digest = bytes  # the same for contents that people call equal


class LocatedText(str):
    """A text with its file and row."""

    __slots__ = ("where",)
    where: str

    @classmethod
    def at(cls, where: str, text: str) -> "LocatedText":
        """Return a text with its file and row."""
        located = cls(text)
        located.where = where
        return located


def where_of(text: str) -> str:
    """Return the file and row of a text; "" if unknown."""
    return text.where if isinstance(text, LocatedText) else ""


@dataclass(frozen=True)
class Document:
    """A text to be split."""

    text: str  # or a conversation as JSON
    key: str  # of the work that it belongs to, which is never in two splits; fixes the order
    content: str = ""  # the part that is compared, if not the key; see `conversation_content`
    # the posts of an archive in it: documents of several clients with a common one stay together
    posts: tuple[Digest, ...] = ()

    @property
    def digest(self) -> Digest:
        """The digest of the content, equal for documents that people call equal."""
        return digest(self.content or self.key)


class _Work(NamedTuple):
    """Documents of a client that stay together."""

    key: str
    texts: list[str]


def keyed_by_text(texts: Iterable[str]) -> list[Document]:
    """Return non-blank texts as documents; identical texts stay in one split."""
    return [Document(text, text) for text in texts if text.strip()]


def comparable(text: str) -> str:
    """Return a text with white space, line ends and accents normalised, for comparison."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def conversation_content(
    messages: Iterable[Mapping[str, Any]], pair: Sequence[str] | None = None
) -> str:
    """Return the part of a conversation that is compared, of messages or of a prompt and
    completion: roles, contents and tool calls, not ids, times and other keys.
    """
    if pair is not None:
        messages = [{"role": ("user", "assistant")[i], "content": pair[i]} for i in range(2)]
    turns = [
        [
            message.get("role"),
            comparable(str(message.get("content") or "")),
            *(call.get("function") for call in message.get("tool_calls") or ()),
        ]
        for message in messages
    ]
    return json.dumps(turns, ensure_ascii=False, sort_keys=True)


def digest(content: str) -> Digest:
    """Return 16 bytes, equal for contents that people call equal."""
    return blake2b(comparable(content).encode(), digest_size=16).digest()


def split(documents: Iterable[Document], fractions: Sequence[float], seed: int) -> Splits:
    """Shuffle and split texts by seed, a list per fraction; documents of one key stay together, in
    order.

    The sizes in characters approach the fractions: the best of several seeded assignments is taken,
    which matters for few keys of different size. The order comes from hashes, so it is the same on
    every machine and with every version of NumPy.
    """
    works: dict[str, list[str]] = {}
    for document in documents:
        works.setdefault(document.key, []).append(document.text)
    return _best(works, fractions, seed, {})


def split_clients(
    clients: Mapping[ClientId, Iterable[Document]],
    fractions: Sequence[float],
    seed: int,
    near: bool = False,
    fixed: Mapping[Digest, int] = MappingProxyType({}),
) -> dict[ClientId, Splits]:
    """Split the texts of each client as `split` does, with equal documents in the same split for
    all. With `near`, nearly equal documents (see `similar`) stay together, too; `fixed` gives the
    splits of documents of other clients.
    """
    documents = {id: list(of_client) for id, of_client in clients.items()}
    groups = _groups(list(documents.values()), near)
    works = {id: _works(of_client, groups) for id, of_client in documents.items()}
    places = _shared_places(list(works.values()), fractions, seed)
    places |= {groups.get(key, key): part for key, part in fixed.items()}
    return {
        id: _best(
            {work.key: work.texts for work in of_client.values()},
            fractions,
            seed,
            {work.key: places[group] for group, work in of_client.items() if group in places},
        )
        for id, of_client in works.items()
    }


def fixed_places(clients: Iterable[Sequence[Sequence[Document]]]) -> dict[Digest, int]:
    """Return the first split of each document of clients with fixed splits."""
    places: dict[Digest, int] = {}
    for parts in clients:
        for place, documents in enumerate(parts):
            for document in documents:
                places.setdefault(document.digest, place)
    return places


def _groups(clients: Sequence[Sequence[Document]], near: bool) -> dict[Digest, Digest]:
    """Return the group of each digest: the digest of the first document with common posts of
    several clients, or with `near` nearly equal.
    """
    if not near and not any(document.posts for documents in clients for document in documents):
        return {}
    contents: dict[Digest, str] = {}
    holders = defaultdict[Digest, list[tuple[int, Digest]]](list)  # of each post
    for client, documents in enumerate(clients):
        for document in documents:
            key = document.digest
            contents.setdefault(key, document.content or document.key)
            for post in document.posts:
                holders[post].append((client, key))
    numbers = {digest: number for number, digest in enumerate(contents)}
    parents = similar(list(contents.values())) if near else list(range(len(contents)))
    for places in holders.values():
        if len({client for client, _ in places}) > 1:
            roots = {_root(parents, numbers[digest]) for _, digest in places}
            for root in roots:
                parents[root] = min(roots)
    digests = list(contents)
    return {digests[i]: digests[_root(parents, i)] for i in range(len(digests))}


def _works(documents: Iterable[Document], groups: Mapping[Digest, Digest]) -> dict[Digest, _Work]:
    """Return works by group, under their smallest key, so that the order of rows is no matter."""
    works: dict[Digest, _Work] = {}
    for document in documents:
        group = groups.get(document.digest, document.digest)
        work = works.get(group, _Work(document.key, []))
        work.texts.append(document.text)
        works[group] = _Work(min(work.key, document.key), work.texts)
    return works


def _shared_places(
    clients: Sequence[Mapping[Digest, _Work]], fractions: Sequence[float], seed: int
) -> dict[Digest, int]:
    """Return the parts of the groups that clients share: the best of several seeded assignments."""
    owners: dict[Digest, list[int]] = defaultdict(list)
    for number, works in enumerate(clients):
        for group in works:
            owners[group].append(number)
    shared = {group: np.array(numbers) for group, numbers in owners.items() if len(numbers) > 1}
    if not shared:
        return {}
    sizes = np.array([sum(_characters(work.texts) for work in works.values()) for works in clients])
    shares = {
        group: np.array([_characters(clients[i][group].texts) for i in numbers])
        / np.maximum(sizes[numbers], 1)
        for group, numbers in shared.items()
    }
    trials = (
        _assign_shared(shared, shares, len(clients), fractions, derive_seed(seed, "shared", trial))
        for trial in range(max(1, 1000 // len(shared)))
    )
    return min(trials, key=lambda trial: _shared_imbalance(trial[1], fractions))[0]


def _assign_shared(
    owners: Mapping[Digest, npt.NDArray[np.int64]],
    shares: Mapping[Digest, npt.NDArray[np.float64]],
    clients: int,
    fractions: Sequence[float],
    seed: int,
) -> tuple[dict[Digest, int], npt.NDArray[np.float64]]:
    """Return the parts of shared groups, and clients' shares of text by part, (clients, parts)."""
    places: dict[Digest, int] = {}
    filled = np.zeros((clients, len(fractions)))
    for group in sorted(owners, key=lambda group: derive_seed(seed, group.hex())):
        relative = (filled[owners[group]] / fractions).sum(axis=0)
        places[group] = int(relative.round(9).argmin())  # sums differ between versions of NumPy
        filled[owners[group], places[group]] += shares[group]
    return places, filled


def _shared_imbalance(
    filled: npt.NDArray[np.float64], fractions: Sequence[float]
) -> tuple[int, float]:
    """Return the number of empty parts, and the largest |log(share / fraction)| of the others."""
    rest = (1 - filled.sum(axis=1, keepdims=True)).clip(min=0).round(9)
    relative = (filled + rest * fractions) / fractions
    empty = relative == 0
    return int(empty.sum()), float(np.abs(np.log(relative[~empty])).max(initial=0).round(9))


def _best(
    works: Mapping[str, list[str]], fractions: Sequence[float], seed: int, fixed: Mapping[str, int]
) -> Splits:
    """Return the best of several seeded assignments, of more the fewer keys there are."""
    trials = max(1, 1000 // max(1, len(works)))
    assignments = (
        _assign(works, fractions, derive_seed(seed, "split", trial), fixed)
        for trial in range(trials)
    )
    best = min(assignments, key=lambda assignment: _imbalance(assignment, fractions))
    return [[text for work in part for text in work] for part in best]


def _assign(
    works: Mapping[str, list[str]], fractions: Sequence[float], seed: int, fixed: Mapping[str, int]
) -> list[list[list[str]]]:
    """Assign works in seeded order, each to its fixed part or the part that is least filled."""
    parts: list[list[list[str]]] = [[] for _ in fractions]
    filled = [0.0] * len(fractions)
    for key, part in fixed.items():
        filled[part] += _characters(works[key]) / fractions[part]
    for key in sorted(works, key=lambda key: derive_seed(seed, key)):
        if (place := fixed.get(key)) is None:
            place = filled.index(min(filled))
            filled[place] += _characters(works[key]) / fractions[place]
        parts[place].append(works[key])
    return parts


def _imbalance(parts: Sequence[list[list[str]]], fractions: Sequence[float]) -> float:
    """Return the largest |log(share / fraction)| of a part; infinite if a part is empty."""
    sizes = [sum(map(_characters, part)) for part in parts]
    if not all(sizes):
        return math.inf
    return max(
        abs(math.log(size / sum(sizes) / fraction))
        for size, fraction in zip(sizes, fractions, strict=True)
    )


def _characters(work: list[str]) -> int:
    return sum(map(len, work))


Hashes = npt.NDArray[np.uint64]

SHINGLE = 5  # words
LEAST = 0.7  # estimated share of common shingles from which texts are nearly equal
# Of 64 hashes: texts with 0.7 of their shingles in common share a band in 99 of 100 cases.
_BANDS, _ROWS = 16, 4
# Scripts without spaces: of Thai, Lao, Burmese, Khmer, Japanese and Chinese every character counts.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_FACTORS, _TERMS = np.random.RandomState(1997).randint(2**63, size=(2, 64), dtype=np.uint64)
_FACTORS |= 1  # so that multiplication loses nothing
_POWERS = np.array([31**k for k in range(SHINGLE)], dtype=np.uint64)


def similar(texts: Sequence[str]) -> list[int]:
    """Return, for each text, the number of the first text that is nearly equal, directly or through
    others, or its own. A text is compared only with the first one that shares a band, so that the
    time is linear in the number of texts; a few pairs are missed.
    """
    parents = list(range(len(texts)))
    # the smallest hash of a text's shingles by each of 64 functions
    signatures = [(_shingles(text)[:, None] * _FACTORS + _TERMS).min(axis=0) for text in texts]
    first: dict[tuple[int, bytes], int] = {}
    for number, signature in enumerate(signatures):
        for band, rows in enumerate(signature.reshape(_BANDS, _ROWS)):
            other = first.setdefault((band, rows.tobytes()), number)
            if (signature == signatures[other]).mean() >= LEAST:
                one, two = sorted((_root(parents, number), _root(parents, other)))
                parents[two] = one
    return [_root(parents, number) for number in range(len(texts))]


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def _shingles(text: str) -> Hashes:
    """Return the hashes of all runs of five words; of a shorter text, one hash."""
    words = _WORD.findall(text.casefold())
    hashes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint64)
    if len(hashes) < SHINGLE:
        return _mixed(np.array([zlib.crc32(" ".join(words).encode())], dtype=np.uint64))
    runs = np.lib.stride_tricks.sliding_window_view(_mixed(hashes), SHINGLE)
    return _mixed((runs * _POWERS).sum(axis=1))


def _mixed(hashes: Hashes) -> Hashes:
    """Return hashes of which every bit depends on all bits of the given ones (SplitMix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
