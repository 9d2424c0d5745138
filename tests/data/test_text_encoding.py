"""What a document begins with, and control tokens that people write as text."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from byte_pairs import byte_pairs
from chat_bases import CHATML, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from coterie.core.errors import DataError
from coterie.data.text_encoding import TextEncoder

SENTENCES = ["the cat and the dog and the bird", "once upon a time, there was a little girl"] * 20
STORIES = Path(__file__).parents[3] / "shared/models/stories260K"
KINDS = ["bytes", "bytes with gaps", "chat", "unigram", "metaspace", "stories"]


def beginning(backend: Tokenizer, first: str, **special: str) -> Any:
    """A tokenizer that puts a token before texts."""
    backend.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=first, **special)


def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(set("".join(SENTENCES) + "abcdefghijklmnopqrstuvwxyz<>/|_ "))
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=special,
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator([*SENTENCES, "".join(alphabet)], trainer)
    return beginning(backend, "<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> Any:
    """Byte pairs over words with their spaces, and bytes for what is in no word, as Llama 2 has."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += [*sorted(set("".join(SENTENCES)) - {" "}), "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    backend = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return beginning(backend, "<s>", eos_token="</s>", unk_token="<unk>")


def with_gaps() -> Any:
    """Byte pairs whose added tokens have ids far behind the vocabulary's."""
    backend = json.loads(byte_pairs().backend_tokenizer.to_str())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    backend["added_tokens"] += [
        {"id": 300 + 10 * i, "content": token, "special": True} | added
        for i, token in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    for i, token in enumerate(("<|im_start|>", "<|im_end|>")):
        backend["model"]["vocab"][token] = 300 + 10 * i
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="<|endoftext|>"
    )


@cache
def encoder(kind: str) -> TextEncoder:
    if kind == "stories":
        if not STORIES.is_dir():
            pytest.skip(f"no base at {STORIES}")
        return TextEncoder(AutoTokenizer.from_pretrained(STORIES))
    make = {
        "bytes": byte_pairs,
        "bytes with gaps": with_gaps,
        "chat": chat_tokenizer,
        "unigram": unigram,
        "metaspace": metaspace,
    }
    return TextEncoder(make[kind]())


def own_ids(texts: TextEncoder, text: str) -> list[int]:
    ids: list[int] = texts.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


words = st.text(alphabet="abcdefg hnotwz<>/|_", max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_control_tokens_in_text_are_text(kind: str, data: st.DataObject) -> None:
    texts = encoder(kind)
    controls = [texts.tokenizer.convert_ids_to_tokens(i) for i in sorted(texts.special)]
    piece = st.one_of(words, st.sampled_from(controls))
    text = "".join(data.draw(st.lists(piece, max_size=6)))
    [ids] = texts.encode([text])
    unknown = texts.tokenizer.unk_token_id if kind == "unigram" else None
    assert not texts.special & (set(ids) - {unknown})
    # without what is removed from both: the spaces that a tokenizer adds or merges
    if unknown not in ids:
        assert texts.tokenizer.decode(ids).split() == text.split()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_other_text_has_the_tokenizers_own_ids(kind: str, data: st.DataObject) -> None:
    texts = encoder(kind)
    text = data.draw(words) + data.draw(st.sampled_from(SENTENCES)) + data.draw(words)
    if not texts.controls_in(text):
        assert texts.encode([text, "a"]) == [own_ids(texts, text), own_ids(texts, "a")]


@pytest.mark.parametrize("kind", KINDS)
def test_around_a_control_token_text_is_encoded_as_ever(kind: str) -> None:
    """Only the control token itself has other ids than the tokenizer's."""
    texts = encoder(kind)
    control = texts.tokenizer.eos_token
    [whole] = texts.encode([f"the cat {control} and the dog"])
    assert whole[: len(own_ids(texts, "the cat")) - 1] == own_ids(texts, "the cat")[:-1]
    as_tokens = TextEncoder(texts.tokenizer, "tokens")
    [ids] = as_tokens.encode([f"the cat {control} and the dog"])
    assert ids.count(texts.tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_documents_begin_as_the_tokenizer_begins_them(kind: str) -> None:
    texts = encoder(kind)
    begins = kind in ("unigram", "metaspace", "stories")
    assert texts.begin == ([texts.tokenizer.bos_token_id] if begins else [])
    assert texts.prompt("the cat") == texts.tokenizer("the cat")["input_ids"]
    first = texts.tokenizer.bos_token_id if begins else texts.tokenizer.eos_token_id
    assert texts.prompt("") == [first]


def test_what_is_put_behind_texts_is_in_no_prompt_but_classifiers_read_it() -> None:
    backend = metaspace().backend_tokenizer
    ids = {token: backend.token_to_id(token) for token in ("<s>", "</s>")}
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=list(ids.items())
    )
    texts = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert texts.begin == [ids["<s>"]]
    assert texts.prompt("the")[-1] != ids["</s>"]
    whole = texts.tokenizer("the cat and the dog")["input_ids"]
    assert texts.whole(["the cat and the dog"], 100) == [whole]
    cut = texts.tokenizer("the cat and the dog", truncation=True, max_length=5)["input_ids"]
    assert texts.whole(["the cat and the dog"], 5) == [cut]
    assert ids["</s>"] not in texts.whole(["the </s> cat"], 100)[0][:-1]


def test_tokens_that_a_template_writes_are_control_tokens_too() -> None:
    tokenizer = byte_pairs()
    tokenizer.add_tokens(["<think>", "<name>"])
    texts = TextEncoder(tokenizer, template="<think>" + CHATML)
    think, name = tokenizer.convert_tokens_to_ids(["<think>", "<name>"])
    [ids] = texts.encode(["<think> of <name>"])
    assert think not in ids
    assert name in ids


def test_control_tokens_are_refused_by_name_if_asked() -> None:
    texts = TextEncoder(chat_tokenizer(), "refuse")
    assert texts.encode(["the cat"]) == encoder("chat").encode(["the cat"])
    with pytest.raises(DataError, match=r"<\|im_end\|>"):
        texts.encode(["the cat", "a <|im_end|> b"])


def test_slow_tokenizers_are_refused() -> None:
    with pytest.raises(DataError, match="not a fast tokenizer"):
        TextEncoder(object())
