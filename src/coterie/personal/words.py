"""The next *words* of a text with their probabilities, though the model only knows tokens.

The probability of a word is that of its tokens, times the probability that a new word begins after them (white space, punctuation or
the end): without the last factor "h" would always beat "hiking". Several ways to spell a word in tokens are added up, as far as the
search meets them: it goes token by token over the likeliest beginnings of those that may still be among the best. Punctuation alone is
no word, so the probabilities need not add up to 1.
"""

import copy
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.models.backbone import Attachable, Backbone
from coterie.models.routing import Routing

LONGEST = 8  # tokens of a word
BEAM = 16  # beginnings that are looked into at once, at least
SPACES = "Ġ▁Ċĉč"  # a space as byte-level and SentencePiece vocabularies write it, then newline, tab, carriage return
# "'" is part of words; the last are the control characters as byte-level vocabularies write them
NO_LETTERS = (frozenset(string.punctuation) - {"'"}) | {chr(256 + i) for i in range(34)} - set(SPACES)


@dataclass(frozen=True)
class Word:
    """A suggestion.

    Args:
        word: The whole word, also where its first letters are already in the text.
        insert: What is to be appended to the text: the rest of the word, with a space before it if it needs one.
        probability: That it is the next word.
        experts: (n,) the weight of each expert where the word's tokens were chosen, the mean over these tokens and over all blocks; they
            add up to 1. Empty without a router.
    """

    word: str
    insert: str
    probability: float
    experts: tuple[float, ...]


@dataclass(frozen=True)
class _Beginning:
    """The first tokens of a word."""

    ids: tuple[int, ...]
    p: float
    experts: Tensor | None  # (n,) summed over the positions that chose `ids`


class _Search:
    """What is found so far for one text.

    Args:
        text: What was written so far.
        k: How many words are wanted at most.
    """

    def __init__(self, text: str, k: int) -> None:
        self.text, self.head, self.k = text, text.rstrip(), k
        self.beam = max(BEAM, 2 * k)
        self.level: list[_Beginning] = []
        self.found: dict[str, tuple[float, Tensor | None, int]] = {}

    def prune(self) -> int:
        """Keep the beginnings that may still be among the best words. Returns how many."""
        least = sorted((p for p, _, _ in self.found.values()), reverse=True)[self.k - 1] if len(self.found) >= self.k else 0.0
        self.level = [b for b in self.level if b.p > least][: self.beam]
        return len(self.level)

    def ids(self, rows: int, filling: list[int]) -> list[list[int]]:
        """The beginnings' tokens, and up to so many rows something else."""
        return [list(b.ids) for b in self.level] + [filling] * (rows - len(self.level))


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
        ends = [i in special or not name for i, name in enumerate(names)]
        spaced = [not end and name[0] in SPACES for end, name in zip(ends, names, strict=True)]
        inside = [not end and name[0] not in SPACES and name[0] not in NO_LETTERS for end, name in zip(ends, names, strict=True)]
        bare = [name.lstrip(SPACES) if space else "" for space, name in zip(spaced, names, strict=True)]
        device = backbone.device
        self.starts = torch.tensor([s and b[:1] not in NO_LETTERS for s, b in zip(spaced, bare, strict=True)], device=device)
        self.inside = torch.tensor(inside, device=device)
        # put before what is decoded, since tokenizers may swallow its first space
        self.anchor: int = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self.anchor_text: str = self.tokenizer.decode([self.anchor])

    @torch.no_grad()
    def of(self, adapter: Attachable, texts: Sequence[str], k: int) -> list[list[Word]]:
        """The k most likely next words of each text, best first. All are searched in one batch.

        Args:
            adapter: Of one model, or of many, each for one text: every text has as many rows as the others, in the order of the texts.
            texts: What was written so far.
            k: How many words at most.
        """
        searches = [_Search(text, k) for text in texts]
        prompts, present = left_padded([self._prompt(search.head) for search in searches], self.anchor)
        mask = None if present.all() else present.to(self.backbone.device)
        with self.backbone.using(adapter):
            cache, p, experts = self._forward(adapter, prompts[:, None].to(self.backbone.device), mask=mask)
            for search, of_prompt, e in zip(searches, p, experts, strict=True):
                search.level = _best([_Beginning((), 1.0, None)], (of_prompt * self._allowed(search))[None], [e], search.beam)
            for length in range(1, LONGEST + 1):
                if not (rows := max(search.prune() for search in searches)):
                    break
                ids = torch.tensor([search.ids(rows, [self.anchor] * length) for search in searches], device=self.backbone.device)
                _, p, experts = self._forward(adapter, ids, cache, mask)
                for first, search in zip(range(0, len(p), rows), searches, strict=True):
                    own = slice(first, first + len(search.level))
                    self._go_on(search, p[own], experts[own])
        return [self._best_words(search) for search in searches]

    def _allowed(self, search: "_Search") -> Tensor:
        """(V,) what may follow the text: after a space a new word begins."""
        if search.head == search.text:
            return self.starts | self.inside
        return self.starts if search.head else self.starts | self.inside

    def _go_on(self, search: "_Search", p: Tensor, experts: Sequence[Tensor | None]) -> None:
        """Note the words that end, and go on with the others: p (beginnings, V) of the next token of each."""
        goes_on = p * self.inside
        ended = 1 - goes_on.sum(dim=-1)
        for b, end in zip(search.level, ended.tolist(), strict=True):
            self._note(search.found, b, b.p * max(end, 0.0))
        search.level = _best(search.level, goes_on, experts, search.beam) if search.level else []

    def _best_words(self, search: "_Search") -> list[Word]:
        best = sorted(search.found.items(), key=lambda item: -item[1][0])[: search.k]
        return [self._word(search.text, search.head, piece, *values) for piece, values in best]

    def _prompt(self, head: str) -> list[int]:
        """The ids of the text, or its end; of no text, the token that begins or ends documents."""
        ids: list[int] = self.tokenizer(head)["input_ids"] if head else []
        ids = ids[-(self.backbone.context_limit - LONGEST) :]
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        return ids or [first or 0]

    def _forward(
        self, adapter: Attachable, ids: Tensor, cache: Any = None, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Sequence[Tensor | None]]:
        """One pass over `rows` pieces of text behind each cached prompt, or over the prompts.

        Args:
            adapter: See `of`.
            ids: (prompts, rows, C).
            cache: Of the prompts, which stays as it is.
            mask: (prompts, C) of the prompts; None without padding.

        Returns:
            The cache behind `ids`; and of each row (V,) the next token's probabilities and (n,) the experts' weights at the last position.
        """
        prompts, rows, length = ids.shape
        if cache is not None:
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(rows)
            mask = None if mask is None else torch.cat([mask, mask.new_ones(prompts, length)], dim=1).repeat_interleave(rows, dim=0)
        padding = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -length:]}
        record: list[Routing] = []
        with self.backbone.using(adapter, record):
            output = self.backbone.model(ids.flatten(0, 1), past_key_values=cache, use_cache=True, logits_to_keep=1, **padding)
        p = output.logits[:, -1].float().softmax(dim=-1)
        if not record:
            return output.past_key_values, p, [None] * len(p)
        weights = torch.stack([r.weights.view(len(p), length, -1)[:, -1] for r in record]).mean(dim=0)
        return output.past_key_values, p, list(weights)

    def _note(self, found: dict[str, tuple[float, Tensor | None, int]], beginning: _Beginning, p: float) -> None:
        """Add a complete word, or another spelling of one."""
        piece: str = self.tokenizer.decode([self.anchor, *beginning.ids])[len(self.anchor_text) :]
        if not any(c.isalnum() for c in piece) or "\ufffd" in piece:
            return
        piece = " " + piece.strip() if piece[0].isspace() else piece.strip()
        before, experts, tokens = found.get(piece, (0.0, beginning.experts, len(beginning.ids)))
        found[piece] = (before + p, experts, tokens)

    def _word(self, text: str, head: str, piece: str, p: float, experts: Tensor | None, tokens: int) -> Word:
        weights = () if experts is None else tuple((experts / tokens).tolist())
        if piece.startswith(" "):
            return Word(piece[1:], piece if head == text and head else piece[1:], p, weights)
        letters = len(head) - len(head.rstrip(string.ascii_letters + string.digits + "'"))
        return Word(head[len(head) - letters :] + piece, piece, p, weights)


def _best(level: Sequence[_Beginning], p: Tensor, experts: Sequence[Tensor | None], beam: int) -> list[_Beginning]:
    """The likeliest beginnings that are one token longer; p (B, V) of the next token of each, 0 where it is not allowed."""
    own = torch.tensor([b.p for b in level], device=p.device)
    top, ids = (p * own[:, None]).topk(min(beam, p.shape[1]), dim=-1)
    longer = [
        _Beginning((*b.ids, token), value, e if b.experts is None or e is None else b.experts + e)
        for b, e, values, tokens in zip(level, experts, top.tolist(), ids.tolist(), strict=True)
        for value, token in zip(values, tokens, strict=True)
        if value > 0
    ]
    return sorted(longer, key=lambda b: -b.p)


def left_padded(prompts: Sequence[Sequence[int]], filling: int) -> tuple[Tensor, Tensor]:
    """(B, C) ids that end together, and (B, C) a mask that is 0 where there is padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[filling] * (width - len(own)) + list(own) for own in prompts])
    return ids, torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts])
