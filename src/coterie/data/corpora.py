"""The corpora of the papers' tables, and the standard library of Python."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data import origins as sources
from coterie.data.fetching import OFFLINE, Root, Row, cut, fetch, located, read_rows
from coterie.data.section import Names, Section, Share, Source, TextFractions, Texts, choose, stamps
from coterie.data.splitting import Document, keyed_by_text, split


class Corpus(Section):
    """A corpus in a folder of coterie's data: `root`, or the variable COTERIE_DATA."""

    root: Root = None
    files: ClassVar[tuple[str, ...]]  # below the root

    def located_files(self) -> dict[str, Path]:
        """Return the corpus's files as `data.root/<file>` or `COTERIE_DATA/<file>`; {} if no folder
        is named. Raises DataError if files are missing in the folder.
        """
        whose = "data.root" if self.root else "COTERIE_DATA"
        return {
            f"{whose}/{file}": path
            for file, path in zip(self.files, located(self.root, self.files) or (), strict=False)
        }


class AgNews(Corpus):
    """AG News (Zhang et al., 2015): four categories of news, one client each.

    In distribution a client's three splits share its category. Out of distribution (CoMiGS, section
    3) its train split is its category, and valid and test are uniform mixtures of all four: valid
    of articles that no client trains on, test of the test file, each article at one client only.
    """

    kind: Literal["agnews"] = "agnews"
    # out: valid and test mix all categories; in: one category each
    distribution: Literal["out", "in"] = "out"
    valid_fraction: Share = 0.1  # share of the training articles used for validation

    files: ClassVar[tuple[str, ...]] = ("ag_news/train.jsonl.gz", "ag_news/test.jsonl.gz")
    # by label
    clients: ClassVar[tuple[ClientId, ...]] = ("world", "sports", "business", "sci-tech")

    @property
    def title(self) -> str:
        return f"AG News, {'out of' if self.distribution == 'out' else 'in'} distribution"

    def source(self) -> Source:
        if files := self.located_files():
            columns = {"text": str, "label": int}
            return Source(
                stamps(files.values()),
                lambda: self._read(*(read_rows(path, columns) for path in files.values())),
                files,
            )
        data = [fetch("fancyzhx/ag_news", None, name, OFFLINE) for name in ("train", "test")]
        prints = [part._fingerprint for part in data]
        return Source(prints, lambda: self._read(*(part.to_list() for part in data)))

    def _read(self, train: list[Row], test: list[Row]) -> Texts:
        fractions = (1 - self.valid_fraction, self.valid_fraction)
        learned = (
            split(keyed_by_text(texts), fractions, self.seed) for texts in self._by_label(train)
        )
        trains, valids = map(list, zip(*learned, strict=True))
        tests = [split(keyed_by_text(x), (1.0,), self.seed)[0] for x in self._by_label(test)]
        if self.distribution == "out":
            valids, tests = mixtures(valids), mixtures(tests)
        return dict(zip(self.clients, zip(trains, valids, tests, strict=True), strict=True))

    def _by_label(self, rows: list[Row]) -> list[list[str]]:
        texts: list[list[str]] = [[] for _ in self.clients]
        for row in rows:
            if not 0 <= row["label"] < len(texts):
                problem = f"AG News: label {row['label']} of {row['text'][:40]!r}..."
                raise DataError(problem, "Labels are 0 to 3.")
            texts[row["label"]].append(row["text"])
        return texts


def mixtures(categories: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return as many disjoint uniform mixtures as there are categories, cut to the smallest
    category. Categories take turns, so that a mixture cut by a token bound stays uniform.
    """
    count = len(categories)
    share = min(map(len, categories)) // count
    hands = [[texts[i::count][:share] for texts in categories] for i in range(count)]
    return [[text for turn in zip(*hand, strict=True) for text in turn] for hand in hands]


class _OneFile(Corpus):
    """A corpus of one file whose rows name their client; a checkout contains a part of it."""

    origins: ClassVar[tuple[sources.Origin, ...]]  # where its text comes from
    # folder of data; null: the environment variable COTERIE_DATA, or the part that a checkout has
    root: Path | None = None

    exclude_pretraining: bool = False  # leave out what earlier embedded bases were pretrained on

    # the first says whose a row is, and its plural is the recipe's field
    columns: ClassVar[tuple[str, ...]]

    fractions: TextFractions = (0.8, 0.1, 0.1)

    @property
    @abstractmethod
    def names(self) -> tuple[ClientId, ...]:
        """The requested values of the first column."""

    @property
    def cells(self) -> Mapping[str, Sequence[ClientId]]:
        """The clients that share the documents of each kind of text; by default one each."""
        return {name: (name,) for name in self.names}

    def parts(self, row: Row) -> Mapping[str, str]:
        """Return the parts of a row's text by kind."""
        return {row[self.columns[0]]: row["text"]}

    @abstractmethod
    def document(self, row: Row) -> tuple[str, Document]:
        """Return the corpus and the document of a row, as `seen_in_pretraining` names them."""

    def source(self) -> Source:
        files = self.located_files() or sources.in_checkout(self.files)
        if not files:
            raise DataError(
                f"{self.title}: no folder of data is given, and this is not a checkout of the "
                f"repository, which has a part of it in {sources.PART}/; "
                f"the data come from\n{sources.listed(self.origins)}",
                f"Run from a checkout. Or run `python {sources.BUILD} --out DIR` there to build "
                f"the folder from these sources, and then use "
                "--set data.root=DIR or COTERIE_DATA=DIR. For data sets of the Hub, use "
                "data.kind=hub.",
            )
        return Source(stamps(files.values()), lambda: self._read(*files.values()), files)

    def _read(self, path: Path) -> Texts:
        rows, owner = read_rows(path, dict.fromkeys(self.columns, str)), self.columns[0]
        choose((row[owner] for row in rows), self.names, f"{owner}s", str(path))
        documents: dict[str, list[Document]] = {cell: [] for cell in self.cells}
        for row in (row for row in rows if row[owner] in self.names):
            corpus, document = self.document(row)
            if not (self.exclude_pretraining and sources.seen_in_pretraining(corpus, document.key)):
                for cell, text in self.parts(row).items():
                    documents[cell].append(replace(document, text=text))
        texts: dict[ClientId, list[list[str]]] = {}
        for cell, clients in self.cells.items():
            shares = [share / len(clients) for _ in clients for share in self.fractions]
            parts = iter(split(documents[cell], shares, self.seed))
            texts |= {id: list(islice(parts, len(self.fractions))) for id in clients}
        return texts


_SENTENCES = re.compile(r"(?<=[.!?])\s+")  # between them


class Multilingual(_OneFile):
    """Wikipedia sentences, one language per client (CoMiGS; CoBo with languages ca, es, de, nl), or
    one language and one topic each.

    Several users may have text of the same kind, each documents of its own: clients
    `<language>-<topic>-1`, `-2`, ...; the last ones of each kind may be new, and never train.
    """

    kind: Literal["multilingual"] = "multilingual"
    title: ClassVar[str] = "multilingual Wikipedia"
    languages: Names = ("de", "fr", "it", "nl")  # one client for each
    # by topic and language, a regular expression of its words; client `<language>-<topic>` has the
    # sentences that match
    topics: dict[str, dict[str, str]] = Field({})
    # clients per language, or per language and topic; they share its documents
    users: int = Field(1, ge=1)
    # number of these clients, the last ones, that never train; only they are scored
    unseen: int = Field(0, ge=0)

    files: ClassVar[tuple[str, ...]] = ("multilingual/train.jsonl.gz",)
    columns: ClassVar[tuple[str, ...]] = ("language", "text")
    origins: ClassVar[tuple[sources.Origin, ...]] = sources.MULTILINGUAL

    @property
    def names(self) -> tuple[ClientId, ...]:
        return self.languages

    @property
    def cells(self) -> Mapping[str, Sequence[ClientId]]:
        kinds = [
            f"{language}-{topic}" for language in self.languages for topic in self.topics
        ] or self.languages
        return {
            kind: [f"{kind}-{k}" for k in range(1, self.users + 1)] if self.users > 1 else [kind]
            for kind in kinds
        }

    @property
    def newcomers(self) -> tuple[ClientId, ...]:
        return tuple(
            id for clients in self.cells.values() for id in clients[self.users - self.unseen :]
        )

    @model_validator(mode="after")
    def _check_kinds(self) -> "Multilingual":
        if self.unseen >= self.users:
            raise ValueError(
                f"unseen: {self.unseen} of {self.users} users of each kind leaves none to "
                f"train; increase users"
            )
        for topic, words in self.topics.items():
            if missing := [language for language in self.languages if language not in words]:
                raise ValueError(f"topic {topic} has no words in {', '.join(missing)}")
            for language, expression in words.items():
                try:
                    re.compile(expression)
                except re.error as error:
                    raise ValueError(
                        f"topic {topic}, language {language}: not a regular expression ({error})"
                    ) from None
        return self

    def parts(self, row: Row) -> Mapping[ClientId, str]:
        """Return the sentences with words of exactly one topic, by topic; without topics all."""
        if not self.topics:
            return super().parts(row)
        language, by_client = row["language"], dict[ClientId, list[str]]()
        for sentence in _SENTENCES.split(row["text"]):
            on = [
                topic
                for topic, words in self.topics.items()
                if re.search(rf"\b(?:{words[language]})\b", sentence)
            ]
            if len(on) == 1:
                by_client.setdefault(f"{language}-{on[0]}", []).append(sentence)
        return {id: " ".join(sentences) for id, sentences in by_client.items()}

    def document(self, row: Row) -> tuple[str, Document]:
        return "multilingual", Document(row["text"], row["text"])


class Topics(_OneFile):
    """Four kinds of English text for SlimPajama's (CoMiGS): one per client, split by work."""

    kind: Literal["topics"] = "topics"
    title: ClassVar[str] = "topics"
    # one client for each
    topics: Names = ("books", "arxiv", "stackexchange", "code")

    files: ClassVar[tuple[str, ...]] = ("topics/train.jsonl.gz",)
    columns: ClassVar[tuple[str, ...]] = ("topic", "id", "text")
    origins: ClassVar[tuple[sources.Origin, ...]] = sources.TOPICS

    @property
    def names(self) -> tuple[ClientId, ...]:
        return self.topics

    def document(self, row: Row) -> tuple[str, Document]:
        return f"topics/{row['topic']}", Document(row["text"], row["id"])


MODULES = Path(__file__).parent / "python/modules.jsonl.gz"  # by scripts/stdlib_texts.py


class Stdlib(Section):
    """Four topics of Python 3.11.7's standard library, which the embedded base has not seen."""

    kind: Literal["stdlib"] = "stdlib"
    title: ClassVar[str] = "Python's standard library"
    fractions: TextFractions = (0.8, 0.1, 0.1)

    def source(self) -> Source:
        return Source(stamps([MODULES]), self._read)

    def _read(self) -> Texts:
        chunks: dict[ClientId, list[str]] = {}
        for row in read_rows(MODULES, {"client": str, "text": str}):
            chunks.setdefault(row["client"], []).extend(cut(row["text"]))
        return {
            topic: split(keyed_by_text(texts), self.fractions, self.seed)
            for topic, texts in chunks.items()
        }
