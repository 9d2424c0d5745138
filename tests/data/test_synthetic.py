"""The synthetic language: who shares what is as asked, tokens have known kinds, and routers find
out.
"""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from coterie import personal
from coterie.core.errors import DataError
from coterie.data import Data, Synthetic
from coterie.models.backbone import Backbone
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run

FOUR = {"clients": 4, "train_tokens": 20_000}


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


def test_no_word_is_of_two_kinds() -> None:
    section = Synthetic()
    private = [section.private_words(client) for client in range(4)]
    assert len({*section.shared_words, *private[0]}) == 32
    assert len(set(map(frozenset, private))) == 1
    assert len(set(map(tuple, private))) == 4


def test_half_of_the_words_are_shared() -> None:
    section = Synthetic(train_tokens=60_000)
    shared = [word in section.shared_words for text in words(section) for word in text]
    assert sum(shared) / len(shared) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("client", [0, 3])
def test_pairs_of_words_are_as_the_orders_say(client: int) -> None:
    """Behind a word comes the k-th next one of its order with probability (1 - 1/L) p_k, or the
    beginning of another phrase with 1/L.
    """
    section = Synthetic(train_tokens=100_000)
    counted = pairs(words(section, client))
    for order in (section.shared_words, section.private_words(client)):
        places = {word: place for place, word in enumerate(order)}
        within = Counter(
            (places[second] - places[first]) % len(places)
            for (first, second), count in counted.items()
            if first in places and second in places
            for _ in range(count)
        )
        total = sum(count for (first, _), count in counted.items() if first in places)
        for k, probability in enumerate((2 / 3, 1 / 3), start=1):
            by_chance = 0.5 / 12 / 16  # a new phrase of the same kind that happens to begin there
            assert within[k] / total == pytest.approx(11 / 12 * probability + by_chance, abs=0.02)


def test_what_follows_a_private_word_differs_from_client_to_client() -> None:
    following = []
    for client in range(4):
        order = Synthetic().private_words(client)
        following.append({word: order[(i + 1) % 16] for i, word in enumerate(order)})
    for other in following[1:]:
        assert sum(following[0][word] == other[word] for word in other) <= 4  # of 16; one by chance


def test_every_word_is_a_token(embedded: Backbone) -> None:
    section = Synthetic(**FOUR)
    for client, data in enumerate(section.load(embedded.tokenizer, 64).clients.values()):
        known = {*section.shared_words, *section.private_words(client)}
        for id in data.test.tokens:
            is_end = id == embedded.tokenizer.eos_token_id
            assert is_end or embedded.tokenizer.decode([id]).strip() in known


def test_sizes_are_exact(embedded: Backbone) -> None:
    section = Synthetic(clients=2, train_tokens=(3000, 1000), valid_tokens=700, test_tokens=333)
    federation = section.load(embedded.tokenizer, 64)
    clients = federation.clients.values()
    assert [len(data.train) for data in clients] == [3000, 1000]
    assert {(len(data.valid), len(data.test)) for data in clients} == {(700, 333)}
    assert federation.description == "a synthetic language: 2 clients"


def test_lists_of_another_length_are_refused(embedded: Backbone) -> None:
    with pytest.raises(DataError, match=r"data\.train_tokens: 3 values for 4 clients"):
        Synthetic(train_tokens=(1000, 1000, 1000)).load(embedded.tokenizer, 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clients": 0}, "greater than or equal to 1"),
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
    for number, (client, data) in enumerate(federation.clients.items()):
        model = personal.load(tmp_path, client, backbone=embedded)
        rows = next(data.test.scoring(data.test.windows))[:, :-1]
        texts = [[embedded.tokenizer.decode(id).strip() for id in row.tolist()] for row in rows]
        shared, private = (
            torch.tensor([[word in kind for word in text] for text in texts])
            for kind in (recipe.data.shared_words, recipe.data.private_words(number))
        )
        generalist = model.routing(rows)[..., 0]  # (blocks, rows, context)
        gaps.append(generalist[:, shared].mean(dim=1) - generalist[:, private].mean(dim=1))
    gap = torch.stack(gaps).mean(dim=0)  # (blocks,)
    assert gap.mean() > 0.08, gaps
    assert gap[1:3].min() > 0.08, gaps
