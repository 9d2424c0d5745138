"""Documents split by seed: what people call equal lies in one split, for all who have it."""

import json
import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.core.protocol import ClientId, derive_seed
from coterie.data.similarity import similar

Splits = list[list[str]]  # texts of each part
Digest = bytes  # of what people compare


class LocatedText(str):
    """A text with where it stands: its file, and the row of a table."""

    __slots__ = ("where",)
    where: str

    @classmethod
    def at(cls, where: str, text: str) -> "LocatedText":
        """Return a text with where it stands."""
        located = cls(text)
        located.where = where
        return located


def where_of(text: str) -> str:
    """Return where a text stands; "" where that is not known."""
    return text.where if isinstance(text, LocatedText) else ""


@dataclass(frozen=True)
class Document:
    """A text that is to be split.

    Args:
        text: The text, or a conversation as JSON.
        key: What it belongs to, which is never in two splits and fixes the order.
        content: What people compare, if not the key: see `conversation_content`.
    """

    text: str
    key: str
    content: str = ""

    @property
    def digest(self) -> Digest:
        """The same for documents that people call equal."""
        return digest(self.content or self.key)


class _Work(NamedTuple):
    """Documents of a client that stay together."""

    key: str
    texts: list[str]


def keyed_by_text(texts: Iterable[str]) -> list[Document]:
    """Documents that belong to nothing larger: of equal texts none is in another split. Blank
    ones are left out.
    """
    return [Document(text, text) for text in texts if text.strip()]


def comparable(text: str) -> str:
    """Return a text without what people do not call a difference: white space, line ends, and how
    accents are stored.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def conversation_content(
    messages: Iterable[Mapping[str, Any]], pair: Sequence[str] | None = None
) -> str:
    """Return what people compare of a conversation: who says what, and which tools are called with
    what; not ids, times and other keys.

    Args:
        messages: Each with `role` and `content`.
        pair: A prompt and its completion instead.
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
    """Return 16 bytes that are the same for contents that people call equal."""
    return blake2b(comparable(content).encode(), digest_size=16).digest()


def split(documents: Iterable[Document], fractions: Sequence[float], seed: int) -> Splits:
    """Texts shuffled and split by seed, a list for each fraction; documents of one key stay
    together and in order.

    Sizes (characters) come near the fractions: with few keys of unlike size, which many works of
    literature are, the best of several seeded assignments is taken. The order comes from hashes, so
    it is the same on every machine and with every version of NumPy.
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
    """Return the texts of each client in splits, as `split` does where nothing is equal.

    Documents that are equal but for white space, and what several clients have, lie in the same
    split for all of them.

    Args:
        clients: Documents by client.
        fractions: Of the splits.
        seed: Fixes the order.
        near: Whether documents that are nearly equal stay together, too; see `similar`.
        fixed: The splits of documents that yet others have.
    """
    documents = {id: list(of_client) for id, of_client in clients.items()}
    groups = _nearly_equal(documents.values()) if near else {}
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
    """Return the split of each document of clients whose splits are fixed; the first of several."""
    places: dict[Digest, int] = {}
    for parts in clients:
        for place, documents in enumerate(parts):
            for document in documents:
                places.setdefault(document.digest, place)
    return places


def _nearly_equal(clients: Iterable[Sequence[Document]]) -> dict[Digest, Digest]:
    """Return the group of each digest: that of the first document that is nearly equal."""
    contents: dict[Digest, str] = {}
    for documents in clients:
        for document in documents:
            contents.setdefault(document.digest, document.content or document.key)
    digests = list(contents)
    return {digests[i]: digests[j] for i, j in enumerate(similar(list(contents.values())))}


def _works(documents: Iterable[Document], groups: Mapping[Digest, Digest]) -> dict[Digest, _Work]:
    """Return the documents of a client that stay together, by their group. The smallest of their
    keys stands for them, so that the order of rows does not matter.
    """
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
    """Return the part of each group that several clients have: the best of several seeded
    assignments.
    """
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
    """Return shared groups in seeded order, each in the part that is filled least for its owners;
    and how much of each client's text is in each part, (clients, parts).
    """
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
    """Return how many parts are empty for a client that has nothing but what is shared, and how far
    the worst part is from its fraction, if all else were split by the fractions.
    """
    rest = (1 - filled.sum(axis=1, keepdims=True)).clip(min=0).round(9)
    relative = (filled + rest * fractions) / fractions
    empty = relative == 0
    return int(empty.sum()), float(np.abs(np.log(relative[~empty])).max(initial=0).round(9))


def _best(
    works: Mapping[str, list[str]],
    fractions: Sequence[float],
    seed: int,
    fixed: Mapping[str, int],
) -> Splits:
    """Return the best of several seeded assignments, more of them the fewer keys there are."""
    trials = max(1, 1000 // max(1, len(works)))
    assignments = (
        _assign(works, fractions, derive_seed(seed, "split", trial), fixed)
        for trial in range(trials)
    )
    best = min(assignments, key=lambda assignment: _imbalance(assignment, fractions))
    return [[text for work in part for text in work] for part in best]


def _assign(
    works: Mapping[str, list[str]],
    fractions: Sequence[float],
    seed: int,
    fixed: Mapping[str, int],
) -> list[list[list[str]]]:
    """Return the works in seeded order, each to its fixed part, or else to the one that is filled
    least in relation to its fraction.
    """
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
    """How far the worst part is from its fraction, as |log(found / wanted)|; infinite if a part
    is empty.
    """
    sizes = [sum(map(_characters, part)) for part in parts]
    if not all(sizes):
        return math.inf
    return max(
        abs(math.log(size / sum(sizes) / fraction))
        for size, fraction in zip(sizes, fractions, strict=True)
    )


def _characters(work: list[str]) -> int:
    return sum(map(len, work))
