"""A synthetic language with known shared and private parts: the ground truth for routing."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, product
from random import Random
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationInfo, field_validator

from coterie.core.protocol import ClientId, derive_seed
from coterie.data.section import Bound, Section, Source, Texts
from coterie.data.splits import SPLITS
from coterie.data.store import Tokenizer

NONE, SHARED, PRIVATE, TOPIC = -1, 0, 1, 2  # kinds of tokens; topic t is TOPIC + t

# Words that common tokenizers, the embedded base's among them, keep whole behind a space: one token
# each.
_FUNCTION = """the and for with that this from are was were which have has had not but they their
all can will one two about after again also any because been before being between both could did
does down during each either even every few how into its many may more most much must near need
never next now off often once only other our out over"""
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
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]

Counted = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0, le=1)]
Kinds = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Chain:
    """Words in a cycle: behind a word comes the k-th next one of the cycle with the probability of
    k. All words are equally frequent.

    Args:
        words: In the order of the cycle.
        probabilities: Of k = 1, 2, ...; they sum to 1.
    """

    words: tuple[str, ...]
    probabilities: tuple[float, ...]

    def start(self, random: Random) -> int:
        """Return the place of a word drawn uniformly."""
        return int(random.random() * len(self.words))

    def step(self, place: int, random: Random) -> int:
        """Return the place of a next word."""
        k = bisect(list(accumulate(self.probabilities))[:-1], random.random()) + 1
        return (place + k) % len(self.words)


@dataclass(frozen=True)
class Language:
    """The word chains of which every client's text is made.

    Args:
        shared: The chain of all clients.
        topics: The chain of each topic.
        private: Each client's own chain.
    """

    shared: Chain
    topics: tuple[Chain, ...]
    private: tuple[Chain, ...]

    def kinds(self) -> dict[str, int]:
        """Return the kind of each word: SHARED, PRIVATE, or TOPIC + t."""
        chains = [
            (SHARED, self.shared),
            *((TOPIC + t, topic) for t, topic in enumerate(self.topics)),
            *((PRIVATE, p) for p in self.private),
        ]
        return {word: kind for kind, chain_of_kind in chains for word in chain_of_kind.words}


class Synthetic(Section):
    """A synthetic language with known correct routing: some words have the same successors for all
    clients, some for the clients of a topic, some for one client.

    Text is a sequence of phrases. A phrase is shared, of a topic or private; its first word is
    drawn uniformly from the words of that kind, and behind each word comes one of `successors` next
    ones, as the kind's chain says. No word is of two kinds, so that it says by itself who knows
    what follows. By default all clients have the same private words, and each client an order of
    its own for them: what one client learns of them is wrong for another.
    """

    kind: Literal["synthetic"] = "synthetic"
    seed: Annotated[
        int,
        Field(
            ge=0,
            description="seed of the words, their order and the texts; independent of the run's "
            "seed",
        ),
    ] = 0
    clients: Annotated[
        int, Field(ge=1, description="number of clients; their ids are `client-0`, `client-1`, ...")
    ] = 4
    topics: Annotated[
        tuple[tuple[Counted, ...], ...],
        Field(description="for each topic, the numbers of the clients that share it, from 0"),
    ] = ()
    shares: Annotated[
        tuple[Weight, Weight, Weight],
        Field(
            description="shares of shared, topic and private phrases; a client without a topic "
            "has more of the others"
        ),
    ] = (0.5, 0.0, 0.5)
    shared_words: Annotated[
        int, Field(ge=2, description="number of words with the same successors for all clients")
    ] = 16
    topic_words: Annotated[int, Field(ge=2, description="number of words per topic")] = 16
    private_words: Annotated[
        int, Field(ge=2, description="number of words with other successors for each client")
    ] = 16
    conflict: Annotated[
        bool,
        Field(
            description="clients have the same private words, in different orders; false: "
            "different words"
        ),
    ] = True
    successors: Annotated[
        int,
        Field(
            ge=1,
            description="number of possible successors of a word, each half as probable as the "
            "one before",
        ),
    ] = 2
    phrase_words: Annotated[float, Field(ge=1, description="mean number of words per phrase")] = (
        12.0
    )
    document_words: Annotated[int, Field(ge=1, description="number of words per document")] = 64
    train_tokens: Annotated[
        Bound | tuple[Bound, ...],
        Field(description="tokens of training text: one number, or one per client"),
    ] = 6000
    valid_tokens: Annotated[
        Bound | tuple[Bound, ...],
        Field(description="tokens of validation text: one number, or one per client"),
    ] = 2000
    test_tokens: Annotated[
        Bound | tuple[Bound, ...],
        Field(description="tokens of test text: one number, or one per client"),
    ] = 2000

    @field_validator("topics")
    @classmethod
    def _check_topics(
        cls, topics: tuple[tuple[int, ...], ...], info: ValidationInfo
    ) -> tuple[tuple[int, ...], ...]:
        clients = info.data.get("clients", 0)
        for members in topics:
            if (
                not members
                or len(set(members)) < len(members)
                or (clients and max(members) >= clients)
            ):
                raise ValueError(
                    f"a topic lists at least one client, each once, with numbers 0 to {clients - 1}"
                )
        return topics

    @field_validator("shares")
    @classmethod
    def _check_shares(
        cls, shares: tuple[float, float, float], info: ValidationInfo
    ) -> tuple[float, float, float]:
        if abs(sum(shares) - 1) > 1e-6:
            raise ValueError("the shares must sum to 1")
        if shares[1] and info.data.get("topics") == ():
            raise ValueError(
                "topics have a share, but there are none; list data.topics, or set their share to 0"
            )
        if shares[1] == 1:
            raise ValueError("the share of topics cannot be 1, since a client may have no topic")
        return shares

    @field_validator("successors")
    @classmethod
    def _check_successors(cls, successors: int, info: ValidationInfo) -> int:
        fewest = min(
            (
                info.data[name]
                for name in ("shared_words", "topic_words", "private_words")
                if name in info.data
            ),
            default=2,
        )
        if successors >= fewest:
            raise ValueError(f"must be less than the words of each kind, the smallest has {fewest}")
        return successors

    @property
    def title(self) -> str:
        return "a synthetic language"

    @property
    def ids(self) -> list[ClientId]:
        """The clients in order."""
        return [f"client-{i}" for i in range(self.clients)]

    def language(self) -> Language:
        """Return the words of each kind, and what follows each."""
        pool = self._pool()

        def take(count: int) -> list[str]:
            return list(islice(pool, count))

        shared = _FUNCTION.split()[: self.shared_words]
        shared += take(self.shared_words - len(shared))
        topics = [self._chain(take(self.topic_words), "topic", t) for t in range(len(self.topics))]
        common = take(self.private_words) if self.conflict else None
        private = [
            self._chain(common or take(self.private_words), "private", i)
            for i in range(self.clients)
        ]
        return Language(self._chain(shared, "shared"), tuple(topics), tuple(private))

    def _pool(self) -> Iterator[str]:
        """Yield real words, then pronounceable ones without end, in an order fixed by the seed."""
        pronounceable = chain.from_iterable(
            product(_SYLLABLES, repeat=syllables) for syllables in range(3, 9)
        )
        return chain(
            _shuffled(_CONTENT.split(), Random(derive_seed(self.seed, "words"))),
            map("".join, pronounceable),
        )

    def _chain(self, words: Sequence[str], *purpose: int | str) -> Chain:
        weights = [0.5**k for k in range(self.successors)]
        return Chain(
            tuple(_shuffled(words, Random(derive_seed(self.seed, *purpose)))),
            tuple(weight / sum(weights) for weight in weights),
        )

    def source(self) -> Source:
        self._check(self.ids)
        return Source("a synthetic language 1", self._read)

    def _read(self) -> Texts:
        language = self.language()
        return {
            id: [list(self._documents(language, position, name)) for name in SPLITS]
            for position, id in enumerate(self.ids)
        }

    def _documents(self, language: Language, client: int, split: str) -> Iterator[str]:
        """Yield enough documents for the bound: a word is at least one token."""
        bound = self._bound(split, client)
        assert bound is not None
        topics = [
            topic
            for topic, members in zip(language.topics, self.topics, strict=True)
            if client in members
        ]
        chains = [language.shared, language.private[client], *topics]
        weights = [self.shares[0], self.shares[2], *(self.shares[1] / len(topics) for _ in topics)]
        random = Random(derive_seed(self.seed, "text", client, split))
        for _ in range(-(-bound // self.document_words)):
            # A space in front of the first word too: many tokenizers know words by it.
            yield " " + " ".join(islice(self._words(chains, weights, random), self.document_words))

    def _words(
        self, chains: Sequence[Chain], weights: Sequence[float], random: Random
    ) -> Iterator[str]:
        limits = list(accumulate(weights))
        while True:
            chosen = chains[min(bisect(limits, random.random() * limits[-1]), len(chains) - 1)]
            place = chosen.start(random)
            yield chosen.words[place]
            while random.random() >= 1 / self.phrase_words:
                place = chosen.step(place, random)
                yield chosen.words[place]

    def kinds(self, tokenizer: Tokenizer, ids: Sequence[int] | npt.NDArray[np.integer]) -> Kinds:
        """Return the kind of each token of a text in this language.

        Args:
            tokenizer: The one that made the ids.
            ids: (tokens,) of the text, or of a window of it.

        Returns:
            (tokens,) SHARED, PRIVATE, TOPIC + t for topic t, or NONE: an end token, or a part of a
            word that a window's edge cuts.
        """
        spelled = _spelled(tokenizer, self.language().kinds())
        longest = max(map(len, spelled))
        tokens = tuple(map(int, ids))
        token_kinds, place = np.full(len(tokens), NONE, dtype=np.int8), 0
        while place < len(tokens):
            lengths = (
                length
                for length in range(longest, 0, -1)
                if tokens[place : place + length] in spelled
            )
            length = next(lengths, 0)
            if length:
                token_kinds[place : place + length] = spelled[tokens[place : place + length]]
            place += length or 1
        return token_kinds


def _shuffled(words: Sequence[str], random: Random) -> list[str]:
    """Return the words in random order. Of `Random` only `random` is stable between versions of
    Python, so `shuffle` is not used.
    """
    keyed = [(random.random(), word) for word in words]
    return [word for _, word in sorted(keyed)]


def _spelled(tokenizer: Tokenizer, kinds: dict[str, int]) -> dict[tuple[int, ...], int]:
    """Return the kind of each word by its tokens within a text."""
    words = list(kinds)
    text = " ".join([words[0], *words])
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    # the space before a word belongs to its tokens
    spaces = [end - 1 for end in accumulate(len(word) + 1 for word in [words[0], *words])]
    spelled: list[list[int]] = [[] for _ in spaces]
    for id, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
        spelled[bisect(spaces, max(start, stop - 1))].append(id)
    return {tuple(ids): kinds[word] for ids, word in zip(spelled[1:], words, strict=True)}
