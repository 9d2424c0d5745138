"""The check of every export: its files run in their own program and give the model's results."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.core.errors import ExportError
from coterie.core.printing import printable
from coterie.data.chats import ChatBatch
from coterie.data.splits import Split
from coterie.export.format import QUESTION, ClientModel, Format, Options, Runtime, Written, rows_of

ROWS = 16  # windows in a batch
# The largest difference of logits that rounding explains, relative to the largest logit. Quantised
# weights have no such limit.
LIMITS = {"f32": 1e-3, "f16": 3e-2}
EXACT = ("", "f32")  # precisions of a base that do not quantise its weights
# Smaller log-probabilities are raised to this before they are compared: fp32 ends there.
LEAST = -80.0
MOST = 32  # the most tokens of an answer


@dataclass(frozen=True)
class ChatAnswer:
    """A question to a chat model and its program's answer."""

    question: str
    answer: str | None = None  # without special tokens; None if the question was not asked
    tokens: int = 0  # of the answer, including the one that ends it
    # whether a stop token ended the answer; otherwise it reached the most tokens
    ended: bool = False

    @property
    def sentence(self) -> str:
        """The sentence that the command prints."""
        if self.answer is None:
            return "no chat was asked: the question leaves no room for an answer"
        how = "ended by its stop token" if self.ended else "cut off there"
        return (
            f"asked {self.question!r}, it answers as coterie does: "
            f"{printable(self.answer)[:60]!r} ({self.tokens} tokens, {how})"
        )


@dataclass(frozen=True)
class Check:
    """The results of an exported model, run in its own program."""

    quantity: str  # what was compared: logits, or log-probabilities
    difference: float  # the largest from the expected values
    likeness: str  # the name of the model that gave the expected values
    # the same with the cache of earlier tokens; None for a program without a cache
    by_token: float | None = None
    tokens: int = 0  # of the client's test text, predicted; 0 if that text is absent
    perplexity: float | None = None  # of the exported model on these tokens
    original: float | None = None  # the perplexity of the personal model
    chat: ChatAnswer | None = None

    @property
    def sentences(self) -> list[str]:
        """The sentences that the command prints."""
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
    """Run an exported model and compare it with the personal model. Raises ExportError if it cannot
    run, its values differ by more than rounding explains, or it answers a chat differently.
    """
    exact = options.base_precision in EXACT
    limit = LIMITS.get(options.precision, math.inf) if exact else math.inf
    try:
        with format.runtime(client, written) as runtime:
            return _compare(runtime, limit, client, written)
    except ExportError:
        raise
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ExportError(
            f"{printable(client.client)}: what was written as {format.name} does not run: "
            f"{printable(reason)}",
            "Nothing is kept. Another version of the program may read it.",
        ) from error


def _compare(runtime: Runtime, limit: float, client: ClientModel, written: Written) -> Check:
    ids = _probe(runtime, client)
    expected, computed = written.expected(ids).float(), runtime.logits(ids)
    if runtime.quantity != "logits":
        expected, computed = expected.log_softmax(-1).clamp_min(LEAST), computed.clamp_min(LEAST)
    # The median over tokens is limited: if two experts have nearly equal logits, rounding may
    # choose the other one for a few tokens.
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
    by_step = None if by_token is None else difference(by_token)
    chat = ask(runtime, client, written, limit) if client.serving.prompt else None
    check = Check(runtime.quantity, difference(computed), written.likeness, by_step, chat=chat)
    return check if client.test is None else _scored(check, runtime, client, client.test)


def _scored(check: Check, runtime: Runtime, client: ClientModel, test: Split) -> Check:
    """Add perplexities on the test text (of chats on the answers) that the program can take."""
    exported_nll = sum(map(runtime.nll, _limited(test, runtime)))
    model_nll, tokens = (client.mixture or client.model).score(_limited(test, runtime))
    # no answer begins within the tokens that the program can take
    if not tokens:
        return check
    perplexity = math.exp(exported_nll / tokens)
    original = math.exp(model_nll / tokens)
    return replace(check, tokens=tokens, perplexity=perplexity, original=original)


def _limited(split: Split, runtime: Runtime) -> Iterator[ChatBatch]:
    """Yield rows of a text in order, as many and as long as a program takes, at least a batch."""
    rows = max(1, min(ROWS, runtime.most_tokens // split.context))
    tokens = 0
    for batch in split.scoring(rows):
        taken = rows_of(batch, runtime.window)
        yield taken
        tokens += taken.predictions
        if tokens + rows * split.context > runtime.most_tokens:
            return


def _probe(runtime: Runtime, client: ClientModel) -> Tensor:
    """Return (B, C) the beginning of the client's test text, or random tokens without one."""
    rows, tokens = runtime.probe
    # a server keeps one token of its window for the answer
    most = client.model.backbone.context_limit if runtime.window is None else runtime.window - 1
    tokens = min(tokens, most)
    if client.test is not None:
        return rows_of(next(iter(client.test.scoring(rows))), tokens).ids
    generator = torch.Generator().manual_seed(0)
    vocabulary = client.model.backbone.architecture.vocabulary
    return torch.randint(vocabulary, (rows, tokens), generator=generator)


def ask(runtime: Runtime, client: ClientModel, written: Written, limit: float) -> ChatAnswer:
    """Ask an exported model a question in its own program, and check the answer. `limit` is as in
    LIMITS; infinite for quantised weights. Raises ExportError if the program writes the chat with
    other tokens, ends answers at other tokens, or gives another answer.
    """
    serving, question = client.serving, QUESTION[0]["content"]
    prompt = list(serving.prompt)
    if runtime.chat_ids(written.folder, QUESTION) != prompt:
        raise _error(client, "writes a chat with other tokens than the model was trained with")
    if missing := set(serving.stops) - runtime.ending(prompt, serving.stops):
        tokens = ", ".join(map(str, client.model.tokenizer.convert_ids_to_tokens(sorted(missing))))
        raise _error(client, f"does not end an answer at {tokens}")
    window = min(client.model.backbone.context_limit, runtime.window or len(prompt) + MOST)
    if (most := min(MOST, window - len(prompt))) < 1:
        return ChatAnswer(question)
    answer, ended = runtime.answer(prompt, most)
    ends = [token in serving.stops for token in answer]
    if any(ends[:-1]) or ends[-1] != ended:
        raise _error(client, "ends an answer at another token than coterie")
    if _regret(prompt, answer, written) > 2 * limit:
        raise _error(client, "answers a chat otherwise than coterie")
    text = client.model.tokenizer.decode(answer, skip_special_tokens=True).strip()
    return ChatAnswer(question, text, len(answer), ended)


def _regret(prompt: list[int], answer: list[int], written: Written) -> float:
    """Return how far the logits of an answer's tokens are below the largest expected logits: the
    median over the tokens, relative to the largest logit.
    """
    logits = written.expected(torch.tensor([prompt + answer])).float()[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    regret = float((logits.amax(dim=-1) - chosen).median())
    return regret / max(1.0, float(logits.abs().max()))


def _error(client: ClientModel, problem: str) -> ExportError:
    return ExportError(
        f"{printable(client.client)}: what was written {problem}",
        "Nothing is kept. Its program may read the chat template in another way: report this.",
    )
