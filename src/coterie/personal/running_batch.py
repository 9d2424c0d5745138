"""Continuous batching (Orca, Yu et al. 2022): texts of many personal models in one running batch. A
new text joins between two tokens of the others, and a finished one leaves at once. Prompts of new
texts are computed apart, in parts: they delay the others by at most one part for each token.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from coterie.core.errors import ModelError
from coterie.core.isolation import inference
from coterie.personal.inference.stacks import RowCache
from coterie.personal.loading import ManyModels
from coterie.personal.sampling import Sampling, Token, choose, not_usable, scored, usable
from coterie.personal.text_inference import left_padded

ROWS = 16  # texts that are continued at once
PART = 512  # tokens of prompts that are computed between two tokens of the running texts
SCORED_PART = 128  # the same for scored prompts, all of whose tokens have logits
# 2^64 / the golden ratio, which makes the seeds of neighbouring choices differ widely
_GOLDEN = 0x9E3779B97F4A7C15

Finish = Literal["stop", "length"]


@dataclass(eq=False)
class Continuation:
    """A prompt that a client's model is to continue."""

    client: str
    prompt: Sequence[int]  # at least one token
    most: int  # tokens to generate; 0: the prompt is only scored
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0  # 64 bits
    choices: int = 1  # texts to generate, each with its own random numbers
    ends: frozenset[int] = frozenset()  # tokens that end a text
    scores_prompt: bool = False  # whether the prompt's own tokens get log-probabilities
    text: str = ""  # the prompt, if the client has written it as text
    # the prompt's tokens with their log-probabilities, as far as they are computed
    scored: list[Token] = field(default_factory=list)
    weights: Tensor | None = None  # of the model's parts, as they were when the text joined


@dataclass(frozen=True)
class Progress:
    """A new token of a text, or the end of a text without tokens."""

    of: Continuation
    choice: int  # the number of the text among its choices
    token: Token | None  # None if the prompt was only scored
    finish: Finish | None  # "stop" after a token that ends texts, "length" after the last allowed
    error: ModelError | None = None  # why the text cannot go on


class _Row:
    """A text that is being generated."""

    def __init__(self, of: Continuation, choice: int) -> None:
        self.of, self.choice = of, choice
        self.generator = torch.Generator()
        self.generator.manual_seed((of.seed + choice * _GOLDEN) % 2**64)
        self.generated: Counter[int] = Counter()
        self.last = 0
        self.over = False

    def take(self, token: Token) -> Progress:
        """Add a token to the text."""
        self.last = token.id
        self.generated[token.id] += 1
        finish: Finish | None = None
        if token.id in self.of.ends:
            finish = "stop"
        elif self.generated.total() >= self.of.most:
            finish = "length"
        self.over = finish is not None
        return Progress(self.of, self.choice, token, finish)

    def fail(self) -> Progress:
        """End the text of a model whose scores are not finite."""
        self.over = True
        error = not_usable(f"the model of {self.of.client!r}")
        return Progress(self.of, self.choice, None, None, error)


class _Prompts:
    """A batch of prompts that are computed together, part by part."""

    def __init__(self, all_of: Sequence[Continuation]) -> None:
        self.all_of = list(all_of)
        self.ids, self.mask = left_padded([one.prompt for one in all_of], 0)
        self.cache = DynamicCache()
        self.done = 0  # columns
        self.unwanted: set[Continuation] = set()  # removed during the computation
        self.scores = any(one.scores_prompt for one in all_of)
        for one in all_of:
            one.scored = [Token(one.prompt[0])] if one.scores_prompt else []

    def advance(self, models: ManyModels) -> Tensor | None:
        """Compute one more part; after the last one, return (B, V) the logits after the prompts."""
        rows, width = self.ids.shape
        begin = self.done
        self.done = min(begin + max((SCORED_PART if self.scores else PART) // rows, 1), width)
        padding = {}
        if not self.mask.all():
            positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
            padding = {
                "attention_mask": self.mask[:, : self.done],
                "position_ids": positions[:, begin : self.done],
            }
        logits = models(
            self.ids[:, begin : self.done],
            [one.client for one in self.all_of],
            [one.weights for one in self.all_of],
            use_cache=True,
            logits_to_keep=0 if self.scores else 1,
            **{models.backbone.cache_name: self.cache},
            **padding,
        ).logits
        if self.scores:
            self._score(logits, begin)
        return cast(Tensor, logits[:, -1]) if self.done == width else None

    def _score(self, logits: Tensor, begin: int) -> None:
        """Score the next token at each column of a part by its logits, (B, t, V) from `begin`."""
        width = self.ids.shape[1]
        for row, one in enumerate(self.all_of):
            first = max(begin, width - len(one.prompt))
            last = min(self.done, width - 1)
            if one.scores_prompt and first < last:
                tokens = self.ids[row, first + 1 : last + 1].tolist()
                row_logits = logits[row, first - begin : last - begin]
                one.scored += scored(row_logits, tokens, one.sampling.logprobs or 0)


class RunningBatch:
    """Texts of many models that are continued together, at most `rows` of them, token by token."""

    def __init__(self, models: ManyModels, rows: int = ROWS) -> None:
        self.models, self.most = models, rows
        self.waiting: deque[Continuation] = deque()
        self._prompts: _Prompts | None = None
        self._rows: list[_Row] = []
        self._cache = RowCache(len(models.backbone.architecture.blocks), models.parts)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self._prompts or self._rows)

    def add(self, continuation: Continuation) -> None:
        """Queue a prompt until it can join. The prompt and the tokens to generate must fit the
        base's context, and it must not have more choices than the batch has rows.
        """
        self.waiting.append(continuation)

    def remove(self, continuation: Continuation, choice: int | None = None) -> None:
        """Stop a text of a continuation, or all of them. Finished texts are ignored."""
        if choice is None and continuation in self.waiting:
            self.waiting.remove(continuation)
        for row in self._rows:
            if row.of is continuation and choice in (None, row.choice):
                row.over = True
        if self._prompts is not None and choice is None:
            self._prompts.unwanted.add(continuation)
            if self._prompts.unwanted.issuperset(self._prompts.all_of):
                self._prompts = None

    @inference()
    def step(self) -> list[Progress]:
        """Compute a part of the waiting prompts, and the next token of every running text. A text
        that joined in the same step may get one more token after `remove`.
        """
        joining, generated = self._join()
        self._settle(joining)
        if self._rows:
            generated += self._next_tokens()
        return generated

    def _join(self) -> tuple[list[tuple[_Row, int, DynamicCache]], list[Progress]]:
        """Compute a part of the current prompts, or of the next waiting ones. Return the texts that
        go on after their first token, each with its row in a cache; and the generated tokens.
        """
        self._prompts = self._prompts or self._admitted()
        if self._prompts is None:
            return [], []
        prompts = self._prompts
        logits = prompts.advance(self.models)
        if logits is None:
            return [], []
        self._prompts = None
        remaining = [(i, c) for i, c in enumerate(prompts.all_of) if c not in prompts.unwanted]
        rows = [
            (_Row(one, choice), place)
            for place, one in remaining
            for choice in range(one.choices if one.most else 0)
        ]
        generated = [
            Progress(one, choice, None, "length")
            for _, one in remaining
            for choice in range(0 if one.most else one.choices)
        ]
        if rows:
            generated += self._take([row for row, _ in rows], logits[[place for _, place in rows]])
        return [(row, place, prompts.cache) for row, place in rows if not row.over], generated

    def _admitted(self) -> _Prompts | None:
        """Return the next waiting prompts: as many as there are free rows, and as fit one part."""
        free = self.most - sum(not row.over for row in self._rows)
        chosen: list[Continuation] = []
        width = 0
        while self.waiting and (one := self.waiting[0]).choices <= free:
            width = max(width, len(one.prompt))
            if chosen and width * (len(chosen) + 1) > PART:
                break
            one.weights = self.models.weights_of(one.client)
            chosen.append(self.waiting.popleft())
            free -= one.choices
        return _Prompts(chosen) if chosen else None

    def _settle(self, joining: Sequence[tuple[_Row, int, DynamicCache]]) -> None:
        """Put new texts into finished texts' rows or into new ones, and close the gaps left."""
        gaps = [place for place, row in enumerate(self._rows) if row.over]
        for row, source, cache in joining:
            place = gaps.pop(0) if gaps else len(self._rows)
            self._rows[place : place + 1] = [row]
            self._cache.put(place, cache, source, len(row.of.prompt))
        for place in reversed(gaps):
            self._cache.drop(place)
            self._rows[place] = self._rows[-1]
            self._rows.pop()

    def _next_tokens(self) -> list[Progress]:
        mask, positions = self._cache.reserve()
        padding = {} if mask.all() else {"attention_mask": mask}
        logits = self.models(
            torch.tensor([[row.last] for row in self._rows]),
            [row.of.client for row in self._rows],
            [row.of.weights for row in self._rows],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.models.backbone.cache_name: self._cache},
            **padding,
        ).logits[:, -1]
        self._cache.advance()
        return self._take(self._rows, logits)

    def _take(self, rows: Sequence[_Row], logits: Tensor) -> list[Progress]:
        """Choose the next token of each row by (B, V) logits."""
        tokens = choose(
            logits,
            [row.of.sampling for row in rows],
            [row.generated for row in rows],
            [row.generator for row in rows],
        )
        return [
            row.take(token) if can_go_on else row.fail()
            for row, token, can_go_on in zip(rows, tokens, usable(logits).tolist(), strict=True)
        ]
