"""Summary of clients' texts: sizes, equal and nearly equal documents, odd characters, scripts."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.core.protocol import ClientId
from coterie.data.chats.splits import ChatSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.overlaps import Overlaps
from coterie.data.splits import SPLITS, Numbers, Split, TokenSplit
from coterie.data.splitting import digest, similar

Texts = Mapping[ClientId, Sequence[Sequence[str]]]

# The continuation bytes of UTF-8, read as Windows' encoding.
_TRAILING = re.escape(bytes(range(0x80, 0xC0)).decode("cp1252", "ignore"))
ODD: Mapping[str, re.Pattern[str]] = {
    "replacement characters (U+FFFD: text was lost in a conversion)": re.compile("\ufffd"),
    "NUL characters": re.compile("\0"),
    "control characters": re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"),
    "characters for private use": re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]"),
    "invisible characters": re.compile("[\xad\u200b\u2060\ufeff]"),
    "marks of the direction of writing": re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]"),
    "UTF-8 read as another encoding (`Ã¼` for `ü`)": re.compile(f"[ÂÃ][\x80-\x9f{_TRAILING}]|â€"),
}
_SCRIPTS = 4  # the most frequent ones of a client


@dataclass(frozen=True)
class Token:
    """A token of an example."""

    text: str  # its part of the decoded text; the name of a special token
    counted: bool  # by the loss
    special: bool


@dataclass(frozen=True)
class SplitSummary:
    """One split of a client."""

    documents: int  # or conversations
    tokens: int  # after any bound
    counted: int  # tokens with loss in one epoch
    median: int  # tokens of a document
    longest: int  # tokens of a document


@dataclass(frozen=True)
class ClientSummary:
    """The texts of one client; shared, crossing and near documents count against all clients."""

    splits: Mapping[str, SplitSummary]
    repeated: int  # repetitions of documents
    shared: int  # documents that other clients have, too
    crossing: int  # documents that are in another split, too
    near: int  # documents that are nearly equal to another one
    near_crossing: int  # documents that are nearly equal to one in another split
    not_read: Mapping[str, int]  # numbers of files, by ending
    odd: Mapping[str, int]  # numbers of odd characters, by kind
    scripts: Mapping[str, float]  # shares of letters, the largest ones
    examples: Sequence[Sequence[Token]] = ()  # the first training rows, as the model sees them
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)  # splits of each file or row


@dataclass(frozen=True)
class DataSummary:
    """The texts of a federation."""

    description: str
    notes: Sequence[str]  # that people should read before training
    clients: Mapping[ClientId, ClientSummary]


def summarised(
    federation: Federation,
    texts: Texts,
    end: int | None,
    content: Callable[[str], str],
    plain: Callable[[str], str],
    not_read: Mapping[ClientId, Mapping[str, int]],
) -> DataSummary:
    """Return a summary of a federation of token streams, and of the documents from which it was
    made, by client and split; `end` is the id that ends documents, `content` returns the part of
    one that is compared, `plain` its text, and `not_read` counts files by client and ending.
    """
    overlaps, nearly = Overlaps.of(texts, content), _nearly(texts, content)
    clients = {}
    for id, data in federation.everyone.items():
        plain_texts = [plain(document) for part in texts[id] for document in part]
        clients[id] = ClientSummary(
            _splits(data, texts[id], end),
            overlaps.documents[id] - overlaps.different[id],
            overlaps.shared[id],
            overlaps.crossing[id],
            *nearly[id],
            not_read.get(id, {}),
            _odd(plain_texts),
            _scripts(plain_texts),
        )
    return DataSummary(federation.description, federation.notes, clients)


def _splits(
    data: ClientData, texts: Sequence[Sequence[str]], end: int | None
) -> dict[str, SplitSummary]:
    summaries = {}
    for name, split, documents in zip(SPLITS, data.splits, texts, strict=True):
        lengths = _lengths(split, end)
        of_documents = int(np.median(lengths)), int(lengths.max())
        sizes = len(documents), len(split), split.predictions
        summaries[name] = SplitSummary(*sizes, *of_documents)
    return summaries


def _lengths(split: Split, end: int | None) -> Numbers:
    """Return the number of tokens of each document, with the end token."""
    if isinstance(split, ChatSplit):
        # a document longer than a window is in pieces that share a token
        lengths = split.lengths.astype(np.int64)
        ends = np.cumsum(lengths)[:-1]
        goes_on = (lengths[:-1] > split.context) & (split.tokens[ends] == split.tokens[ends - 1])
        return np.add.reduceat(lengths - [0, *goes_on], np.flatnonzero([True, *~goes_on]))
    assert isinstance(split, TokenSplit)
    ends = np.flatnonzero(np.asarray(split.tokens) == (-1 if end is None else end))
    return np.diff(np.unique([-1, *ends.tolist(), len(split) - 1]))


def _nearly(texts: Texts, content: Callable[[str], str]) -> dict[ClientId, tuple[int, int]]:
    """Return how many documents of clients are nearly equal to others, and to other splits'."""
    contents: dict[bytes, str] = {}
    keys: dict[tuple[ClientId, str], list[bytes]] = {}
    for id, parts in texts.items():
        for split, documents in zip(SPLITS, parts, strict=True):
            compared = [content(document) for document in documents]
            keys[id, split] = list(map(digest, compared))
            contents |= zip(keys[id, split], compared, strict=True)
    groups = dict(zip(contents, similar(list(contents.values())), strict=True))
    sizes, splits = Counter(groups.values()), defaultdict[int, set[str]](set)
    for (_, split), digests in keys.items():
        for key in digests:
            splits[groups[key]].add(split)
    counts = dict.fromkeys(texts, (0, 0))
    for (id, _), digests in keys.items():
        near = [groups[key] for key in digests if sizes[groups[key]] > 1]
        crossing = sum(len(splits[group]) > 1 for group in near)
        counts[id] = counts[id][0] + len(near), counts[id][1] + crossing
    return counts


def _odd(texts: Iterable[str]) -> dict[str, int]:
    counts = Counter[str]()
    for text in texts:
        if not text.isascii() or not text.isprintable():
            counts.update({name: len(odd.findall(text)) for name, odd in ODD.items()})
    return {name: count for name, count in counts.items() if count}


def _scripts(texts: Iterable[str]) -> dict[str, float]:
    characters, counts = Counter[str](), Counter[str]()
    for text in texts:
        characters.update(text)
    for character, count in characters.items():
        if character.isalpha():
            counts[unicodedata.name(character, "OTHER").split()[0].split("-")[0]] += count
    total = counts.total()
    return {script: count / total for script, count in counts.most_common(_SCRIPTS)}
