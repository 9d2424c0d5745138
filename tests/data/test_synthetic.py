"""The synthetic language: who shares what is as asked, tokens have known kinds, and routers find
out.
"""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from coterie import personal
from coterie.core.errors import DataError
from coterie.data import Data, Synthetic
from coterie.data.synthetic import NONE, PRIVATE, SHARED, TOPIC, Chain
from coterie.models.backbone import Backbone
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run

FOUR = {"clients": 4, "topics": ((0, 1), (2, 3)), "shares": (0.4, 0.2, 0.4), "train_tokens": 20_000}


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return Backbone.load("embedded", dtype="fp32", device="cpu")


def words(section: Synthetic, client: int = 0, split: int = 0) -> list[list[str]]:
    return [text.split() for text in section.source().read()[f"client-{client}"][split]]


def pairs(documents: list[list[str]]) -> Counter[tuple[str, str]]:
    return Counter(pair for document in documents for pair in pairwise(document))


def test_the_same_section_makes_the_same_text() -> None:
    section = Synthetic(**FOUR)
    assert section.source().read() == Synthetic(**FOUR).source().read()
    assert words(section) != words(section.model_copy(update={"seed": 1}))
    everywhere = " not which have but with was "  # with every version of Python
    assert section.source().read()["client-0"][0][0].startswith(everywhere)


def test_no_text_is_at_two_clients_or_in_two_splits() -> None:
    texts = [
        text
        for parts in Synthetic(**FOUR).source().read().values()
        for part in parts
        for text in part
    ]
    assert len(set(texts)) == len(texts)


@given(st.integers(2, 700), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_no_word_is_of_two_kinds(count: int, clients: int, conflict: bool, topics: int) -> None:
    section = Synthetic(
        clients=clients,
        topics=((0,),) * topics,
        shares=(0.5, 0, 0.5),
        shared_words=count,
        topic_words=count,
        private_words=count,
        successors=1,
        conflict=conflict,
    )
    language = section.language()
    chains = [
        language.shared,
        *language.topics,
        *(language.private[:1] if conflict else language.private),
    ]
    found = [word for chain in chains for word in chain.words]
    assert len(set(found)) == len(found) == count * len(chains)
    assert language.kinds() == {
        **dict.fromkeys(language.shared.words, SHARED),
        **{word: TOPIC + t for t, chain in enumerate(language.topics) for word in chain.words},
        **{word: PRIVATE for chain in language.private for word in chain.words},
    }
    assert {len(set(chain.words)) for chain in language.private} == {count}
    assert (len({frozenset(chain.words) for chain in language.private}) == 1) == (
        conflict or clients == 1
    )


@pytest.mark.parametrize(
    ("client", "shares"),
    [(0, {SHARED: 0.4, PRIVATE: 0.4, TOPIC: 0.2}), (2, {SHARED: 0.5, PRIVATE: 0.5})],
)
def test_shares_are_as_asked(client: int, shares: dict[int, float]) -> None:
    section = Synthetic(**FOUR | {"topics": ((0, 1),), "train_tokens": 60_000})
    kinds = section.language().kinds()
    found = Counter(kinds[word] for document in words(section, client) for word in document)
    assert {kind: count / found.total() for kind, count in found.items()} == pytest.approx(
        shares, abs=0.03
    )


def test_a_client_in_several_topics_has_them_in_equal_parts() -> None:
    section = Synthetic(clients=1, topics=((0,), (0,)), shares=(0, 0.6, 0.4), train_tokens=60_000)
    kinds = section.language().kinds()
    found = Counter(kinds[word] for document in words(section) for word in document)
    shares = {kind: count / found.total() for kind, count in found.items()}
    assert shares == pytest.approx({PRIVATE: 0.4, TOPIC: 0.3, TOPIC + 1: 0.3}, abs=0.03)


@pytest.mark.parametrize("client", [0, 3])
def test_pairs_of_words_are_as_the_chains_say(client: int) -> None:
    """Behind a word comes the chain's k-th next one with probability (1 - 1/L) p_k, or the
    beginning of another phrase with 1/L.
    """
    section = Synthetic(**FOUR | {"train_tokens": 100_000, "phrase_words": 8.0, "successors": 3})
    language, counted = section.language(), pairs(words(section, client))
    for chain, share in (
        (language.shared, 0.4),
        (language.topics[client // 2], 0.2),
        (language.private[client], 0.4),
    ):
        places = {word: place for place, word in enumerate(chain.words)}
        within = Counter(
            (places[second] - places[first]) % len(places)
            for (first, second), count in counted.items()
            if first in places and second in places
            for _ in range(count)
        )
        total = sum(count for (first, _), count in counted.items() if first in places)
        for k, probability in enumerate(chain.probabilities, start=1):
            by_chance = (
                share / 8 / len(places)
            )  # a new phrase of the same kind that happens to begin there
            assert within[k] / total == pytest.approx(7 / 8 * probability + by_chance, abs=0.02)
    assert chain.probabilities == pytest.approx((4 / 7, 2 / 7, 1 / 7))


def test_what_follows_a_private_word_differs_from_client_to_client() -> None:
    private = Synthetic(successors=1).language().private
    following = [
        {word: chain.words[(i + 1) % len(chain.words)] for i, word in enumerate(chain.words)}
        for chain in private
    ]
    for other in following[1:]:
        assert sum(following[0][word] == other[word] for word in other) <= 4  # of 16; one by chance


def test_a_chain_goes_round() -> None:
    from random import Random

    chain = Chain(("a", "b", "c"), (1.0,))
    assert [chain.step(place, Random(0)) for place in range(3)] == [1, 2, 0]


def test_every_token_has_a_kind(embedded: Backbone) -> None:
    section = Synthetic(**FOUR)
    tokenizer = embedded.tokenizer
    kinds = section.language().kinds()
    for client, data in section.load(tokenizer, 64).clients.items():
        ids = data.test.tokens
        found = section.kinds(tokenizer, ids)
        assert ((found == NONE) == (ids == tokenizer.eos_token_id)).all()
        decoded = [tokenizer.decode([id]).strip() for id in ids]  # a word is one token
        assert [kinds.get(word, NONE) for word in decoded] == found.tolist(), client


def test_kinds_are_known_with_a_tokenizer_that_splits_words(tokenizer) -> None:
    section = Synthetic(
        **FOUR, private_words=500
    )  # more words than there are in the list: pronounceable ones are made
    ids = section.load(tokenizer, 64).clients["client-1"].valid.tokens[:1500]
    found, kinds, expected = section.kinds(tokenizer, ids), section.language().kinds(), []
    for text in words(section, 1, 1):
        for word in text:
            expected += [kinds[word]] * len(
                tokenizer([" " + word], add_special_tokens=False, verbose=False)["input_ids"][0]
            )
        expected.append(NONE)  # the end token
    longest = 12  # the last word may be cut
    assert found[:-longest].tolist() == expected[: len(ids) - longest]
    assert set(section.kinds(tokenizer, ids[1:9]).tolist()) <= {
        NONE,
        SHARED,
        PRIVATE,
        TOPIC,
    }  # begins inside of a word


def test_sizes_are_exact(embedded: Backbone) -> None:
    section = Synthetic(
        clients=2, train_tokens=(3000, 1000), valid_tokens=700, test_tokens=333, document_words=7
    )
    federation = section.load(embedded.tokenizer, 64)
    assert [size["train"].tokens for size in federation.sizes().values()] == [3000, 1000]
    assert {
        (size["valid"].tokens, size["test"].tokens) for size in federation.sizes().values()
    } == {(700, 333)}
    assert federation.description == "a synthetic language: 2 clients"


def test_lists_of_another_length_are_refused(embedded: Backbone) -> None:
    with pytest.raises(DataError, match=r"data\.train_tokens: 3 values for 4 clients"):
        Synthetic(train_tokens=(1000, 1000, 1000)).load(embedded.tokenizer, 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clients": 0}, "greater than or equal to 1"),
        ({"topics": [[0, 4]]}, "with numbers 0 to 3"),
        ({"topics": [[0, 0]]}, "each once"),
        ({"topics": [[]]}, "at least one client"),
        ({"shares": [0.5, 0.5, 0.5]}, "sum to 1"),
        ({"shares": [0.4, 0.2, 0.4]}, "topics have a share, but there are none"),
        ({"topics": [[0]], "shares": [0, 1, 0]}, "the share of topics cannot be 1"),
        ({"successors": 16}, "the smallest has 16"),
        ({"train_tokens": None}, "train_tokens"),
    ],
)
def test_sections_that_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Data).validate_python({"kind": "synthetic", **given})


@pytest.mark.slow
def test_routers_find_out_who_knows_what_follows(tmp_path: Path, embedded: Backbone) -> None:
    """Where everybody's words follow, the generalist has more weight than where one's own do:
    clearly so in the middle blocks.

    In mean over the clients, of the shipped recipe. The first and the last block go one way or the
    other, by seed and client.
    """
    recipe = load("synthetic")
    run(recipe, tmp_path)
    federation = recipe.data.load(embedded.tokenizer, recipe.model.context)
    gaps = []
    for client, data in federation.clients.items():
        model = personal.load(tmp_path, client, backbone=embedded)
        rows = next(data.test.scoring(data.test.windows))[:, :-1]
        kinds = torch.from_numpy(
            np.stack([recipe.data.kinds(embedded.tokenizer, row.numpy()) for row in rows])
        )
        generalist = model.routing(rows)[..., 0]  # (blocks, rows, context)
        gaps.append(
            generalist[:, kinds == SHARED].mean(dim=1) - generalist[:, kinds == PRIVATE].mean(dim=1)
        )
    gap = torch.stack(gaps).mean(dim=0)  # (blocks,)
    assert gap.mean() > 0.08, gaps
    assert gap[1:3].min() > 0.08, gaps
