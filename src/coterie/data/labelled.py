"""Federations of labelled texts as token ids: read, drawn, encoded and cached. Data sets with a
kind of their own: CLINC150, DBpedia and Yahoo! Answers.
"""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field

from coterie.core.errors import DataError
from coterie.data.federation import Federation
from coterie.data.fetching import Root, fetch_splits, located, read_rows
from coterie.data.partition import CLASSES, Labelled, Partitioner
from coterie.data.partition_fields import Positive
from coterie.data.section import stamps
from coterie.data.splits import Numbers, Tokens
from coterie.data.store import LONGEST, Streams, default_cache, key_of, stored
from coterie.data.text_encoding import TextEncoder

FORMAT = 1  # raise it whenever equal keys would no longer mean equal arrays

_FILES = {"train": "examples", "test": "tests"}  # and the fields that bound them
_TEXTS = 1000  # encoded at a time

Rows = Sequence[Mapping[str, Any]]  # of a file, or of a data set of the Hub


_DRAWN = "texts to draw, the same number for each class; null: all"
TrainingTexts = Annotated[Positive | None, Field(description=f"training {_DRAWN}")]
TestTexts = Annotated[Positive | None, Field(description=f"test {_DRAWN}")]


class LabelledTexts(Partitioner, ABC):
    """Labelled texts: JSON lines below `root` or $COTERIE_DATA, or on the Hub; encoded once."""

    root: Root = None
    examples: TrainingTexts = None
    tests: TestTexts = None

    things: ClassVar[str] = "texts"
    folder: ClassVar[str]  # below the root
    columns: ClassVar[Mapping[str, type]]  # of the files
    label: ClassVar[str]  # the column with the kind of a text, below `kinds`
    kinds: ClassVar[int]
    dataset: ClassVar[str]  # on the Hub
    subset: ClassVar[str | None] = None
    hub_columns: ClassVar[tuple[str, ...]]

    @property
    def classes(self) -> int:
        return self.kinds

    def load(
        self, tokenizer: Any, length: int, cache: Path | None = None, order_seed: int = 0
    ) -> Federation:
        """Return the federation, whose clients are views of the same arrays, encoded into a cache
        (None: `store.default_cache`) by a fast tokenizer, in at most `length` tokens, special ones
        included; `order_seed`, the run's seed, fixes the order in which texts are drawn. Raises
        DataError: the tokenizer cannot be used, or the texts are missing, damaged, blank, invalid,
        or too few for the clients; SaveError.
        """
        return self.federated(
            lambda: self._encoded(tokenizer, length, cache or default_cache()), order_seed
        )

    def from_hub(self, data: Any) -> Rows:
        """Return the rows of a split of the Hub with the columns of the files."""
        return cast(Rows, data)

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the text to classify."""
        return str(row["text"])

    def called(self, kinds: Numbers) -> Numbers:
        """Return the class numbers of texts of these kinds."""
        return kinds

    def _encoded(self, tokenizer: Any, length: int, cache: Path) -> Labelled:
        fingerprint, read = self._source()
        fields = self.model_dump(mode="json", exclude={*Partitioner.model_fields, "root"})
        drawn = self.seed if self.examples or self.tests else None
        key = key_of(tokenizer, "labelled", FORMAT, fields, drawn, length, fingerprint)
        streams, _ = stored(
            cache, key, np.uint32, lambda: (self._streams(read(), tokenizer, length), ())
        )
        train, test = (streams[name] for name in _FILES)
        arrays = ((_padded(part), part["labels"].astype(np.int64)) for part in (train, test))
        return Labelled(*chain.from_iterable(arrays))

    def _source(self) -> tuple[Any, Callable[[], list[Rows]]]:
        """Return a fingerprint of the texts and a function that reads them. Raises DataError."""
        if paths := located(self.root, [f"{self.folder}/{name}.jsonl.gz" for name in _FILES]):
            return stamps(paths), lambda: [read_rows(path, self.columns) for path in paths]
        data = fetch_splits(self.dataset, self.subset, list(_FILES), self.hub_columns)
        return [part._fingerprint for part in data], lambda: [
            self.from_hub(part.select_columns(list(self.hub_columns))) for part in data
        ]

    def _streams(self, files: list[Rows], tokenizer: Any, length: int) -> Streams:
        """Yield the concatenated tokens, the lengths and the classes of the texts of both files."""
        # truncation changes the state of a tokenizer, and so its fingerprint
        tokenizer = deepcopy(tokenizer)
        for (name, field), rows in zip(_FILES.items(), files, strict=True):
            labels, lengths, count = self._labels(name, rows), list[int](), getattr(self, field)
            chosen = list(range(len(rows)))
            if count is not None:
                chosen = self._drawn(f"data.{field}", rows, labels, count)
            yield name, "tokens", self._tokens(name, rows, chosen, tokenizer, length, lengths)
            yield name, "lengths", [np.array(lengths, np.uint32)]
            yield name, "labels", [labels[chosen].astype(np.uint32)]

    def _labels(self, name: str, rows: Rows) -> Numbers:
        """Return the (rows,) classes. Raises DataError for an invalid label."""
        kinds = [row[self.label] for row in rows]
        for row, kind in enumerate(kinds):
            if not isinstance(kind, int) or not 0 <= kind < self.kinds:
                raise DataError(
                    f"{self.name}, {name}: row {row} has {self.label} {kind!r}, expected 0 to "
                    f"{self.kinds - 1}",
                    f"Use the files of {self.dataset}, or repair that row.",
                )
        return self.called(np.array(kinds, dtype=np.int64))

    def _drawn(self, field: str, rows: Rows, labels: Numbers, count: int) -> list[int]:
        """Return `count` rows with text, ascending, equally many per class. Raises DataError."""
        random, chosen = self._random("drawn", field), list[int]()
        for label, share in enumerate(np.array_split(np.arange(count), self.classes)):
            candidates = random.permutation(np.flatnonzero(labels == label)).tolist()
            worded = (row for row in candidates if self.text(rows[row]).strip())
            of_class = list(islice(worded, len(share)))
            if (most := len(of_class)) < len(share):
                wants = f"{len(share):,} texts of class {label} are wanted"
                remedy = f"Use at most {most * self.classes:,}, or null for all there are."
                raise DataError(f"{field}: {wants}, {self.name} has {most:,}", remedy)
            chosen += of_class
        return sorted(chosen)

    def _tokens(
        self, name: str, rows: Rows, chosen: list[int], tokenizer: Any, most: int, sizes: list[int]
    ) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the token ids of the chosen rows in pieces, and append each length to `sizes`."""
        encoder = TextEncoder(tokenizer)
        for start in range(0, len(chosen), _TEXTS):
            some = chosen[start : start + _TEXTS]
            texts = [self.text(rows[row])[:LONGEST] for row in some]
            encoded = encoder.whole(texts, most)
            for row, text, ids in zip(some, texts, encoded, strict=True):
                if not text.strip() or not ids:
                    no_tokens = f"{text[:40]!r}, for which the tokenizer returns no tokens"
                    what = no_tokens if text.strip() else "no text"
                    problem = f"{self.name}, {name}: row {row} has {what}"
                    raise DataError(problem, "Repair or leave out that row.")
            sizes += map(len, encoded)
            yield np.array([id for ids in encoded for id in ids], dtype=np.uint32)


def _padded(part: Mapping[str, Tokens]) -> Numbers:
    """Return the (N, longest) token ids of all texts, -1 after their ends; read-only."""
    lengths = part["lengths"].astype(np.int64)
    ids = np.full((len(lengths), lengths.max(initial=1)), -1, dtype=np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = part["tokens"]
    ids.flags.writeable = False
    return ids


DOMAINS: Mapping[str, str] = CLASSES["clinc150"]
_DOMAIN = {
    intent: domain
    for domain, (_, intents) in enumerate(sorted(DOMAINS.items()))
    for intent in intents.split()
}
INTENTS = tuple(sorted(_DOMAIN))


class Clinc150(LabelledTexts):
    """CLINC150 (Larson et al., 2019): what people ask an assistant, 150 intents in ten domains;
    questions out of scope are left out.

    Domains and intents are numbered in the order of their names. The Hub's data set, which numbers
    intents otherwise and has no domains, becomes the same.
    """

    kind: Literal["clinc150"] = "clinc150"
    labels: Literal["domain", "intent"] = "domain"  # the classes: ten domains, or 150 intents

    name: ClassVar[str] = "CLINC150"
    folder: ClassVar[str] = "clinc150"
    columns: ClassVar[Mapping[str, type]] = {"text": str, "intent": int}
    label: ClassVar[str] = "intent"
    kinds: ClassVar[int] = len(INTENTS)
    class_names: ClassVar[tuple[str, ...]] = INTENTS
    dataset: ClassVar[str] = "clinc/clinc_oos"
    subset: ClassVar[str | None] = "plus"
    hub_columns: ClassVar[tuple[str, ...]] = ("text", "intent")

    @property
    def classes(self) -> int:
        return len(DOMAINS) if self.labels == "domain" else self.kinds

    @property
    def names(self) -> tuple[str, ...]:
        intents = super().names
        return tuple(sorted(DOMAINS)) if intents and self.labels == "domain" else intents

    def from_hub(self, data: Any) -> Rows:
        names = data.features["intent"].names
        named = ((row["text"], names[row["intent"]]) for row in data)
        return [{"text": x, "intent": INTENTS.index(of)} for x, of in named if of in _DOMAIN]

    def called(self, kinds: Numbers) -> Numbers:
        if self.labels == "domain":
            return np.array([_DOMAIN[intent] for intent in INTENTS])[kinds]
        return kinds


class DBpedia14(LabelledTexts):
    """DBpedia (Zhang et al., 2015): sentences of articles on 14 kinds of things, no titles."""

    kind: Literal["dbpedia14"] = "dbpedia14"

    name: ClassVar[str] = "DBpedia"
    folder: ClassVar[str] = "dbpedia14"
    columns: ClassVar[Mapping[str, type]] = {"text": str, "label": int}
    label: ClassVar[str] = "label"
    kinds: ClassVar[int] = 14
    dataset: ClassVar[str] = "fancyzhx/dbpedia_14"
    hub_columns: ClassVar[tuple[str, ...]] = ("content", "label")
    class_names: ClassVar[tuple[str, ...]] = tuple(CLASSES["dbpedia14"].split(", "))

    def from_hub(self, data: Any) -> Rows:
        return cast(Rows, data.rename_column("content", "text"))


class YahooAnswers(LabelledTexts):
    """Yahoo! Answers (Zhang et al., 2015): questions on ten topics, title and content without the
    answers.

    As in DDOME, Section 5, as many are drawn as CIFAR has images.
    """

    kind: Literal["yahoo-answers"] = "yahoo-answers"
    examples: TrainingTexts = 50_000
    tests: TestTexts = 10_000

    name: ClassVar[str] = "Yahoo! Answers"
    folder: ClassVar[str] = "yahoo_answers"
    columns: ClassVar[Mapping[str, type]] = {
        "question_title": str,
        "question_content": str,
        "topic": int,
    }
    label: ClassVar[str] = "topic"
    kinds: ClassVar[int] = 10
    dataset: ClassVar[str] = "community-datasets/yahoo_answers_topics"
    hub_columns: ClassVar[tuple[str, ...]] = tuple(columns)
    class_names: ClassVar[tuple[str, ...]] = tuple(CLASSES["yahoo-answers"].split(", "))

    def text(self, row: Mapping[str, Any]) -> str:
        return " ".join(part for part in (row["question_title"], row["question_content"]) if part)
