"""Decoding of tokens as they come, and responses in the form of OpenAI's completions and chats."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.personal.running_batch import Finish
from coterie.personal.sampling import Token
from coterie.personal.text_inference import Vocabulary

BROKEN = "\ufffd"  # stands for bytes that are not a whole character
LONGEST = 32  # most tokens that are held back
DONE = b"data: [DONE]\n\n"


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
    """A decoder of tokens that come one by one; it holds back an incomplete character's tokens."""

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
        """Release all held tokens but three: an incomplete character of 4 bytes has no more."""
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
        size = len(self.vocabulary.decode(before, special=False))
        return self.vocabulary.decode(before + ids, special=False)[size:]


class Answer:
    """The text of one choice. `stops` end the answer and are not part of it; `begin` is the number
    of characters of an echoed prompt; `chat` leaves out white space at the beginning.
    """

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str], begin: int = 0, chat: bool = False
    ) -> None:
        self._decoder, self._stops, self._begin = Decoder(vocabulary), stops, begin
        self._leading = chat  # whether only white space has come
        self.text, self._out = "", 0
        self._tokens: list[Spoken] = []  # not released yet

    def add(self, token: Token, finish: Finish | None) -> Piece:
        """Add a token and return the new piece; a token that ends the text is not part of it."""
        before = len(self.text)
        if finish != "stop":
            self._tokens.append(Spoken(token, self._begin + before))
            self.text += self._decoder.add(token.id)
        if finish is not None:
            self.text += self._decoder.rest()
        # the first stop text, of those that end after the earlier text
        places = [self.text.find(stop, max(before - len(stop) + 1, 0)) for stop in self._stops]
        if (end := min((place for place in places if place >= 0), default=None)) is not None:
            self.text, finish = self.text[:end], "stop"
            self._tokens = [one for one in self._tokens if one.offset < self._begin + end]
        ready = len(self.text) if finish else len(self.text) - self._unsure()
        text, self._out = self.text[self._out : ready], max(ready, self._out)
        if self._leading:
            text = text.lstrip()
            self._leading = not text
        given = [one for one in self._tokens if finish or one.offset < self._begin + ready]
        self._tokens = self._tokens[len(given) :]
        return Piece(text, tuple(given), finish)

    def _unsure(self) -> int:
        """Return the number of characters at the end that may begin a stop text."""
        longest = 0
        for stop in self._stops:
            sizes = range(min(len(stop) - 1, len(self.text)), longest, -1)
            longest = next((n for n in sizes if self.text.endswith(stop[:n])), longest)
        return longest


def spoken(vocabulary: Vocabulary, tokens: Sequence[Token]) -> tuple[Spoken, ...]:
    """Return the tokens of a prompt with their places in its text."""
    decoder, offset, placed = Decoder(vocabulary), 0, []
    for token in tokens:
        placed.append(Spoken(token, offset))
        offset += len(decoder.add(token.id))
    return tuple(placed)


class Answers:
    """The format of the answers to one completion request, with log-probabilities or without."""

    prefix = "cmpl"
    whole, part = "text_completion", "text_completion"

    def __init__(self, client: str, vocabulary: Vocabulary, logprobs: bool) -> None:
        self.vocabulary, self.logprobs = vocabulary, logprobs
        self._about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": client,
        }

    def response(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, int]) -> dict[str, Any]:
        """Return a whole response from the pieces of each answer."""
        choices = [
            self.choice(
                index,
                Piece(
                    "".join(piece.text for piece in answer_pieces),
                    tuple(token for piece in answer_pieces for token in piece.tokens),
                    answer_pieces[-1].finish,
                ),
            )
            for index, answer_pieces in enumerate(pieces)
        ]
        return {**self._about, "object": self.whole, "choices": choices, "usage": usage}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the JSON of one answer."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish,
        }

    def begin(self, count: int) -> Iterator[bytes]:
        """Yield the events that begin a stream of `count` answers."""
        return iter(())

    def event(self, index: int, piece: Piece) -> bytes:
        """Return a piece as an event of a stream; b"" for an empty piece."""
        if not piece.text and not piece.tokens and piece.finish is None:
            return b""
        return self._event([self.delta(index, piece)])

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the JSON of a new piece of an answer."""
        return self.choice(index, piece)

    def end(self, usage: dict[str, int] | None) -> bytes:
        """Return the last events of a stream, with the usage unless it is None."""
        return DONE if usage is None else self._event([], usage=usage) + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse({**self._about, "object": self.part, "choices": choices, **more})

    def _logprobs(self, tokens: Sequence[Spoken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [self._name(one.token.id) for one in tokens],
            "token_logprobs": [one.token.logprob for one in tokens],
            "top_logprobs": [self._top(one) for one in tokens],
            "text_offset": [one.offset for one in tokens],
        }

    def _top(self, one: Spoken) -> dict[str, float] | None:
        """Return the log-probabilities of the most likely tokens, and of the token itself."""
        if one.token.logprob is None:
            return None
        logprobs = {self._name(token): logprob for token, logprob in one.token.top}
        return logprobs | {self._name(one.token.id): one.token.logprob}

    def _name(self, token: int) -> str:
        """Return a token as text, or its bytes if they are not whole characters."""
        text = self.vocabulary.decode([token])
        if "\ufffd" not in text or (content := self.vocabulary.content(token)) is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class ChatAnswers(Answers):
    """The format of the answers to a chat request."""

    prefix = "chatcmpl"
    whole, part = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish,
        }

    def begin(self, count: int) -> Iterator[bytes]:
        for index in range(count):
            delta = {"role": "assistant", "content": ""}
            yield self._event([self._delta(index, delta, Piece(""))])

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._delta(index, {"content": piece.text} if piece.text else {}, piece)

    def _delta(self, index: int, delta: dict[str, str], piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(piece.tokens) if piece.tokens else None,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, tokens: Sequence[Spoken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {
                **self._entry(one.token.id, one.token.logprob),
                "top_logprobs": [self._entry(*best) for best in one.token.top],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = self.vocabulary.content(token)
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": None if content is None else list(content),
        }


def sse(event: dict[str, Any]) -> bytes:
    """Return an event of a stream in the format of server-sent events."""
    return b"data: " + json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"
