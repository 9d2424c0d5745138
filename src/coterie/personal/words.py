"""The next *words* of a text with their probabilities, though the model only knows tokens.

The probability of a word is that of its tokens, times the probability that a new word begins after
them (white space, punctuation or the end): without the last factor "h" would always beat "hiking".
Several ways to spell a word in tokens are added up, as far as the search meets them: it goes token
by token over the likeliest beginnings of those that may still be among the best. Punctuation alone
is no word, so the probabilities need not add up to 1.

The last word of a text may be unfinished, and its tokens are then others than those of the whole
word ("sock", but not "socket", ends in "ck"). So the text's last tokens are taken back as far as
the beginning of that word, and the search goes over all sequences of tokens that begin with the
same characters (token healing, Lundberg 2023). Probabilities are given these characters: those of
the sequences, divided by the sum over all sequences that begin with them.
"""

import string
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.models.backbone import Attachable, Backbone
from coterie.models.routing import Routing

LONGEST = 8  # tokens of a word
UNFINISHED = 8  # tokens of an unfinished word that are taken back
BEAM = 16  # beginnings that are looked into at once, at least
# of the probability of an unfinished word: what a spelling of it may have at most to be left out
RARE = 1e-3
# a space as byte-level and SentencePiece vocabularies write it, then newline, tab, carriage return
SPACES = "Ġ▁Ċĉč"
# "'" is part of words; the last are the control characters as byte-level vocabularies write them
PUNCTUATION = frozenset(string.punctuation) - {"'"}
NO_LETTERS = PUNCTUATION | {chr(256 + i) for i in range(34)} - set(SPACES)
LAST = chr(0x10FFFF)  # sorts behind every name of a token


@dataclass(frozen=True)
class Word:
    """A suggestion.

    Args:
        word: The whole word, also where its first letters are already in the text.
        insert: What is to be appended to the text: the rest of the word, with a space before it if
            it needs one.
        probability: That it is the next word, or the whole of the unfinished last word, given the
            text as it is.
        experts: (n,) the weight of each expert where the word's tokens were chosen, the mean over
            these tokens and over all blocks; they add up to 1. Empty without a router.
    """

    word: str
    insert: str
    probability: float
    experts: tuple[float, ...]


@dataclass(frozen=True)
class _Beginning:
    """The first tokens behind a prompt.

    Args:
        ids: Of the tokens.
        p: Their probability.
        left: What of the end of the text, as the vocabulary writes it, they do not yet spell.
        letters: What they spell, with any white space as one space.
        begun: Whether a word has begun or been continued behind the text.
        tokens: How many of them belong to that word.
        experts: (n,) summed over the positions that chose these; None without a router.
        row: Of all but the last of these tokens, in the pass that came before.
    """

    ids: tuple[int, ...] = ()
    p: float = 1.0
    left: str = ""
    letters: str = ""
    begun: bool = False
    tokens: int = 0
    experts: Tensor | None = None
    row: int = 0


@dataclass
class _Found:
    """A word that the search has met.

    Args:
        inserts: The probability of each way to append it to the text.
        experts: (n,) of its first spelling, see `Word`.
    """

    experts: tuple[float, ...]
    inserts: dict[str, float] = field(default_factory=dict)

    @property
    def p(self) -> float:
        return sum(self.inserts.values())


class _Search:
    """What is found so far for one text.

    Args:
        text: What was written so far.
        end: The tokens of the text that are taken back, as the vocabulary writes them.
        written: The same, decoded.
        depth: How many tokens are looked at behind the prompt.
        k: How many words are wanted at most.
    """

    def __init__(self, text: str, end: str, written: str, depth: int, k: int) -> None:
        self.text, self.end, self.written, self.depth, self.k = text, end, written, depth, k
        self.beam = max(BEAM, 2 * k)
        self.level = [_Beginning(left=end)]
        self.mass = 0.0 if end else 1.0  # of what begins with the end of the text
        self.found: dict[tuple[str, bool], _Found] = {}

    @property
    def within(self) -> bool:
        """Whether the text may end within a word."""
        return bool(self.end) and self.end[-1] not in SPACES

    def prune(self) -> int:
        """Keep the beginnings that may still be among the best words, or say how likely the
        text's end is. Returns how many.
        """
        best = sorted((found.p for found in self.found.values()), reverse=True)
        least = best[self.k - 1] if len(best) >= self.k else 0.0
        level = sorted((b for b in self.level if len(b.ids) < self.depth), key=lambda b: -b.p)
        together: dict[str, float] = {}  # spellings of one word may be among the best by their sum
        for b in level:
            together[b.letters] = together.get(b.letters, 0.0) + b.p
        words = [b for b in level if not b.left and together[b.letters] > least]
        spelling = [b for b in level if b.left and b.p > RARE * self.mass]
        self.level = words[: self.beam] + spelling[: self.beam]
        return len(self.level)

    def last(self, rows: int, filling: int) -> list[int]:
        """Return the beginnings' last tokens, and up to so many rows something else."""
        return [b.ids[-1] for b in self.level] + [filling] * (rows - len(self.level))

    def before(self, rows: int) -> list[int]:
        """In which row of the pass before the beginnings' other tokens were."""
        return [b.row for b in self.level] + [0] * (rows - len(self.level))

    def note(self, piece: str, b: _Beginning, p: float) -> None:
        """Add a complete word, or another spelling of one; `piece` is what its tokens say."""
        insert = piece.removeprefix(self.written)
        if not any(c.isalnum() for c in insert) or "\ufffd" in piece:
            return
        new = not self.within or insert[0].isspace()
        blank = not self.text.strip() or self.text[-1].isspace()
        word = insert.strip()
        insert = " " + word if insert[0].isspace() and not blank else word
        shown = word if new else last_word(self.text) + word
        experts = () if b.experts is None else tuple((b.experts / b.tokens).tolist())
        inserts = self.found.setdefault((shown, new), _Found(experts)).inserts
        inserts[insert] = inserts.get(insert, 0.0) + p

    def best(self) -> list[Word]:
        """Return the best words, none of which reads as another one."""
        words: dict[str, Word] = {}
        for (shown, _), found in sorted(self.found.items(), key=lambda item: -item[1].p):
            insert = max(found.inserts, key=found.inserts.__getitem__)
            words.setdefault(shown, Word(shown, insert, found.p / self.mass, found.experts))
        return list(words.values())[: self.k]


class Words:
    """The search for words in one vocabulary.

    Args:
        backbone: The base, with its tokenizer.

    Raises:
        ModelError: It has no tokenizer.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.tokenizer = backbone, backbone.tokenizer
        size = backbone.architecture.vocabulary
        names = self.tokenizer.convert_ids_to_tokens(list(range(min(size, len(self.tokenizer)))))
        names += [None] * (size - len(names))
        special = set(self.tokenizer.all_special_ids)
        self.names = ["" if i in special or not name else str(name) for i, name in enumerate(names)]
        device = backbone.device
        self.starts = torch.tensor([_starts(name) for name in self.names], device=device)
        self.inside = torch.tensor([_continues(name) for name in self.names], device=device)
        self._sorted = sorted((name, i) for i, name in enumerate(self.names) if name)
        # put before what is decoded, since tokenizers may swallow its first space
        self.anchor: int = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self.anchor_text: str = self.tokenizer.decode([self.anchor])

    @torch.no_grad()
    def of(self, adapter: Attachable, texts: Sequence[str], k: int) -> list[list[Word]]:
        """Return the k most likely next words of each text, best first. All are searched in one
        batch.

        Args:
            adapter: Of one model, or of many, each for one text: every text has as many rows as the
                others, in the order of the texts.
            texts: What was written so far.
            k: How many words at most.
        """
        own, searches = zip(*(self._begin(text, k) for text in texts), strict=True)
        prompts, present = left_padded(own, self.anchor)
        mask = None if present.all() else present.to(self.backbone.device)
        with self.backbone.using(adapter):
            cache, p, experts = self._forward(
                adapter, prompts[:, None].to(self.backbone.device), mask=mask
            )
            for search, of_prompt, e in zip(searches, p, experts, strict=True):
                self._go_on(search, of_prompt[None], [e])
            before = 1
            for _ in range(UNFINISHED + LONGEST):
                if not (rows := max(search.prune() for search in searches)):
                    break
                last = torch.tensor(
                    [search.last(rows, self.anchor) for search in searches],
                    device=self.backbone.device,
                )
                parents = [
                    before * i + row
                    for i, search in enumerate(searches)
                    for row in search.before(rows)
                ]
                cache.batch_select_indices(torch.tensor(parents, device=self.backbone.device))
                mask = (
                    None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                )
                cache, p, experts = self._forward(adapter, last[..., None], cache, mask)
                before = rows
                for first, search in zip(range(0, len(p), rows), searches, strict=True):
                    of_search = slice(first, first + len(search.level))
                    self._go_on(search, p[of_search], experts[of_search])
        return [search.best() for search in searches]

    def _begin(self, text: str, k: int) -> tuple[list[int], _Search]:
        """Return the prompt, and the search that begins behind it."""
        ids: list[int] = self.tokenizer(text)["input_ids"] if text.strip() else []
        cut = len(ids) - self._unfinished(ids)
        end = "".join(self.names[i] for i in ids[cut:])
        # a word's end is seen one token later, hence one more
        search = _Search(text, end, self._decode(ids[cut:]), len(ids) - cut + LONGEST + 1, k)
        first = (
            self.tokenizer.bos_token_id
            if self.tokenizer.bos_token_id is not None
            else self.tokenizer.eos_token_id
        )
        return ids[:cut][-max(self.backbone.context_limit - search.depth, 1) :] or [
            first or 0
        ], search

    def _unfinished(self, ids: Sequence[int]) -> int:
        """How many tokens at the end of a text are its last word, or a space in which a word may
        have begun.
        """
        for count, i in enumerate(reversed(ids)):
            name = self.names[i]
            if count == UNFINISHED or not name or name[-1] in NO_LETTERS:
                return count
            if name[0] in SPACES or any(c in NO_LETTERS for c in name):
                line_break = not name.strip(SPACES) and name[-1] not in "Ġ▁"
                return count if count and line_break else count + 1
        return len(ids)

    def _go_on(self, search: _Search, p: Tensor, experts: Sequence[Tensor | None]) -> None:
        """Note the words that end, and go on with the others: p (beginnings, V) of the next
        token of each.
        """
        if not search.level:
            return
        allowed = torch.stack([self._allowed(b) for b in search.level])
        goes_on = p * allowed
        for b, end in zip(search.level, (1 - goes_on.sum(dim=-1)).tolist(), strict=True):
            if b.begun:
                search.note(self._decode(b.ids), b, b.p * max(end, 0.0))
        top, ids = goes_on.topk(min(search.beam, p.shape[1]), dim=-1)
        level: list[_Beginning] = []
        for number, (b, row, e, values, tokens) in enumerate(
            zip(search.level, p, experts, top.tolist(), ids.tolist(), strict=True)
        ):
            longer = dict(zip(tokens, values, strict=True))
            if b.left:
                completing = self._longer(b.left)
                search.mass += b.p * float(row[completing].sum())
                shorter = self._shorter(b.left)
                longer |= dict(zip(shorter, row[shorter].tolist(), strict=True))
            level += [
                self._child(search, b, number, token, b.p * value, e)
                for token, value in longer.items()
                if value > 0
            ]
        search.level = level

    def _allowed(self, b: _Beginning) -> Tensor:
        """(V,) with which tokens a beginning may go on as a word."""
        if b.begun:
            return self.inside
        if not b.left:
            return self.starts | self.inside
        found = torch.zeros_like(self.inside)
        fitting = [
            i
            for i in self._longer(b.left)
            if not (rest := self.names[i][len(b.left) :]) or rest[0] not in NO_LETTERS
        ]
        found[fitting] = True
        return found

    def _longer(self, left: str) -> list[int]:
        """Return the tokens that begin with `left`."""
        first, last = (
            bisect_left(self._sorted, (left, 0)),
            bisect_left(self._sorted, (left + LAST, 0)),
        )
        return [i for _, i in self._sorted[first:last]]

    def _shorter(self, left: str) -> list[int]:
        """Return the tokens that `left` begins with."""
        return [i for size in range(1, len(left)) for i in self._named(left[:size])]

    def _named(self, name: str) -> Iterator[int]:
        """Return the tokens of a name: one, or none."""
        place = bisect_left(self._sorted, (name, 0))
        while place < len(self._sorted) and self._sorted[place][0] == name:
            yield self._sorted[place][1]
            place += 1

    def _child(
        self, search: _Search, b: _Beginning, row: int, token: int, p: float, experts: Tensor | None
    ) -> _Beginning:
        """Return a beginning with one token more than that in a row; `experts` are the weights at
        the position that chose it.
        """
        name = self.names[token]
        left = b.left[len(name) :]
        begun = b.begun or (not left and name != b.left)
        # the tokens of a finished word are none of the next one's
        anew = begun and not b.begun and not b.left and search.within and name[0] in SPACES
        tokens, before = (0, None) if anew else (b.tokens, b.experts)
        own = experts if before is None or experts is None else before + experts
        letters = b.letters + (" " + name.lstrip(SPACES) if name[0] in SPACES else name)
        return _Beginning((*b.ids, token), p, left, letters, begun, tokens + 1, own, row)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([self.anchor, *ids]))[len(self.anchor_text) :]

    def _forward(
        self, adapter: Attachable, ids: Tensor, cache: Any = None, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Sequence[Tensor | None]]:
        """One pass over the prompts, or over one token more of `rows` texts that begin with each.

        Args:
            adapter: See `of`.
            ids: (prompts, rows, C).
            cache: Of what comes before them, (prompts * rows) texts.
            mask: (prompts, C) of each text of a prompt, as long as it is by now; None without
                padding.

        Returns:
            The cache behind `ids`; and of each row (V,) the next token's probabilities and (n,) the
            experts' weights at the last position.
        """
        rows, length = ids.shape[1:]
        mask = None if mask is None else mask.repeat_interleave(rows, dim=0)
        padding = (
            {}
            if mask is None
            else {
                "attention_mask": mask,
                "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -length:],
            }
        )
        record: list[Routing] = []
        with self.backbone.using(adapter, record):
            output = self.backbone.model(
                ids.flatten(0, 1),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **padding,
            )
        p = output.logits[:, -1].float().softmax(dim=-1)
        if not record:
            return output.past_key_values, p, [None] * len(p)
        weights = torch.stack([r.weights.view(len(p), length, -1)[:, -1] for r in record]).mean(
            dim=0
        )
        return output.past_key_values, p, list(weights)


def last_word(text: str) -> str:
    """Return the letters that a text ends with: "(some sock" -> "sock"."""
    size = next(
        (i for i, c in enumerate(reversed(text)) if c.isspace() or c in PUNCTUATION), len(text)
    )
    return text[len(text) - size :]


def _starts(name: str) -> bool:
    """Whether a token begins a new word, with the space before it."""
    bare = name.lstrip(SPACES)
    return bare != name and bare[:1] not in NO_LETTERS


def _continues(name: str) -> bool:
    """Whether a token goes on with a word."""
    return name != "" and name[0] not in SPACES and name[0] not in NO_LETTERS


def left_padded(prompts: Sequence[Sequence[int]], filling: int) -> tuple[Tensor, Tensor]:
    """(B, C) ids that end together, and (B, C) a mask that is 0 where there is padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[filling] * (width - len(own)) + list(own) for own in prompts])
    return ids, torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts])
