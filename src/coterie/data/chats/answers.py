"""The tokens of a rendered conversation, and which of them belong to an assistant's answers."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.data.chats.rendering import Span
from coterie.data.text_encoding import Ids, TextEncoder

Loss = Literal["answers", "all"]
Flags = npt.NDArray[np.bool_]

REMEDY = (
    "Name a file with another template: --set data.chat_template=FILE. It must write a special "
    "token behind every answer, and either mark answers by {% generation %} or add each message to "
    "what it wrote before."
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as token ids."""

    ids: Ids  # (T,)
    counted: Flags  # (T,) which of them the loss counts; never the first
    cut: bool = False  # whether a part of the conversation was left out
    without_tools: bool = False  # whether the template leaves out the descriptions of its tools

    @property
    def ends(self) -> Ids:
        """The last id of each answer."""
        behind: Flags = np.append(self.counted[1:], False)
        return self.ids[self.counted & ~behind]


def behind_prompt(text: str, span: Span, starts: Sequence[int], header: str) -> Span:
    """Return a marked span without the end of the answer's prompt, if the mark includes it: it ends
    at one of the known `starts` of answers, or after the `header` that a prompt appends.
    """
    start, end = span
    place = bisect_left(starts, start)
    if place < len(starts) and starts[place] < end:
        return starts[place], end
    return (start + len(header), end) if text.startswith(header, start, end) else span


def tokens(texts: TextEncoder, text: str, starts: Sequence[int] = ()) -> tuple[Ids, Ids]:
    """Return the ids of marked text, (T,), and the first and end character of each, (T, 2). Prompt
    and answer are encoded separately if a token would straddle one of `starts`: a model that
    answers a prompt sees the ids of the prompt alone.
    """
    ids, offsets = texts.encode_marked(text)
    apart = [start for start in starts if not _begins_alike(texts, text, ids, offsets, start)]
    if not apart:
        return ids, offsets
    pieces = [
        (first, *_piece(texts, text[first:end], bool(first)))
        for first, end in pairwise([0, *apart, len(text)])
    ]
    return (
        np.concatenate([ids for _, ids, _ in pieces]),
        np.concatenate([first + offsets for first, _, offsets in pieces]),
    )


def _begins_alike(texts: TextEncoder, text: str, ids: Ids, offsets: Ids, start: int) -> bool:
    """Whether the ids up to `start` are those of the text that ends there."""
    # what follows the last control token decides: tokens do not cross it
    first = texts.last_control(text, start)
    alone, _ = texts.encode_marked(text[first:start])
    place = int(np.searchsorted(offsets[:, 0], first))
    end = place + len(alone)
    if end < len(ids) and offsets[end, 0] < start:
        return False
    return bool(np.array_equal(ids[place:end], alone))


def _piece(texts: TextEncoder, text: str, follows: bool) -> tuple[Ids, Ids]:
    """Return a piece's ids and offsets, without the tokenizer's prefix if it `follows` others."""
    ids, offsets = texts.encode_marked(text)
    if not follows or texts.tokenizer.decode(ids) == texts.unmarked(text):
        return ids, offsets
    before = len(texts.encode_marked("\n")[0])
    ids, offsets = texts.encode_marked("\n" + text)
    return ids[before:], np.maximum(offsets[before:] - 1, 0)


def counted(
    text: str, ids: Ids, offsets: Ids, spans: Sequence[Span], special: Collection[int]
) -> Flags:
    """Return which tokens belong to answers, each up to the special token that ends it; an answer
    of special tokens alone has none. Raises DataError for an answer without an end.
    """
    flags: Flags = np.zeros(len(ids), dtype=bool)
    is_special = np.isin(ids, list(special))
    for start, end in spans:
        answer = np.arange(len(ids))[_tokens_in(offsets, start, end)]
        if not len(answer):
            continue
        ends = answer[is_special[answer]]
        if not len(ends) or text[offsets[ends[-1], 1] : end].strip():
            ends = answer[-1:] + 1  # right behind the mark
            if ends[-1] == len(ids) or not is_special[ends[-1]]:
                raise DataError("no special token ends an answer of the chat template", REMEDY)
        flags[answer[0] : ends[-1] + 1] = not is_special[answer].all()
    return flags


def within(offsets: Ids, spans: Sequence[Span]) -> Flags:
    """Return which tokens lie in any of the spans."""
    inside: Flags = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        inside[_tokens_in(offsets, start, end)] = True
    return inside


def _tokens_in(offsets: Ids, start: int, end: int) -> slice:
    return slice(
        int(np.searchsorted(offsets[:, 1], start, "right")),
        int(np.searchsorted(offsets[:, 0], end, "left")),
    )


def ending(ids: Ids, flags: Flags) -> Rendered:
    """Return the tokens up to the last counted one; the first token is never counted."""
    flags[:1] = False
    end = int(np.flatnonzero(flags)[-1]) + 1 if flags.any() else 0
    return Rendered(ids[:end], flags[:end])


def pair(texts: TextEncoder, prompt: str, completion: str, loss: Loss) -> Rendered:
    """Return a prompt and completion of plain text as one document. Raises DataError without an end
    token, and for refused control tokens.
    """
    if not texts.end:
        problem = "the tokenizer has no end token, so that completions would not end"
        raise DataError(problem, "Set eos_token in the base's tokenizer_config.json.")
    texts.check([prompt, completion])
    if texts.control_tokens == "tokens":
        prompt, completion = texts.marked(prompt), texts.marked(completion)
    ids, _ = tokens(texts, prompt + completion, [len(prompt)])
    before = len(texts.begin) + len(texts.encode_marked(prompt)[0])
    ids = np.concatenate([texts.begin, ids, texts.end]).astype(np.int64)
    return ending(ids, np.arange(len(ids)) >= (before if loss == "answers" else 0))
