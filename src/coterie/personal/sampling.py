"""Choice of the next token of a text, greedy or sampled, and its log-probability."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.core.errors import ModelError

COLDEST = 1e-6  # the least temperature: single precision cannot divide by much less
NUCLEUS = 256  # most likely tokens that are sorted before the whole vocabulary is


@dataclass(frozen=True)
class Sampling:
    """The settings of one text, as in OpenAI's completions.

    Args:
        temperature: Divides the logits; 0: always the most likely token.
        top_p: Only the most likely tokens whose probabilities reach this sum are sampled (nucleus
            sampling, Holtzman et al. 2020).
        presence_penalty: Subtracted from the logit of every token that was generated.
        frequency_penalty: Likewise, for each time that it was.
        bias: Added to the logits of tokens.
        logprobs: How many of the most likely tokens are reported with each token; None: no
            log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the choice."""
        return bool(self.presence_penalty or self.frequency_penalty or self.bias)


@dataclass(frozen=True)
class Token:
    """A token of a text.

    Args:
        id: In the vocabulary.
        logprob: Its log-probability by the model, at temperature 1 and without penalties; None
            where it was not asked for, or the token is the first of a text.
        top: The most likely tokens in its place and their log-probabilities, best first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: Tensor,
    settings: Sequence[Sampling],
    generated: Sequence[Counter[int]],
    generators: Sequence[torch.Generator],
) -> list[Token]:
    """Choose the next token of each row.

    Args:
        logits: (B, V).
        settings: Of each row.
        generated: How often each row has generated each token.
        generators: The random numbers of each row, on the CPU: what is drawn for a row does not
            depend on the others.
    """
    logits = logits.float()
    ids = logits.argmax(dim=-1).tolist()
    for row, row_settings in enumerate(settings):
        if row_settings.temperature > 0 or row_settings.changes_logits:
            ids[row] = _choose(logits[row], row_settings, generated[row], generators[row])
    tokens: list[Token] = []
    for row, (token, row_settings) in enumerate(zip(ids, settings, strict=True)):
        tokens += scored(logits[row : row + 1], [token], row_settings.logprobs)
    return tokens


def usable(logits: Tensor) -> Tensor:
    """Return (B,) whether a token can be chosen by (B, V) logits: none is NaN, and the greatest is
    finite.
    """
    return logits.amax(dim=-1).isfinite()


def check_temperature(temperature: float | None) -> None:
    """Refuse what scores in single precision cannot be divided by. Raises ModelError."""
    if temperature is not None and not COLDEST <= temperature <= 1 / COLDEST:
        raise ModelError(
            f"the temperature is {temperature:g}",
            f"Use one from {COLDEST:g} to {1 / COLDEST:g}, or the most likely token (0).",
        )


def not_usable(whose: str) -> ModelError:
    """Return the refusal of scores that are not `usable`."""
    return ModelError(
        f"{whose} computes scores that are not finite",
        "Its values or those of its base are too large: take an earlier copy, or train it again.",
    )


def scored(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[Token]:
    """Return tokens with their log-probabilities, and those of the `count` most likely ones.

    Args:
        logits: (n, V) in their places.
        tokens: Their ids.
        count: None: without log-probabilities.
    """
    if count is None:
        return [Token(token) for token in tokens]
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    token_logprobs = logprobs.gather(1, chosen)[:, 0].tolist()
    values, ids = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        Token(token, logprob, tuple(zip(*best, strict=True)))
        for token, logprob, best in zip(tokens, token_logprobs, top, strict=True)
    ]


def _choose(
    logits: Tensor, settings: Sampling, generated: Counter[int], generator: torch.Generator
) -> int:
    """Return the id that is chosen by (V,) logits of a row."""
    if settings.changes_logits:
        logits = _changed(logits, settings, generated)
    if settings.temperature == 0:
        return int(logits.argmax())
    p = ((logits - logits.max()) / max(settings.temperature, COLDEST)).softmax(dim=-1)
    if settings.top_p >= 1:
        return _drawn(p, generator)
    values, ids = _nucleus(p, settings.top_p)
    return int(ids[_drawn(values, generator)])


def _changed(logits: Tensor, settings: Sampling, generated: Counter[int]) -> Tensor:
    """Return logits with penalties and biases."""
    changes = dict(settings.bias)
    for token, count in generated.items():
        penalty = settings.presence_penalty + count * settings.frequency_penalty
        changes[token] = changes.get(token, 0.0) - penalty
    ids = torch.tensor(list(changes), dtype=torch.int64, device=logits.device)
    values = torch.tensor(list(changes.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, ids, values)


def _nucleus(p: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids of the most likely tokens, as few as reach the sum `top_p`."""
    values, ids = p.topk(min(NUCLEUS, len(p)))
    if values.sum() < top_p:
        values, ids = p.sort(descending=True)
    before = values.cumsum(dim=0) - values
    kept = before < top_p
    kept[0] = True
    return values[kept], ids[kept]


def _drawn(p: Tensor, generator: torch.Generator) -> int:
    """Return a place, drawn in proportion to p (n,): the inverse of the distribution function at a
    uniform number.
    """
    sums = p.double().cumsum(dim=0)
    threshold = torch.rand((), generator=generator, dtype=torch.float64).to(p.device) * sums[-1]
    return min(int(torch.searchsorted(sums, threshold, right=True)), len(p) - 1)
