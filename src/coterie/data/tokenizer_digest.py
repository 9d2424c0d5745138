"""Digests of tokenizers, to check that a base still has the tokenizer a model was trained with."""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

from coterie.data.text_encoding import TextEncoder

# letters, digits, spaces, line ends, signs, other alphabets and an emoji, which tokenizers treat
# differently
PROBE = "The  quick (brown) fox\n\tjumps over 12,345 lazy_dogs: l'été, Straße, Привет, 你好, 🙂!"


@dataclass(frozen=True)
class TokenizerDigest:
    """A digest of a tokenizer; that of its file would change with the library's versions."""

    digest: str  # of all tokens and of whether they are special
    tokens: int  # number of ids
    probe: tuple[int, ...]  # the ids of `PROBE` at the beginning of a document

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenizerDigest":
        """Return the digest of a fast tokenizer. Raises DataError for a slow one."""
        tokens = _tokens(tokenizer)
        digest = blake2b(repr(tokens).encode(), digest_size=8).hexdigest()
        return cls(digest, len(tokens), tuple(TextEncoder(tokenizer).prompt(PROBE)))

    def difference(self, tokenizer: Any) -> str:
        """Return a description of how a tokenizer differs; "" if it does not."""
        now = TokenizerDigest.of(tokenizer)
        if self == now:
            return ""
        if now.tokens != self.tokens:
            last = _tokens(tokenizer)[-1][0]
            return f"it had {self.tokens:,} tokens and has {now.tokens:,}, the last one {last!r}"
        for before, after in zip_longest(self.probe, now.probe):
            if before != after:
                return f"texts fall into other tokens: {after} where {before} was"
        return "some of its tokens are others"


def _tokens(tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the token of each id, and whether it is special; "" for an id without any."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = dict(zip(vocabulary.values(), vocabulary, strict=True))
    return [(tokens.get(i, ""), i in special) for i in range(max(tokens) + 1)]
