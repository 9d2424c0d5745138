"""Common parts of `data` sections: bounds, seeds, and the conversion of texts to a federation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from coterie.core.errors import DataError
from coterie.core.files import digest_of
from coterie.core.importing import own_name
from coterie.core.protocol import ClientId
from coterie.data.chats.encoding import StreamEncoder
from coterie.data.federation import ClientInfo, Federation, check_id, federate
from coterie.data.origins import PART
from coterie.data.overlaps import Overlaps
from coterie.data.refusals import Refusals, not_read
from coterie.data.splits import SPLITS, Tokens
from coterie.data.store import Streams, Tokenizer, default_cache, dtype_for, key_of, stored
from coterie.data.text_encoding import ControlTokens, TextEncoder
from coterie.data.text_streams import RunningText, SplitTexts, text_streams

Texts = Mapping[ClientId, Sequence[Sequence[str]]]  # train, valid and test documents by client


@dataclass(frozen=True)
class Source:
    """Texts that are located but not read yet.

    Args:
        fingerprint: JSON value that changes with the texts, for the cache.
        read: Reads the texts. Raises DataError.
        files: The files of a named corpus by `data.root/<file>` or so; a run keeps their digests.
        notes: Sentences about the texts, which the cache keeps; `read` may add some.
        skipped: Files in a client's folder that are not read; under "" those beside the folders.
        links: Sentences about links that lead out of a folder, which the cache does not keep.
    """

    fingerprint: Any
    read: Callable[[], Texts]
    files: Mapping[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: Mapping[ClientId, Sequence[Path]] = field(default_factory=dict)
    links: Sequence[str] = ()


@dataclass(frozen=True)
class CheckedQuestion:
    """A question to a client's trained model, and what its answer is checked for, by name."""

    question: str
    checks: Mapping[str, Callable[[str], bool]]


def stamps(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and time (ns) of files, as a fingerprint. Raises DataError if missing."""
    try:
        return [
            (str(path.resolve()), (status := path.stat()).st_size, status.st_mtime_ns)
            for path in paths
        ]
    except OSError as error:
        problem = f"{error.filename}: cannot be read ({error.strerror})"
        raise DataError(problem, "Check the path and its permissions.") from None


def distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a value that occurs twice."""
    if len(set(values)) < len(values):
        raise ValueError("every value must occur only once")
    return values


def _sum_to_one(fractions: tuple[float, ...]) -> tuple[float, ...]:
    if abs(sum(fractions) - 1) > 1e-6:
        raise ValueError("the fractions must sum to 1")
    return fractions


Names = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(distinct)]
Share = Annotated[float, Field(gt=0, lt=1)]
Fractions = Annotated[tuple[Share, Share, Share], AfterValidator(_sum_to_one)]
TextFractions = Annotated[
    Fractions, Field(description="shares of train, valid and test in a client's text")
]
Bound = Annotated[int, Field(ge=1)]
Bounds = Bound | tuple[Bound, ...] | None

NEW = "new"  # the group of the clients that never train


class Section(BaseModel, ABC):
    """A `data` section. Subclasses say where the texts are and how they fall into clients and
    splits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # seed of the split into train, valid and test; independent of the run's seed
    seed: int = Field(0, ge=0)
    # most tokens of training text per client: one number, or a list with one per client in their
    # order; null: all
    train_tokens: Bounds = None
    # most tokens of validation text per client: one number, or a list with one per client in their
    # order; null: all
    valid_tokens: Bounds = None
    # most tokens of test text per client: one number, or a list with one per client in their order;
    # null: all
    test_tokens: Bounds = None

    # what is done with control tokens in people's text (`</s>` typed by somebody): they stay text,
    # become tokens, or are refused
    control_tokens: ControlTokens = "text"

    @abstractmethod
    def source(self) -> Source:
        """Locate the texts. Raises DataError if they are missing."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A short description of the data."""

    @property
    def newcomers(self) -> tuple[ClientId, ...]:
        """The clients that never train and are only scored."""
        return ()

    def questions(self, client: ClientId) -> Sequence[CheckedQuestion]:
        """Return what a client's model is asked after training, to check its own answers."""
        return ()

    def client_info(self, client: ClientId) -> ClientInfo | None:
        """Return what is known of a client without the texts; None for an impossible id."""
        return ClientInfo(group=NEW if client in self.newcomers else "")

    def load(
        self, tokenizer: Tokenizer, context: int, cache: Path | None = None, order_seed: int = 0
    ) -> Federation:
        """Return the federation: texts split, encoded once per tokenizer, and memory-mapped.

        Args:
            tokenizer: A fast tokenizer of transformers. Its end token follows every document.
            context: Window length C in tokens; the cache of running text does not depend on it.
            cache: Folder of the cache; None: `store.default_cache`.
            order_seed: Fixes the order of training and validation windows: the run's seed.

        Raises:
            DataError: The data are missing, damaged, invalid or too short.
            SaveError: The cache cannot be written.
        """
        source, encoder = self.source(), self.encoder(tokenizer)
        running = isinstance(encoder, RunningText)
        how = [encoder.fingerprint, *([] if running else [context])]
        every, notes = stored(
            cache or default_cache(),
            key_of(tokenizer, self.about(), source.fingerprint, *how),
            dtype_for(tokenizer) if running else np.uint32,
            lambda: self._built(source, encoder, context),
        )
        where = ""
        if any(name.startswith(f"{PART}/") for name in source.files):
            where = " (the part of it in this repository)"
        arrays, left = self.enough(every, context)
        description = f"{self.title}{where}: {len(arrays)} client{'s' * (len(arrays) != 1)}"
        description = "; ".join(filter(None, (description, encoder.description(arrays), left)))
        federation = federate(arrays, context, order_seed, description, encoder.split)
        files = {name: digest_of(path) for name, path in source.files.items()}
        federation = replace(
            federation, files=files, notes=(*not_read(source.skipped), *source.links, *notes)
        )
        if not self.newcomers:
            return federation
        seen, new = (
            {i: data for i, data in federation.clients.items() if (i in self.newcomers) == new}
            for new in (False, True)
        )
        described = f"{federation.description}, {len(new)} of them new"
        return replace(federation, clients=seen, unseen={NEW: new}, description=described)

    def about(self) -> dict[str, Any]:
        """Return the fields that token ids may depend on, for the cache; not where texts are."""
        fields = self.model_dump(mode="json", exclude={"root", "path"})
        # A user's section has no field `kind`, and two of them must not share an entry.
        return {"kind": own_name(type(self))} | fields

    def enough(
        self, arrays: Mapping[ClientId, Mapping[str, Tokens]], context: int
    ) -> tuple[Mapping[ClientId, Mapping[str, Tokens]], str]:
        """Return the streams of clients with enough text, a phrase on others. Raises DataError."""
        return arrays, ""

    def encoder(self, tokenizer: Tokenizer) -> StreamEncoder:
        """Return the encoder of the documents. Raises DataError."""
        return text_streams(TextEncoder(tokenizer, self.control_tokens))

    def content_of(self, document: str) -> str:
        """Return the part of a document that is compared with others."""
        return document

    def _built(
        self, source: Source, encoder: StreamEncoder, context: int
    ) -> tuple[Streams, Iterable[str]]:
        """Return the streams of the texts, and notes, complete once the streams are read."""
        texts = source.read()
        self._check(list(texts))
        parts = [
            SplitTexts(id, name, documents, self._bound(name, position))
            for position, (id, splits) in enumerate(texts.items())
            for name, documents in zip(SPLITS, splits, strict=True)
        ]
        overlaps = Overlaps.of(texts, self.content_of).notes
        return encoder.streams(parts, context), chain(source.notes, overlaps, encoder.notes)

    def _check(self, clients: list[ClientId]) -> None:
        with Refusals() as refusals:
            if not clients:
                problem = f"data.kind {self.title}: no clients"
                refusals.add(problem, "At least one client must have text.")
            for id in clients:
                with refusals.gather():
                    check_id(id)
            for name in SPLITS:
                bounds = getattr(self, f"{name}_tokens")
                if isinstance(bounds, tuple) and len(bounds) != len(clients):
                    refusals.add(
                        f"data.{name}_tokens: {len(bounds)} values for {len(clients)} clients "
                        f"({', '.join(clients)})",
                        "Give one number, or one per client in this order.",
                    )

    def _bound(self, name: str, position: int) -> int | None:
        bounds: int | tuple[int, ...] | None = getattr(self, f"{name}_tokens")
        return bounds[position] if isinstance(bounds, tuple) else bounds


def choose(available: Iterable[str], names: Sequence[str], field: str, where: str) -> None:
    """Refuse names that are not available, listing those that are. Raises DataError."""
    allowed = sorted(set(available))
    if unknown := [name for name in names if name not in allowed]:
        problem = f"data.{field}: {where} has no {', '.join(map(repr, unknown))}"
        raise DataError(problem, f"Choose among: {', '.join(allowed)}.")
