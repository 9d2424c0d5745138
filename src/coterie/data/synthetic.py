"""A synthetic language with known shared and private words: the ground truth for routing."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from pydantic import Field

from coterie.core.foreign import read_text
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.section import Bound, Section, Source, Texts
from coterie.data.splits import SPLITS

_WORDS = 16  # of each kind
_PHRASE = 12.0  # words in mean
_DOCUMENT = 64  # words
_NEXT = 1 / 1.5  # probability that the next word of the order follows, otherwise the one after it

# Words that common tokenizers, the embedded base's among them, keep whole behind a space: one token
# each.
_SHARED = "the and for with that this from are was were which have has had not but"
_CONTENT = read_text(Path(__file__).with_name("synthetic_words.txt"))


Sizes = Bound | tuple[Bound, ...]


class Synthetic(Section):
    """A synthetic language with known correct routing: some words have the same successors for all
    clients, some have others for each client.

    Text is a sequence of phrases, half of them shared and half private, of twelve words in mean.
    The first word of a phrase is drawn uniformly from the 16 words of its kind. These have a
    circular order: behind a word comes the next one, or the one after that with half the
    probability. No word is of both kinds, so that it says by itself who knows what follows. All
    clients have the same private words, and each client an order of its own for them: what one
    client learns of them is wrong for another.
    """

    kind: Literal["synthetic"] = "synthetic"
    title: ClassVar[str] = "a synthetic language"
    # seed of the words, their order and the texts; independent of the run's seed
    seed: int = Field(0, ge=0)
    clients: int = Field(4, ge=1)  # number of clients; their ids are `client-0`, `client-1`, ...
    train_tokens: Sizes = 6000  # tokens of training text: one number, or one per client
    valid_tokens: Sizes = 2000  # tokens of validation text: one number, or one per client
    test_tokens: Sizes = 2000  # tokens of test text: one number, or one per client

    def source(self) -> Source:
        self._check(self._ids())
        return Source("a synthetic language 1", self._read)

    @property
    def shared_words(self) -> list[str]:
        """The words with the same successors for all clients, in order."""
        return self._shuffled(_SHARED.split(), "shared")

    def private_words(self, client: int) -> list[str]:
        """Return the words whose successors depend on the client, in this client's order."""
        words = self._shuffled(_CONTENT.split(), "words")[:_WORDS]
        return self._shuffled(words, "private", client)

    def _ids(self) -> list[ClientId]:
        return [f"client-{i}" for i in range(self.clients)]

    def _shuffled(self, words: Sequence[str], *purpose: int | str) -> list[str]:
        """Return the words in random order; unlike `shuffle`, `random` is stable across Pythons."""
        random = Random(derive_seed(self.seed, *purpose))
        return [word for _, word in sorted((random.random(), word) for word in words)]

    def _read(self) -> Texts:
        return {
            id: [list(self._documents(client, split)) for split in SPLITS]
            for client, id in enumerate(self._ids())
        }

    def _documents(self, client: int, split: str) -> Iterator[str]:
        """Yield enough documents for the bound; a word is at least one token."""
        bound = self._bound(split, client)
        assert bound is not None
        kinds = self.shared_words, self.private_words(client)
        random = Random(derive_seed(self.seed, "text", client, split))
        for _ in range(-(-bound // _DOCUMENT)):
            # A space in front of the first word too: many tokenizers know words by it.
            yield " " + " ".join(islice(_words(kinds, random), _DOCUMENT))


def _words(kinds: tuple[list[str], list[str]], random: Random) -> Iterator[str]:
    """Yield the words of endless phrases."""
    while True:
        words = kinds[random.random() >= 0.5]
        place = int(random.random() * _WORDS)
        yield words[place]
        while random.random() >= 1 / _PHRASE:
            place = (place + 1 + (random.random() >= _NEXT)) % _WORDS
            yield words[place]
