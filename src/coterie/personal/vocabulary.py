"""Tokens of a vocabulary as text that stands behind other text."""

import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # as SentencePiece writes a token that is one byte


class Vocabulary:
    """A tokenizer's tokens as text. Tokenizers may swallow the first space of what they decode, so
    a letter is put before it.

    Args:
        tokenizer: As transformers has it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.anchor: int = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self.anchor_text: str = tokenizer.decode([self.anchor])

    @cached_property
    def longest(self) -> int:
        """The most characters that a token can stand for."""
        return max(map(len, self.tokenizer.get_vocab()))

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens behind a letter.

        Args:
            ids: Of the tokens.
            special: Whether special tokens, which end texts, say, are written out.
        """
        text = self.tokenizer.decode([self.anchor, *ids], skip_special_tokens=not special)
        return str(text)[len(self.anchor_text) :]

    def content(self, token: int) -> bytes | None:
        """Return the bytes of a token, which need not be whole letters; None if they are not
        known.
        """
        text = self.decode([token])
        if "\ufffd" not in text:
            return text.encode()
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if match := _BYTE.fullmatch(name):
            return bytes.fromhex(match[1])
        letters = _letters()
        return bytes(letters[c] for c in name) if all(c in letters for c in name) else None


@cache
def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for (GPT-2, Radford et al.
    2019): itself where it shows, otherwise one of the letters from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}
