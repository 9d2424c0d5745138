"""The end of every export: what was written runs in its own program, beside the model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.core.errors import ExportError
from coterie.core.printing import printable
from coterie.data.chats import ChatBatch
from coterie.data.splits import Split
from coterie.export.asking import Asked, ask
from coterie.export.format import ClientModel, Format, Options, Runtime, Written
from coterie.export.rows import rows_of

ROWS = 16  # windows at a time
# the largest difference of logits that rounding explains, as a part of the largest logit; weights
# of fewer bits have no such limit
LIMITS = {"f32": 1e-3, "f16": 3e-2}
EXACT = ("", "f32")  # precisions of a base that are no other weights
LEAST = -80.0  # log-probabilities below are all alike: fp32 probabilities end there


@dataclass(frozen=True)
class Check:
    """How what was written does, run in its own program.

    Args:
        quantity: What was compared: logits, or log-probabilities.
        difference: The largest difference from what was expected.
        likeness: What was expected.
        by_token: The largest difference where each token was computed with the cache of those
            before; None of a program without one of its own.
        tokens: Predicted tokens of the client's test text; 0 where it is not here.
        perplexity: Of what was written, on these tokens.
        original: Of the personal model, on these tokens.
        chat: What it answers to a chat, of a model trained on chats.
    """

    quantity: str
    difference: float
    likeness: str
    by_token: float | None = None
    tokens: int = 0
    perplexity: float | None = None
    original: float | None = None
    chat: Asked | None = None

    @property
    def sentences(self) -> list[str]:
        """What the command prints of it."""
        lines = [
            f"largest difference of {self.quantity} from {self.likeness}: {self.difference:.2g}"
            + ("" if self.by_token is None else f", token by token {self.by_token:.2g}")
        ]
        if self.perplexity is not None and self.original is not None:
            change = self.perplexity / self.original - 1
            lines.append(
                f"test perplexity {self.perplexity:.2f}, of the personal model "
                f"{self.original:.2f} ({change:+.2%}), on {self.tokens:,} tokens"
            )
        return lines + ([] if self.chat is None else [self.chat.sentence])


def checked(format: Format, options: Options, client: ClientModel, written: Written) -> Check:
    """Run what was written and compare it with the model.

    Raises:
        ExportError: It cannot be run, its values are not finite, or it differs from what was
            expected by more than rounding explains, or answers a chat otherwise.
    """
    exact = options.base_precision in EXACT
    limit = LIMITS.get(options.precision, math.inf) if exact else math.inf
    try:
        with format.runtime(client, written) as runtime:
            return _measured(runtime, limit, client, written)
    except ExportError:
        raise
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ExportError(
            f"{printable(client.client)}: what was written as {format.name} does not run: "
            f"{printable(reason)}",
            "Nothing is kept. Another version of the program may read it.",
        ) from error


def _measured(runtime: Runtime, limit: float, client: ClientModel, written: Written) -> Check:
    ids = _probe(runtime, client)
    expected, computed = written.expected(ids).float(), runtime.logits(ids)
    if runtime.quantity != "logits":
        expected, computed = expected.log_softmax(-1).clamp_min(LEAST), computed.clamp_min(LEAST)
    # by most tokens: where experts are nearly as good as each other, rounding may choose another
    allowed = limit * max(1.0, float(expected.abs().max()))

    def difference(values: Tensor) -> float:
        of_tokens = (expected - values).abs().amax(dim=-1)
        largest = float(of_tokens.max())
        if not of_tokens.isfinite().all() or float(of_tokens.median()) > allowed:
            raise ExportError(
                f"{printable(client.client)}: what was written differs from {written.likeness} by "
                f"up to {largest:.2g} in its {runtime.quantity}",
                "Nothing is kept. Its program may read it in another way than it is written: "
                "report this.",
            )
        return largest

    by_token = runtime.logits_by_token(ids)
    check = Check(
        runtime.quantity,
        difference(computed),
        written.likeness,
        None if by_token is None else difference(by_token),
        chat=ask(runtime, client, written, limit) if client.serving.prompt else None,
    )
    return check if client.test is None else _scored(check, runtime, client, client.test)


def _scored(check: Check, runtime: Runtime, client: ClientModel, test: Split) -> Check:
    """Add the perplexities on the client's test text, of conversations on the answers, or on as
    much of it as the program takes.
    """
    theirs = sum(map(runtime.nll, _limited(test, runtime)))
    ours, tokens = client.model.language.score(_limited(test, runtime)).tolist()
    if not tokens:  # no answer begins within what the program takes
        return check
    return replace(
        check,
        tokens=int(tokens),
        perplexity=math.exp(theirs / tokens),
        original=math.exp(ours / tokens),
    )


def _limited(split: Split, runtime: Runtime) -> Iterator[ChatBatch]:
    """Yield the rows of a text in order, as many and as long as a program takes, at least one
    batch.
    """
    rows = max(1, min(ROWS, runtime.most_tokens // split.context))
    tokens = 0
    for batch in split.scoring(rows):
        taken = rows_of(batch, runtime.longest and runtime.longest + 1)
        yield taken
        tokens += taken.predictions
        if tokens + rows * split.context > runtime.most_tokens:
            return


def _probe(runtime: Runtime, client: ClientModel) -> Tensor:
    """(B, C) the beginning of the client's test text, or else tokens by chance."""
    rows, tokens = runtime.probe
    tokens = min(tokens, runtime.longest or client.model.backbone.context_limit)
    if client.test is not None:
        return rows_of(next(iter(client.test.scoring(rows))), tokens).ids
    generator = torch.Generator().manual_seed(0)
    vocabulary = client.model.backbone.architecture.vocabulary
    return torch.randint(vocabulary, (rows, tokens), generator=generator)
