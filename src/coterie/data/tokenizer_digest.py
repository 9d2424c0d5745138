"""What a tokenizer makes of texts, in a few bytes: to tell whether a base still has the tokenizer
that a model was trained with.
"""

from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

from coterie.data.text_encoding import TextEncoder

# letters, digits, spaces, line ends, signs, other alphabets and an emoji, which tokenizers treat
# each in a way of its own
PROBE = "The  quick (brown) fox\n\tjumps over 12,345 lazy_dogs: l'été, Straße, Привет, 你好, 🙂!"


@dataclass(frozen=True)
class TokenizerDigest:
    """A digest of a tokenizer; that of its file would change with the library's versions.

    Args:
        digest: Of the token of each id, and of whether it is special.
        each: A byte of the digest of each id's token, which tells ids that changed; base64.
        probe: The ids of `PROBE`, as a document begins.
    """

    digest: str
    each: str
    probe: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenizerDigest":
        """Return the digest of a fast tokenizer. Raises DataError for a slow one."""
        digests = [_digest(str(token)) for token in _tokens(tokenizer)]
        return cls(
            _digest("".join(digests)),
            b64encode(bytes(int(digest[:2], 16) for digest in digests)).decode(),
            tuple(TextEncoder(tokenizer).prompt(PROBE)),
        )

    def difference(self, tokenizer: Any) -> str:
        """Return how a tokenizer differs from this, in words: the first token that is another one;
        "" where none is.
        """
        now, tokens = TokenizerDigest.of(tokenizer), _tokens(tokenizer)
        if self == now:
            return ""
        for id, (before, after) in enumerate(
            zip_longest(b64decode(self.each), b64decode(now.each))
        ):
            if before is None:
                return f"token {id} {tokens[id][0]!r} is new"
            if after is None:
                return f"token {id} is gone"
            if before != after:
                return f"token {id} was another one than {tokens[id][0]!r}"
        for before, after in zip_longest(self.probe, now.probe):
            if before != after:
                old, new = ("nothing" if i is None else repr(tokens[i][0]) for i in (before, after))
                return f"texts fall into other tokens: {new} where {old} was"
        return "a token is another one"


def _tokens(tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the token of each id, and whether it is special; "" for an id without any."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = dict(zip(vocabulary.values(), vocabulary, strict=True))
    return [(tokens.get(i, ""), i in special) for i in range(max(tokens) + 1)]


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
