"""What clients and splits have in common, counted and said."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from coterie.data.overlaps import Overlaps

Texts = Mapping[str, Sequence[Sequence[str]]]

PARTS = st.lists(st.sampled_from("abcdef"), max_size=5)


@given(st.dictionaries(st.sampled_from(["ann", "ben", "cid"]), st.tuples(PARTS, PARTS, PARTS)))
def test_counts_are_those_of_a_naive_search(texts: Texts) -> None:
    found = Overlaps.of(texts)
    for id, parts in texts.items():
        own = [text for part in parts for text in part]
        others = {text for i, of in texts.items() if i != id for part in of for text in part}
        assert found.documents[id] - found.different[id] == len(own) - len(set(own))
        assert found.shared[id] == sum(text in others for text in own)
        assert found.crossing[id] == sum(
            any(text in part for of in texts.values() for j, part in enumerate(of) if j != i)
            for i, mine in enumerate(parts)
            for text in mine
        )


def test_notes_name_pairs_and_what_is_scored_but_trained_on() -> None:
    ann = [["a", "b  c"], ["d"], ["e"]]
    ben = [["f", "b c\n", "e"], ["d "], ["g"]]
    notes = Overlaps.of({"ann": ann, "ben": ben, "cid": [["x"], ["y"], ["z"]]}).notes
    assert notes == [
        "ann and ben share 2 documents (50% of ann's, 40% of ben's): each is in the same split "
        "for both",
        "1 document in ann: test and ben: train: what is scored is trained on",
    ]


def test_of_many_clients_some_are_named() -> None:
    texts = {str(i): [["a", f"own {i}"], [f"v{i}"], [f"t{i}"]] for i in range(500)}
    (note,) = Overlaps.of(texts).notes
    assert note.startswith("0, 1, 2 and 497 more share 1 document (25% of 0's, 25% of 1's)")
    pairs = {
        str(i): [[f"{i // 2} and {k}" for k in range(2)], [f"v{i}"], [f"t{i}"]] for i in range(20)
    }
    *_, last = notes = Overlaps.of(pairs).notes
    assert len(notes) == 4
    assert last.startswith("14 documents more are shared")


def test_nothing_in_common_is_nothing_to_say() -> None:
    assert (
        Overlaps.of({"ann": [["a", "a"], ["b"], ["c"]], "ben": [["d"], ["e"], ["f"]]}).notes == []
    )
