"""Incremental decoding of tokens to text: whole characters only, and nothing after a stop text."""

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.personal.running_batch import Finish
from coterie.personal.sampling import Token
from coterie.personal.vocabulary import Vocabulary

BROKEN = "\ufffd"  # stands for bytes that are not a whole character
LONGEST = 32  # most tokens that are held back


@dataclass(frozen=True)
class Spoken:
    """A token with its log-probability, and the number of characters before it."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Piece:
    """The new characters and tokens of a text."""

    text: str
    tokens: tuple[Spoken, ...] = ()
    finish: Finish | None = None  # why the text ends here; None if it goes on


class Decoder:
    """A decoder of tokens that come one by one. A character may consist of several tokens, so an
    incomplete one is held back.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._before: list[int] = []  # tokens whose text is released
        self._held: list[int] = []
        self._out = 0  # released characters of the held tokens

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        self._held.append(token)
        text = self._text(self._before, self._held)
        released = self._give(text, len(text.rstrip(BROKEN)))
        if self._out == len(text):
            self._before, self._held, self._out = self._held, [], 0
        elif len(self._held) >= LONGEST:
            released += self._shorten(text)
        return released

    def rest(self) -> str:
        """Return the text that is held back."""
        text = self._text(self._before, self._held)
        return self._give(text, len(text))

    def _shorten(self, text: str) -> str:
        """Release all but the last three held tokens: a character has four bytes at most, so
        older tokens cannot be part of an incomplete one.
        """
        old, new = self._held[:-3], self._held[-3:]
        first = self._text(self._before, old)
        if first + self._text(old, new) != text:
            return ""
        released = self._give(text, len(first))
        self._before, self._held, self._out = old, new, self._out - len(first)
        return released

    def _give(self, text: str, end: int) -> str:
        released = text[self._out : end]
        self._out = max(self._out, end)
        return released

    def _text(self, before: list[int], ids: list[int]) -> str:
        """Return the text of tokens that follow others."""
        size = len(self.vocabulary.decode(before, special=False))
        return self.vocabulary.decode(before + ids, special=False)[size:]


class Answer:
    """The text of one choice.

    Args:
        vocabulary: The vocabulary of its tokens.
        stops: Texts that end the answer, and are not part of it.
        begin: The number of characters before the answer (of an echoed prompt).
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], begin: int = 0) -> None:
        self._decoder, self._stops, self._begin = Decoder(vocabulary), stops, begin
        self._text, self._out = "", 0
        self._tokens: list[Spoken] = []  # not released yet

    def add(self, token: Token, finish: Finish | None) -> Piece:
        """Add a token and return the new piece; a token that ends the text is not part of it."""
        before = len(self._text)
        if finish != "stop":
            self._tokens.append(Spoken(token, self._begin + before))
            self._text += self._decoder.add(token.id)
        if finish is not None:
            self._text += self._decoder.rest()
        # the first stop text, of those that end after the earlier text
        places = [self._text.find(stop, max(before - len(stop) + 1, 0)) for stop in self._stops]
        if (end := min((place for place in places if place >= 0), default=None)) is not None:
            self._text, finish = self._text[:end], "stop"
            self._tokens = [one for one in self._tokens if one.offset < self._begin + end]
        ready = len(self._text) if finish else len(self._text) - self._unsure()
        text, self._out = self._text[self._out : ready], max(ready, self._out)
        given = [one for one in self._tokens if finish or one.offset < self._begin + ready]
        self._tokens = self._tokens[len(given) :]
        return Piece(text, tuple(given), finish)

    def _unsure(self) -> int:
        """Return the number of characters at the end that may begin a stop text."""
        longest = 0
        for stop in self._stops:
            sizes = range(min(len(stop) - 1, len(self._text)), longest, -1)
            longest = next((n for n in sizes if self._text.endswith(stop[:n])), longest)
        return longest


def spoken(vocabulary: Vocabulary, tokens: Sequence[Token]) -> tuple[Spoken, ...]:
    """Return the tokens of a prompt with their places in its text."""
    decoder, offset, placed = Decoder(vocabulary), 0, []
    for token in tokens:
        placed.append(Spoken(token, offset))
        offset += len(decoder.add(token.id))
    return tuple(placed)
