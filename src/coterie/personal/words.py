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
    def next(self, adapter: Attachable, text: str, k: int) -> list[Word]:
        """The k most likely next words of `text` for one adapter, best first."""
        head = text.rstrip()
        prompt = self._prompt(head)
        with self.backbone.using(adapter):
            output, experts = self._forward(adapter, prompt, None)
            cache = output.past_key_values
            p = output.logits[0, -1].float().softmax(dim=-1)
            may_go_on = head == text  # after a space a new word begins
            allowed = self.starts | self.inside if may_go_on else self.starts if head else self.starts | self.inside
            beam = max(BEAM, 2 * k)
            level = _best([_Beginning((), 1.0, None)], (p * allowed)[None], [experts[0] if experts is not None else None], beam)
            found: dict[str, tuple[float, Tensor | None, int]] = {}
            for _ in range(LONGEST):
                level = [b for b in level if b.p > _kth(found, k)][:beam]
                if not level:
                    break
                ids = torch.tensor([b.ids for b in level], device=self.backbone.device)
                output, experts = self._forward(adapter, ids, cache)
                p = output.logits[:, -1].float().softmax(dim=-1)
                goes_on = p * self.inside
                ended = 1 - goes_on.sum(dim=-1)
                for b, end in zip(level, ended.tolist(), strict=True):
                    self._note(found, b, b.p * max(end, 0.0))
                level = _best(level, goes_on, list(experts) if experts is not None else [None] * len(level), beam)
        best = sorted(found.items(), key=lambda item: -item[1][0])[:k]
        return [self._word(text, head, piece, *values) for piece, values in best]

    def _prompt(self, head: str) -> Tensor:
        """(1, C) the ids of the text, or its end; of no text, the token that begins or ends documents."""
        ids: list[int] = self.tokenizer(head)["input_ids"] if head else []
        ids = ids[-(self.backbone.context_limit - LONGEST) :]
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        return torch.tensor([ids or [first or 0]], device=self.backbone.device)

    def _forward(self, adapter: Attachable, ids: Tensor, cache: Any) -> tuple[Any, Tensor | None]:
        """(B, C) after the cached prompt -> the base's output, and (B, n) the experts' weights at the last position."""
        if cache is not None:
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(len(ids))
        record: list[Routing] = []
        with self.backbone.using(adapter, record):
            output = self.backbone.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if not record:
            return output, None
        return output, torch.stack([r.weights.view(*ids.shape, -1)[:, -1] for r in record]).mean(dim=0)

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


def _kth(found: dict[str, tuple[float, Tensor | None, int]], k: int) -> float:
    """The probability that a word must exceed to be among the k best found so far."""
    return sorted((p for p, _, _ in found.values()), reverse=True)[k - 1] if len(found) >= k else 0.0
