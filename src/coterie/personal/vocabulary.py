"""The tokens of a vocabulary as text that follows other text."""

import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name of a token for a single byte


class Vocabulary:
    """A tokenizer's tokens as text. Tokenizers may drop the first space of a decoded text, so a
    letter is put before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.anchor: int = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self.anchor_text: str = tokenizer.decode([self.anchor])

    @cached_property
    def longest(self) -> int:
        """The largest number of characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens after a letter, `special` ones such as the end included."""
        text = self.tokenizer.decode([self.anchor, *ids], skip_special_tokens=not special)
        return str(text)[len(self.anchor_text) :]

    def content(self, token: int) -> bytes | None:
        """Return the bytes of a token, which need not be whole characters; None if unknown."""
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
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2, Radford et
    al. 2019): printable bytes stand for themselves, the others are characters from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}
