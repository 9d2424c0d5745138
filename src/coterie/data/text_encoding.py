"""Text as token ids: the beginning of documents, control tokens in people's text, and digests of
tokenizers.

A tokenizer turns `<|im_end|>` into the token that ends a turn, whoever wrote it. In people's text
it stays text: a copy of the tokenizer encodes it, in which control tokens have random names, new in
every process, that no text can contain. So texts are encoded in one piece, with offsets: encoding
them in parts would give other ids.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from coterie.core.errors import DataError

ControlTokens = Literal["text", "tokens", "refuse"]
Ids = npt.NDArray[np.int64]

_PLANE, _LETTERS = 0xF0000, 0xFFFE  # characters for private use


def _nonce() -> str:
    return "".join(chr(_PLANE + secrets.randbelow(_LETTERS)) for _ in range(6))


_NAME = _nonce()  # begins the private name of a control token
_BREAK = _nonce()  # within a control token that is text
_BEGUN = f"{_NAME}{chr(_PLANE + _LETTERS)}"  # before marked text that begins as its template says


def backend_of(tokenizer: Any) -> Tokenizer:
    """Return the backend of a fast tokenizer of transformers. Raises DataError for a slow one."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        problem = f"{type(tokenizer).__name__} is not a fast tokenizer"
        raise DataError(problem, "Use a base model with a tokenizer.json.")
    return backend


class TextEncoder:
    """Encodes people's text for one base by a fast tokenizer of transformers. `control_tokens` in
    the text stay text, become tokens, or are refused; the added tokens that a chat `template`
    writes are such, too. Raises DataError for a slow tokenizer.
    """

    def __init__(
        self, tokenizer: Any, control_tokens: ControlTokens = "text", template: str | None = None
    ) -> None:
        backend_of(tokenizer)
        self.tokenizer, self.control_tokens = tokenizer, control_tokens
        self._template = template or ""

    @cached_property
    def begin(self) -> list[int]:
        """The ids that the tokenizer puts before a text; empty for most byte-level tokenizers."""
        return self._around[0]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        whole: list[int] = self.tokenizer("a")["input_ids"]
        text: list[int] = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        places = range(len(whole) - len(text) + 1)
        start = next((i for i in places if whole[i : i + len(text)] == text), 0)
        return whole[:start], whole[start + len(text) :]

    @property
    def end(self) -> list[int]:
        """The id of the tokenizer's end token; empty if it has none."""
        end = self.tokenizer.eos_token_id
        return [] if end is None else [int(end)]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, people's or marked, without those that begin and end a
        document. Raises DataError for refused control tokens.
        """
        self.check(list(texts))
        marked = any(_NAME in text for text in texts)
        has_controls = self.control_tokens != "tokens" and any(map(self._pattern.search, texts))
        if marked or has_controls:
            return [self._ids(encoding) for encoding in self._encodings(texts)]
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return cast(list[list[int]], encoded["input_ids"])

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a document to continue; of an empty one, the token that begins a
        document, or else the one that ends the previous one. Marked text begins as `begun` says.
        """
        if text.startswith(_BEGUN):
            return self.encode([text.removeprefix(_BEGUN)])[0]
        return [*self.begin, *self.encode([text])[0]] or self.end

    def whole(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Return texts' ids for a classifier, with the tokenizer's around them, cut to `length`."""
        before, behind = self._around
        room = max(length - len(before) - len(behind), 0)
        return [[*before, *ids[:room], *behind] for ids in self.encode(texts)]

    def controls_in(self, text: str) -> list[str]:
        """Return the control tokens in a text, in order."""
        return self._pattern.findall(text)

    def count(self, value: Any) -> int:
        """Return the number of control tokens in all texts of a value."""
        return sum(len(self.controls_in(text)) for text in _texts(value))

    def last_control(self, marked: str, end: int) -> int:
        """Return the start of the last control token in marked text before `end`; 0 if none."""
        return max(marked.rfind(_NAME, 0, end), 0)

    def check(self, value: Any) -> None:
        """Refuse control tokens in any text of a value, if so configured. Raises DataError."""
        if self.control_tokens != "refuse":
            return
        tokens = Counter(token for text in _texts(value) for token in self.controls_in(text))
        if tokens:
            remedy = "Take them out, or have them read as text: data.control_tokens: text."
            raise DataError(f"control tokens in the text: {', '.join(map(repr, tokens))}", remedy)

    # What a template writes: its own control tokens are tokens, those of the messages are text.

    def shield(self, value: Any, spoken: bool = False) -> Any:
        """Return a message, or a part of one (text, lists and mappings), with control tokens made
        inert. If a model has `spoken` it, only special tokens become text: thoughts and calls may
        be added tokens.
        """
        if isinstance(value, str):
            pattern = self._special if spoken else self._pattern
            return pattern.sub(lambda match: _BREAK.join(match[0]), value)
        if isinstance(value, Mapping):
            return {key: self.shield(part, spoken) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.shield(part, spoken) for part in value]
        return value

    def marked(self, rendered: str) -> str:
        """Return rendered messages that were shielded, with private names for the template's
        control tokens, for `encode_marked`.
        """
        return self._pattern.sub(lambda match: self._names[match[0]], rendered).replace(_BREAK, "")

    def begun(self, marked: str) -> str:
        """Return marked text for `prompt`, which then prepends nothing."""
        return _BEGUN + marked

    def unmarked(self, marked: str) -> str:
        """Return marked text in its readable form."""
        marked = marked.removeprefix(_BEGUN)
        for token, name in self._names.items():
            marked = marked.replace(name, token)
        return marked

    def encode_marked(self, text: str) -> tuple[Ids, Ids]:
        """Return ids of marked text, (T,), and characters of each, (T, 2), with space before it."""
        (encoding,) = self._encodings([text])
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(self._ids(encoding), dtype=np.int64), offsets

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids of all control tokens."""
        return frozenset(self._controls.values())

    @cached_property
    def _controls(self) -> dict[str, int]:
        """Ids of control tokens: special tokens, and added ones that the template writes."""
        added = self.tokenizer.added_tokens_decoder
        written = self._template or str(getattr(self.tokenizer, "chat_template", None) or "")
        return {
            token.content: int(i)
            for i, token in added.items()
            if token.special or (token.content in written and not token.content.isspace())
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _any_of(self._controls)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return _any_of(token.content for token in added if token.special)

    @cached_property
    def _names(self) -> dict[str, str]:
        return {token: f"{_NAME}{chr(_PLANE + i)}" for i, token in enumerate(self._controls)}

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        return self._renamed.encode_batch(list(texts), add_special_tokens=False)

    def _ids(self, encoding: Encoding) -> list[int]:
        return [self._own_ids.get(i, i) for i in encoding.ids] if self._own_ids else encoding.ids

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer, with private names for control tokens."""
        spec = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # without a post-processor, which might trim offsets
        spec["truncation"] = spec["padding"] = spec["post_processor"] = None
        for token in spec["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        model = spec["model"]
        if isinstance(vocabulary := model.get("vocab"), dict):
            model["vocab"] = {self._names.get(t, t): i for t, i in vocabulary.items()}
        elif vocabulary:  # Unigram: pieces with their scores
            model["vocab"] = [[self._names.get(t, t), score] for t, score in vocabulary]
        if unknown := model.get("unk_token"):
            model["unk_token"] = self._names.get(unknown, unknown)
        return Tokenizer.from_str(json.dumps(spec))

    @cached_property
    def _own_ids(self) -> dict[int, int]:
        """Ids of control tokens by their ids in the renamed tokenizer, which closes gaps in ids."""
        added, new_id = self.tokenizer.added_tokens_decoder.items(), self._renamed.token_to_id
        pairs = ((new_id(self._names.get(t.content, t.content)), int(i)) for i, t in added)
        return {new: original for new, original in pairs if new not in (None, original)}


REMEDY = (
    "Use the tokenizer that the base was trained with, or give the base a row for each of its "
    "tokens: model.resize_token_embeddings(len(tokenizer))."
)


def missing_row(tokenizer: Any, id: int, rows: int) -> str:
    """Return the problem of a token without a row in the base's embedding."""
    token = tokenizer.convert_ids_to_tokens(id)
    return f"the tokenizer has token {id} {token!r}, the base has {rows} rows"


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [text for part in value for text in _texts(part)]


# letters, digits, spaces, line ends, signs, other alphabets and an emoji, which tokenizers treat
# differently
PROBE = "The  quick (brown) fox\n\tjumps over 12,345 lazy_dogs: l'été, Straße, Привет, 你好, 🙂!"


@dataclass(frozen=True)
class TokenizerDigest:
    """A digest of a tokenizer's content; its file's would change with the library's versions."""

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
        """Return how a tokenizer differs, in words; "" if it does not."""
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
    """Return the token of each id, and whether it is special; "" for unused ids."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = dict(zip(vocabulary.values(), vocabulary, strict=True))
    return [(tokens.get(i, ""), i in special) for i in range(max(tokens) + 1)]
