"""A synthetic language with known shared and private words: the ground truth for routing."""

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Literal

from pydantic import Field

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
_CONTENT = """able access action added addition address afternoon air answer approximately area art
ask author available back balance band bank base become bed best big bit black block body book born
building business call called camp capital car care case century certain change character child
children church class clear close code come common community company complete complex condition
consider control corn correct cost country course cover create culture current customer dark data
day death deep degree demand design detail different dinner direct discuss district doctor document
door east education effect end energy engine equal event exact example exist express extra face
fact family father feel field film final find fire form forward founded free friend front full
function future general genus girl give given going good great ground group half hand hard head
health heart high history hold home hope host hour house human idea impact import improve increase
information interest key kind knowledge land large last law least leave left length less level life
light like line list live local located long look love low main major making man mark market match
material matter mean measure media meet member method mind mission model modern moment mother mount
mountain movie music name natural nature new night north note nothing novel number object office
old open order origin original page paper part particular passed path peace people perfect period
person phone place plant play point popular port position possible post power present previous
private problem process produced product program project proper property public put question quite
range read real reason record red report research respect rest result return right river road rock
role room round run same say schedule school science search second section see send sense sent
series set several shall share short side sign similar simple single site size small social soft
something son song sound source south space special specific stand standard star start state
station story strange struct structure sub subject success sum super support suppose system table
take talk tell term test text thing things thought thousand time title together too top total town
trade travel true try turn turned type used value version video village visit voice walk want war
water way wealth weather web week well west white whole wife wind woman wood word work world write
year young"""

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
    seed: int = Field(
        0,
        ge=0,
        description="seed of the words, their order and the texts; independent of the run's seed",
    )
    clients: int = Field(
        4, ge=1, description="number of clients; their ids are `client-0`, `client-1`, ..."
    )
    train_tokens: Sizes = Field(
        6000, description="tokens of training text: one number, or one per client"
    )
    valid_tokens: Sizes = Field(
        2000, description="tokens of validation text: one number, or one per client"
    )
    test_tokens: Sizes = Field(
        2000, description="tokens of test text: one number, or one per client"
    )

    @property
    def title(self) -> str:
        return "a synthetic language"

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
