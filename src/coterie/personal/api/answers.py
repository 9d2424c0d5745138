"""Responses in the format of OpenAI's completions and chat completions, whole or streamed."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from coterie.personal.api.texts import Piece, Spoken
from coterie.personal.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"


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
