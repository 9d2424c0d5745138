"""Texts as streams of token ids, and as documents that begin as the base's texts begin."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from coterie.core.errors import DataError
from coterie.data import Folders
from coterie.data.chats import ChatSplit
from coterie.data.splits import TokenSplit
from coterie.data.summary import _lengths
from coterie.data.text_encoding import TextEncoder
from coterie.data.text_streams import RunningText, SeparateDocuments, SplitTexts, text_streams

WORDS = "the cat and the dog and the bird "


def test_a_summary_has_the_lengths_of_documents_not_of_their_pieces(make_tokenizer) -> None:
    tokenizer = _begin(make_tokenizer())
    texts = [WORDS * 5, WORDS, "the cat"]
    streams = text_streams(TextEncoder(tokenizer))
    split = streams.split("train", streams.arrays(texts, "train", 8), 8, 0)
    expected = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]  # and the end
    assert sorted(_lengths(split, tokenizer.eos_token_id)) == sorted(expected)


@pytest.fixture
def beginning(make_tokenizer: Callable):
    """A tokenizer that puts <s> before texts."""
    return _begin(make_tokenizer())


def _begin(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def running(tokenizer, texts, limit: int | None = None) -> list[int]:
    streams = RunningText(TextEncoder(tokenizer)).streams(
        [SplitTexts("ann", "train", texts, limit)], 8
    )
    return [int(i) for _, _, pieces in streams for piece in pieces for i in piece]


def plain(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_running_text_has_the_end_token_behind_each_document(tokenizer) -> None:
    texts = ["the cat", "and the dog"]
    ids = [i for text in texts for i in (*plain(tokenizer, text), tokenizer.eos_token_id)]
    assert running(tokenizer, texts) == ids
    tokenizer.eos_token = None
    without = [i for i in ids if i != tokenizer.convert_tokens_to_ids("<end>")]
    assert running(tokenizer, texts) == without


def test_what_is_behind_a_bound_is_not_encoded(tokenizer) -> None:
    assert len(running(tokenizer, (WORDS for _ in range(1000)), 100)) == 100
    assert len(tokenizer.texts) < 100


def test_the_tokenizer_decides_whether_documents_are_apart(tokenizer, beginning) -> None:
    assert isinstance(text_streams(TextEncoder(tokenizer)), RunningText)
    assert isinstance(text_streams(TextEncoder(beginning)), SeparateDocuments)


def rows_of(split: ChatSplit) -> Iterator[list[tuple[int, bool]]]:
    """Each document of a split, as ids with whether they count, in the order of the text."""
    start = 0
    for length in split.lengths:
        end = start + int(length)
        yield list(
            zip(split.tokens[start:end].tolist(), split.counted[start:end] == 1, strict=True)
        )
        start = end


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    context=st.integers(2, 20),
    name=st.sampled_from(["train", "valid", "test"]),
)
def test_every_token_of_a_document_is_predicted_once_behind_what_begins_it(
    make_tokenizer: Callable, lengths: list[int], context: int, name: str
) -> None:
    tokenizer = _begin(make_tokenizer())
    texts = ["z" * length for length in lengths]
    streams = text_streams(TextEncoder(tokenizer))
    split = streams.split(name, streams.arrays(texts, name, context), context, 0)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    read: list[list[int]] = []
    for row in rows_of(split):
        ids, counted = [i for i, _ in row], [bool(c) for _, c in row]
        assert len(ids) <= context + 1
        assert not counted[0]
        if ids[0] == begin:
            read.append(ids[:1])
        else:
            assert ids[0] == read[-1][-1]  # where the piece before ended
        read[-1] += ids[1:]
        wanted = [i != end or name == "train" for i in ids[1:]]
        assert counted[1:] == wanted
    whole = [[begin, *plain(tokenizer, text), end] for text in texts]
    for ids, document in zip(read, whole, strict=True):
        # a piece of an end token alone, which does not count, is not there
        assert ids in (document, document[:-1])
        assert name != "train" or ids == document


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 11, 12, 30, 1000])
def test_a_bound_cuts_documents(beginning, limit: int) -> None:
    streams = text_streams(TextEncoder(beginning))
    parts = [SplitTexts("ann", "train", ["zzzzzzzz", "yyyyyyyy", "xxxxxxxx"], limit)]
    read = {key: list(pieces) for _, key, pieces in streams.streams(parts, 100)}
    ids = [int(i) for piece in read["train"] for i in piece]
    begin, end = beginning.bos_token_id, beginning.eos_token_id
    whole = [i for text in parts[0].documents for i in (begin, *plain(beginning, text), end)]
    kept = whole[:limit]
    while kept and kept[-1] == begin:  # which alone predicts nothing
        kept.pop()
    assert ids == kept


@pytest.mark.parametrize("cached", [False, True])
def test_control_tokens_are_said_whether_tokens_come_from_the_cache_or_not(
    tmp_path: Path, tokenizer, cached: bool
) -> None:
    for client, text in (("ann", f"{WORDS}<end> or <end>"), ("ben", WORDS)):
        for i in range(20):
            path = tmp_path / "texts" / client / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text * 3 + str(i) if not i else WORDS * 3 + str(i), encoding="utf-8")
    section = Folders(path=tmp_path / "texts")
    for _ in range(1 + cached):
        federation = section.load(tokenizer, 8)
    [note] = (note for note in federation.notes if "control token" in note)
    assert note == "6 control tokens in ann's text (`<end>`) are read as text: data.control_tokens"
    ends = [
        int((split.tokens == tokenizer.eos_token_id).sum())
        for split in federation.clients["ann"].splits
    ]
    assert sum(ends) == 20  # one for each document
    as_tokens = section.model_copy(update={"control_tokens": "tokens"}).load(tokenizer, 8)
    tokens = [split.tokens for split in as_tokens.clients["ann"].splits]
    assert sum(int((own == tokenizer.eos_token_id).sum()) for own in tokens) == 26
    assert any("are read as tokens" in note for note in as_tokens.notes)
    with pytest.raises(DataError, match=r"client 'ann', .*: control tokens in the text: '<end>'"):
        section.model_copy(update={"control_tokens": "refuse"}).load(tokenizer, 8)


def test_a_tokenizer_without_an_end_token_is_named(tmp_path: Path, make_tokenizer) -> None:
    for i in range(20):
        path = tmp_path / "texts" / "ann" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WORDS * 5 + str(i), encoding="utf-8")
    section = Folders(path=tmp_path / "texts")
    for end in ("<end>", None):
        notes = section.load(make_tokenizer(end=end), 8).notes
        assert any("documents do not end" in note for note in notes) == (end is None)


def test_documents_of_folders_are_rows_of_their_own(tmp_path: Path, beginning) -> None:
    for i in range(20):
        path = tmp_path / "texts" / "ann" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WORDS + str(i), encoding="utf-8")
    client = Folders(path=tmp_path / "texts").load(beginning, 64).clients["ann"]
    assert not isinstance(client.test, TokenSplit)
    batch = client.test.take(np.arange(client.test.windows))
    begins = batch.ids == beginning.bos_token_id
    assert torch.equal(begins, batch.positions == 0)
    assert not batch.counted[begins].any()


def test_the_score_is_that_of_each_text_by_itself(data_root: Path) -> None:
    """Stories of a base that puts <s> before texts, scored by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from coterie.models.backbone import Backbone
    from coterie.models.language import LanguageModel
    from coterie.models.layout import Layout

    base = data_root.parent / "models" / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    stories = [
        "Once upon a time, there was a little girl named Lily. She loved to play outside.",
        "One day, a boy went to the park. He saw a big dog and said: I like you!",
    ]
    total, count = 0.0, 0
    for story in stories:
        ids = torch.tensor([tokenizer(story)["input_ids"]])
        with torch.no_grad():
            p = model(ids).logits.log_softmax(-1)[0]
        total -= sum(float(p[j - 1, ids[0, j]]) for j in range(1, ids.shape[1]))
        count += ids.shape[1] - 1
    streams = text_streams(TextEncoder(tokenizer))
    split = streams.split("test", streams.arrays(stories, "test", 64), 64, 0)
    own = LanguageModel(Backbone.load(base), Layout(specialists=0, rank=1))
    nll, tokens = own.score(split.scoring(8)).tolist()
    assert tokens == count
    assert nll == pytest.approx(total, rel=1e-5)
    assert math.exp(nll / tokens) < 4
