"""A tokenizer that was changed is told, with what is other about it."""

import json
from typing import Any

import pytest
from byte_pairs import byte_pairs
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from coterie.data.text_encoding import TokenizerDigest


def changed(change: Any) -> Any:
    """The tokenizer of byte pairs, its JSON changed."""
    content = json.loads(byte_pairs().backend_tokenizer.to_str())
    change(content)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|endoftext|>"
    )


def test_a_tokenizer_is_the_same_as_itself_saved_and_loaded(tmp_path) -> None:
    tokenizer = byte_pairs()
    digest = TokenizerDigest.of(tokenizer)
    assert digest.difference(tokenizer) == ""
    tokenizer.save_pretrained(tmp_path)
    assert digest.difference(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == ""
    assert digest.difference(changed(lambda content: None)) == ""


def swap(content: Any) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]


def test_two_tokens_that_changed_places_are_told() -> None:
    difference = TokenizerDigest.of(byte_pairs()).difference(changed(swap))
    assert difference.startswith("texts fall into other tokens")


def test_new_tokens_and_those_that_are_gone_are_told() -> None:
    longer = byte_pairs()
    longer.add_tokens(["<NAME>"])
    size = len(byte_pairs())
    few, many = TokenizerDigest.of(byte_pairs()), TokenizerDigest.of(longer)
    had = f"it had {size} tokens and has {size + 1}, the last one '<NAME>'"
    assert few.difference(longer) == had
    assert many.difference(byte_pairs()).startswith(f"it had {size + 1} tokens and has {size}")


def test_a_token_that_became_special_is_told() -> None:
    plain, special = byte_pairs(), byte_pairs()
    plain.add_tokens(["<NAME>"])
    special.add_special_tokens({"extra_special_tokens": ["<NAME>"]})
    difference = TokenizerDigest.of(plain).difference(special)
    assert difference == "some of its tokens are others"


@pytest.mark.parametrize("change", ["other merges", "another beginning"])
def test_texts_that_fall_into_other_tokens_are_told(change: str) -> None:
    def other(content: Any) -> None:
        if change == "other merges":
            content["model"]["merges"] = content["model"]["merges"][:3]

    tokenizer = changed(other)
    if change == "another beginning":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    difference = TokenizerDigest.of(byte_pairs()).difference(tokenizer)
    assert difference.startswith("texts fall into other tokens")
