"""Splitting documents by seed: what people call equal lies in one split, for all who have it."""

import hashlib
import math
import random
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from chat_bases import chat_tokenizer, turns, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.chats import Conversation
from coterie.data.folders import Folders
from coterie.data.splitting import (
    Document,
    conversation_content,
    keyed_by_text,
    similar,
    split,
    split_clients,
)

FRACTIONS = (0.8, 0.1, 0.1)
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "some",
    "dogs",
    "ran",
    "over",
    "hills",
    "and",
    "far",
    "away",
    "from",
    "home",
]


def sentence(random_: random.Random, words: int = 12) -> str:
    return " ".join(random_.choice(WORDS) for _ in range(words))


# --- as it was: where nothing is equal, nothing changes -------------------------------------------


def seed_of(*parts: object) -> int:
    data = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def naive_split(texts: Sequence[str], seed: int) -> list[list[str]]:
    """The rule of the first version, for texts that are all different."""
    best: tuple[float, list[list[str]]] = (math.inf, [])
    for trial in range(max(1, 1000 // max(1, len(texts)))):
        order = seed_of(seed, "split", trial)
        parts, filled = [list[str](), list[str](), list[str]()], [0.0, 0.0, 0.0]
        for text in sorted(texts, key=lambda text: seed_of(order, text)):
            least = filled.index(min(filled))
            parts[least].append(text)
            filled[least] += len(text) / FRACTIONS[least]
        sizes = [sum(map(len, part)) for part in parts]
        imbalance = math.inf
        if all(sizes):
            shares = [size / sum(sizes) for size in sizes]
            imbalance = max(
                abs(math.log(share / fraction))
                for share, fraction in zip(shares, FRACTIONS, strict=True)
            )
        if not best[1] or imbalance < best[0]:
            best = imbalance, parts
    return best[1]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.text("abc", min_size=1, max_size=9), max_size=30, unique=True), max_size=3
    ),
    st.integers(0, 5),
)
def test_distinct_texts_are_split_as_ever(clients: list[list[str]], seed: int) -> None:
    named = {str(i): [f"{i}{text}" for text in texts] for i, texts in enumerate(clients)}
    parts = split_clients({id: keyed_by_text(own) for id, own in named.items()}, FRACTIONS, seed)
    assert parts == {id: naive_split(own, seed) for id, own in named.items()}
    assert [split(keyed_by_text(own), FRACTIONS, seed) for own in named.values()] == list(
        parts.values()
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=6), max_size=60), st.integers(0, 5))
def test_no_document_is_in_two_splits_and_none_is_lost(texts: list[str], seed: int) -> None:
    parts = split(keyed_by_text(texts), FRACTIONS, seed)
    assert sorted(text for part in parts for text in part) == sorted(texts)
    assert not any(set(a) & set(b) for i, a in enumerate(parts) for b in parts[i + 1 :])


def test_splits_are_fixed_by_the_seed() -> None:
    documents = keyed_by_text(f"document {i}" for i in range(100))
    assert split(documents, FRACTIONS, 1) == split(list(reversed(documents)), FRACTIONS, 1)
    assert split(documents, FRACTIONS, 1) != split(documents, FRACTIONS, 2)


@pytest.mark.parametrize("seed", range(5))
def test_works_stay_whole_and_sizes_come_near_the_fractions(seed: int) -> None:
    works = {
        f"work {i}": 100 * (1 + i % 7) for i in range(16)
    }  # lengths in characters, as unlike as the topics' works
    documents = [
        Document(work[5:].ljust(length // 2, "."), work)
        for work, length in works.items()
        for _ in range(2)
    ]
    parts = split(documents, FRACTIONS, seed)
    assert sum(map(len, parts)) == 32
    assert all(part[i] == part[i + 1] for part in parts for i in range(0, len(part), 2))
    total = sum(works.values())
    for part, fraction in zip(parts, FRACTIONS, strict=True):
        assert sum(map(len, part)) / total == pytest.approx(fraction, abs=0.04)


def test_few_works_still_make_three_splits() -> None:
    assert sorted(
        map(len, split([Document("x" * 100, str(i)) for i in range(4)], FRACTIONS, 0))
    ) == [1, 1, 2]


# --- equal for people -----------------------------------------------------------------------------


def squeezed(text: str) -> str:
    """What is left of a text without what people do not see."""
    text = "".join(" " if c.isspace() else c for c in unicodedata.normalize("NFC", text))
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip()


SPACED = st.lists(
    st.sampled_from(["a", "b", " ", "\n", "\r\n", "\u00a0", "\u00e9", "e\u0301"]), max_size=6
).map("".join)


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(SPACED, max_size=25)),
    st.integers(0, 3),
    st.booleans(),
)
def test_what_is_equal_is_in_one_split_for_all_and_nothing_is_lost(
    clients: dict[str, list[str]], seed: int, near: bool
) -> None:
    documents = {id: keyed_by_text(texts) for id, texts in clients.items()}
    parts = split_clients(documents, FRACTIONS, seed, near)
    places = defaultdict(set)
    for id, texts in clients.items():
        kept = [text for text in texts if text.strip()]
        assert sorted(text for part in parts[id] for text in part) == sorted(kept)
        for place, part in enumerate(parts[id]):
            for text in part:
                places[squeezed(text)].add(place)
    assert all(len(found) == 1 for found in places.values())


@pytest.mark.parametrize("own", [0, 3, 60])
@pytest.mark.parametrize("clients", [2, 5])
def test_sizes_come_near_the_fractions_whatever_is_shared(clients: int, own: int) -> None:
    chance = random.Random(0)
    shared = [sentence(chance) for _ in range(60)]
    texts = {str(i): shared + [sentence(chance) for _ in range(own)] for i in range(clients)}
    documents = {id: keyed_by_text(of_client) for id, of_client in texts.items()}
    for parts in split_clients(documents, FRACTIONS, 0).values():
        sizes = [sum(map(len, part)) for part in parts]
        assert [size / sum(sizes) for size in sizes] == pytest.approx(FRACTIONS, abs=0.03)


def test_a_ring_of_clients_that_share_with_their_neighbours_has_no_empty_split() -> None:
    chance = random.Random(1)
    texts = [sentence(chance) for _ in range(40)]
    ring = {str(i): texts[4 * i : 4 * i + 6] for i in range(9)}
    documents = {id: keyed_by_text(of_client) for id, of_client in ring.items()}
    assert all(map(all, split_clients(documents, FRACTIONS, 0).values()))


def test_hundreds_of_clients_of_one_group() -> None:
    chance = random.Random(2)
    shared = [sentence(chance) for _ in range(30)]
    documents = {
        str(i): keyed_by_text([*shared, *(sentence(chance) for _ in range(10))]) for i in range(200)
    }
    parts = split_clients(documents, FRACTIONS, 0)
    assert all(map(all, parts.values()))
    for text in shared:
        assert len({[text in part for part in own].index(True) for own in parts.values()}) == 1


def test_the_order_of_rows_does_not_matter() -> None:
    texts = ["a b", "a  b", "a b\n", "c", "d", "e", "f", "g"]
    parts = split_clients({"ann": keyed_by_text(texts)}, FRACTIONS, 3)["ann"]
    again = split_clients({"ann": keyed_by_text(texts[::-1])}, FRACTIONS, 3)["ann"]
    assert [sorted(part) for part in parts] == [sorted(part) for part in again]


def test_conversations_are_compared_by_who_says_what() -> None:
    talk = [{"role": "user", "content": "hi\n"}, {"role": "assistant", "content": "you"}]
    alike = [{"role": "user", "content": " hi", "id": 3, "time": "10:00"}, talk[1] | {"id": 4}]
    same = Conversation("a:1", talk).document().digest
    assert Conversation("b:7", alike, tools=[]).document().digest == same
    assert Conversation("a:1", text=("hi", "you")).document().digest == same
    assert Conversation("a:1", talk[::-1]).document().digest != same
    joined = [{"role": "user", "content": 'hi"], ["assistant", "you'}]
    assert Conversation("a:1", joined).document().digest != same


def test_calls_of_tools_are_compared() -> None:
    def calling(city: str, id: str) -> str:
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": {"c": city}}}
        return conversation_content([{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert calling("Rome", "1") == calling("Rome", "2") != calling("Oslo", "1")


def test_folders_share_a_group_chat(tmp_path: Path) -> None:
    chance = random.Random(0)
    shared = [sentence(chance) for _ in range(40)]
    for id, end in (("ann", "\n"), ("ben", "\r\n\r\n")):
        (tmp_path / id).mkdir()
        for i, text in enumerate([*shared, *(sentence(chance) for _ in range(20))]):
            (tmp_path / id / f"{i}.txt").write_bytes(f"{text}{end}".encode())
    section = Folders(path=tmp_path)
    for _ in range(2):  # encoded, then from the cache
        (note,) = section.load(chat_tokenizer(), 16, cache=tmp_path / ".cache").notes
        assert note.startswith("ann and ben share 40 documents (67% of ann's, 67% of ben's)")
    texts = section.source().read()
    ann, ben = ([set(map(squeezed, part)) for part in texts[id]] for id in ("ann", "ben"))
    assert all(part & set(shared) for part in ann)
    assert not any(ann[i] & ben[j] for i in range(3) for j in range(3) if i != j)


def test_who_shares_with_a_folder_of_fixed_splits_follows_it(tmp_path: Path) -> None:
    chance = random.Random(0)
    shared = [sentence(chance) for _ in range(6)]
    for name, text in zip(("train", "valid", "test") * 2, shared, strict=True):
        (tmp_path / "ann" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "ann" / name / f"{len(text)}{text[:9]}.txt").write_text(text)
    (tmp_path / "ben").mkdir()
    for i, text in enumerate([*shared, *(sentence(chance) for _ in range(40))]):
        (tmp_path / "ben" / f"{i}.txt").write_text(f"{text}\n")
    source = Folders(path=tmp_path).source()
    ann, ben = (source.read()[id] for id in ("ann", "ben"))
    assert [sorted(set(map(squeezed, part)) & set(shared)) for part in ben] == [
        sorted(part) for part in ann
    ]


def test_a_client_of_few_conversations_is_told_how_many_are_needed(tmp_path: Path) -> None:
    (tmp_path / "texts" / "ann").mkdir(parents=True)
    for equal in (1, 4):
        rows = [{"messages": turns(f"{i}", "yes")} for i in (1, *[2] * equal)]
        write_jsonl(tmp_path / "texts" / "ann" / "a.jsonl", rows)
        with pytest.raises(DataError) as refused:
            Folders(path=tmp_path / "texts", content="chats").load(chat_tokenizer(), 64)
        needed = f"it has {1 + equal} in all, and three splits need 3 different ones"
        assert f"client 'ann', test: no conversations; {needed}" in refused.value.problem


# --- nearly equal ---------------------------------------------------------------------------------


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def test_nearly_equal_texts_are_those_with_most_shingles_in_common() -> None:
    chance = random.Random(5)
    texts = [" ".join(f"w{chance.randrange(500)}" for _ in range(120)) for _ in range(40)]
    for number in range(40):
        words = texts[number].split()
        for place in chance.sample(range(120), (0, 1, 2, 20)[number % 4]):
            words[place] = "changed"
        texts.append(" ".join(words))
    classes = similar(texts)
    for i, j in combinations(range(80), 2):
        one, two = shingles(texts[i]), shingles(texts[j])
        common = len(one & two) / len(one | two)
        assert 0.5 < common < 0.85 or (classes[i] == classes[j]) == (common >= 0.85)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The cat sat, on a mat; and it was happy!", "the cat sat on a mat and it was happy"),
        (
            "日本語の文章はスペースがありません。これは長い例です。それは本当に長いです",
            "日本語の文章はスペースがありません。これは長い例です。それは本当に長い",
        ),
        ("Yes!", "yes"),
    ],
)
def test_case_and_signs_make_no_other_text(one: str, other: str) -> None:
    assert similar([one, "something else entirely, that is not like them", other]) == [0, 1, 0]


def test_nearly_equal_documents_stay_together_where_asked() -> None:
    chance = random.Random(3)
    pairs = list[tuple[str, str]]()
    for i in range(40):
        text = " ".join(f"w{chance.randrange(500)}" for _ in range(60))
        pairs.append((text, f"{text} and {i}"))
    documents = {
        "ann": keyed_by_text(text for pair in pairs[:30] for text in pair),
        "ben": keyed_by_text(pair[1] for pair in pairs[20:]),
    }
    for near in (False, True):
        parts = split_clients(documents, FRACTIONS, 0, near)
        place = {text: i for own in parts.values() for i, part in enumerate(own) for text in part}
        apart = sum(place[one] != place[two] for one, two in pairs[:30])
        assert (apart == 0) == near
