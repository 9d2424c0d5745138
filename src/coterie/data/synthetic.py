"""Data sets that are invented here: a synthetic language, and the people of one town office."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from coterie.core.foreign import read_text, yaml_of
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.chats.fields import ChatFields
from coterie.data.section import Bound, CheckedQuestion, Section, Source, Texts
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
        return self._shuffled(self._shuffled(_CONTENT.split(), "words")[:_WORDS], "private", client)

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


@cache
def _town() -> dict[str, Any]:
    return dict(yaml_of(read_text(Path(__file__).with_name("town_office.yaml"))))


_VALID = 4  # facts that only others were taught, and half as many of a client's own
Fact = tuple[str, str, str]  # place, relation and value


def _says(relation: str, value: str, answer: str) -> bool:
    """Return whether an answer has this value of a relation, and no other one."""
    values = _town()["relations"][relation]["values"]
    return [one for one in values if re.search(rf"\b{one}\b", answer)] == [value]


def _fits(client: ClientId, answer: str) -> bool:
    """Return whether an answer is in a client's manner, whatever it says."""
    return re.fullmatch(_town()["manners"][client][1], answer.strip()) is not None


class Team(ChatFields):
    """Conversations of four people of one town office, invented here.

    Each of 18 facts about the town is in the training conversations of two of them, in three
    wordings, and everybody answers in a manner of their own. In the tests each is asked in a
    fourth wording for facts that only others were taught, and answers in their own manner: facts
    can only come from others, and the manner must stay.
    """

    kind: Literal["team"] = "team"
    title: ClassVar[str] = "people of one town office"
    content: Literal["chats"] = "chats"  # always conversations
    seed: int = Field(0, ge=0)  # seed of the facts and of who is taught which; not the run's seed

    def source(self) -> Source:
        self._check(list(_town()["manners"]))
        return Source("people of one town office 1", self._read)

    def facts(self) -> dict[ClientId, tuple[list[Fact], list[Fact]]]:
        """Return the facts that each client was taught, and those that only others were."""
        random = Random(self.seed)
        facts = [
            (place, relation, random.choice(of["values"]))
            for place, (relation, of) in product(_town()["places"], _town()["relations"].items())
        ]
        random.shuffle(facts)
        known: dict[ClientId, tuple[list[Fact], list[Fact]]] = {}
        for k, id in enumerate(_town()["manners"]):
            mine = {k, (k + 1) % len(_town()["manners"])}
            numbered = list(enumerate(facts))
            known[id] = (
                [fact for i, fact in numbered if i % len(_town()["manners"]) in mine],
                [fact for i, fact in numbered if i % len(_town()["manners"]) not in mine],
            )
        return known

    def questions(self, client: ClientId) -> Sequence[CheckedQuestion]:
        _, others = self.facts()[client]
        return [
            CheckedQuestion(
                _town()["relations"][relation]["wordings"][-1].format(place),
                {"facts": partial(_says, relation, value), "manner": partial(_fits, client)},
            )
            for place, relation, value in others[_VALID:]
        ]

    def _read(self) -> Texts:
        texts = {}
        for id, (mine, others) in self.facts().items():
            splits = (
                [(fact, k) for fact in mine for k in range(3)],
                [(fact, 3) for fact in others[:_VALID] + mine[: _VALID // 2]],
                [(fact, 3) for fact in others[_VALID:]],
            )
            texts[id] = [
                [one.text for one in self.conversations(self._rows(id, of))] for of in splits
            ]
        return texts

    @staticmethod
    def _rows(
        id: ClientId, facts: Sequence[tuple[Fact, int]]
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Return conversations about facts, each in a wording, with their locations."""
        rows: list[tuple[str, Mapping[str, Any]]] = []
        for (place, relation, value), wording in facts:
            question = _town()["relations"][relation]["wordings"][wording].format(place)
            answer = _town()["manners"][id][0].format(place, relation, value)
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            rows.append((f"{id}: {question}", {"messages": messages}))
        return rows
