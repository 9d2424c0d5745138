"""The choice of a text's next token, greedy or sampled, and its log-probability."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.core.errors import ModelError

COLDEST = 1e-6  # the lowest temperature: single precision cannot divide by much less
NUCLEUS = 256  # most likely tokens that are tried before the whole vocabulary is sorted


@dataclass(frozen=True)
class Sampling:
    """The settings of one text, as in OpenAI's completions."""

    temperature: float = 1.0  # the divisor of the logits; 0: always the most likely token
    # the sum of probabilities up to which the most likely tokens are sampled (nucleus sampling,
    # Holtzman et al. 2020)
    top_p: float = 1.0
    top_k: int = 0  # the number of the most likely tokens that are sampled; 0: all
    presence_penalty: float = 0.0  # subtracted from the logit of every token generated before
    frequency_penalty: float = 0.0  # the same for each time that it was generated
    bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits, by token id
    # most likely tokens that are reported with each token; None: no log-probabilities
    logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.bias)


@dataclass(frozen=True)
class Token:
    """A token of a text."""

    id: int
    # by the model, at temperature 1 and without penalties; None if it was not requested, or for the
    # first token of a text
    logprob: float | None = None
    # the most likely tokens in its place and their log-probabilities, best first
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: Tensor,
    settings: Sequence[Sampling],
    generated: Sequence[Counter[int]],
    generators: Sequence[torch.Generator],
) -> list[Token]:
    """Choose the next token of each row by (B, V) logits and how often a row has generated each
    token. Each row has a generator, on the CPU, so that its tokens do not depend on other rows.
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
    """Return (B,) whether (B, V) logits can choose a token: none NaN, and a finite maximum."""
    return logits.amax(dim=-1).isfinite()


def check_temperature(temperature: float | None) -> None:
    """Refuse a temperature outside the range of single precision. Raises ModelError."""
    if temperature is not None and not COLDEST <= temperature <= 1 / COLDEST:
        remedy = f"Use one from {COLDEST:g} to {1 / COLDEST:g}, or the most likely token (0)."
        raise ModelError(f"the temperature is {temperature:g}", remedy)


def not_usable(whose: str) -> ModelError:
    """Return the error for scores that are not `usable`."""
    return ModelError(
        f"{whose} computes scores that are not finite",
        "Its values or those of its base are too large: take an earlier copy, or train it again.",
    )


def scored(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[Token]:
    """Return tokens that (n, V) logits chose, with their log-probabilities and those of the `count`
    most likely tokens; None: no log-probabilities at all.
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
    """Choose a token id by the (V,) logits of a row."""
    if settings.changes_logits:
        logits = _penalised(logits, settings, generated)
    if settings.temperature == 0:
        return int(logits.argmax())
    p = ((logits - logits.max()) / max(settings.temperature, COLDEST)).softmax(dim=-1)
    if settings.top_k:
        top = p.topk(min(settings.top_k, len(p)))  # k of them, though more may be as likely
        p = torch.zeros_like(p).scatter_(0, top.indices, top.values)
        p = p / p.sum()
    if settings.top_p >= 1:
        return _draw(p, generator)
    values, ids = _nucleus(p, settings.top_p)
    return int(ids[_draw(values, generator)])


def _penalised(logits: Tensor, settings: Sampling, generated: Counter[int]) -> Tensor:
    """Return the logits with penalties and biases applied."""
    changes = dict(settings.bias)
    for token, count in generated.items():
        penalty = settings.presence_penalty + count * settings.frequency_penalty
        changes[token] = changes.get(token, 0.0) - penalty
    ids = torch.tensor(list(changes), dtype=torch.int64, device=logits.device)
    values = torch.tensor(list(changes.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, ids, values)


def _nucleus(p: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids of the fewest most likely tokens whose sum reaches `top_p`."""
    values, ids = p.topk(min(NUCLEUS, len(p)))
    if values.sum() < top_p:
        values, ids = p.sort(descending=True)
    before = values.cumsum(dim=0) - values
    kept = before < top_p
    kept[0] = True
    return values[kept], ids[kept]


def _draw(p: Tensor, generator: torch.Generator) -> int:
    """Draw an index in proportion to p (n,), by inverting the cumulative distribution."""
    sums = p.double().cumsum(dim=0)
    threshold = torch.rand((), generator=generator, dtype=torch.float64).to(p.device) * sums[-1]
    return min(int(torch.searchsorted(sums, threshold, right=True)), len(p) - 1)
