"""Small tokenizers of byte pairs."""

from collections.abc import Sequence
from typing import Any

MERGES = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("e", "r"), ("Ġ", "a"), ("n", "d"), ("Ġa", "nd")]


def byte_pairs(merges: Sequence[tuple[str, str]] = MERGES) -> Any:
    """A tokenizer of all bytes and a few merges of them, which splits text as GPT-2's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
