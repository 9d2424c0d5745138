"""The check of an exported chat model in its own program: it must write a chat as in training, give
the model's answer, and end it where the model does.
"""

from dataclasses import dataclass

import torch

from coterie.core.errors import ExportError
from coterie.core.printing import printable
from coterie.export.format import ClientModel, Runtime, Written
from coterie.export.serving import QUESTION

# the most tokens of an answer
MOST = 32


@dataclass(frozen=True)
class Asked:
    """A question to a chat model and its program's answer.

    Args:
        question: The user's message.
        answer: The answer's text without special tokens; None if the question was not asked.
        tokens: The number of tokens in the answer, including the one that ends it.
        ended: Whether a stop token ended the answer; otherwise it reached the most tokens.
    """

    question: str
    answer: str | None = None
    tokens: int = 0
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


def ask(runtime: Runtime, client: ClientModel, written: Written, limit: float) -> Asked:
    """Ask an exported model a question in its own program, and check the answer.

    Args:
        runtime: The program, with the exported model loaded.
        client: The personal model.
        written: The files of the export.
        limit: The largest difference of logits that rounding explains, relative to the largest
            logit; infinite if the export has quantised weights.

    Raises:
        ExportError: The program writes the chat with other tokens, ends answers at other tokens,
            or gives another answer.
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
        return Asked(question)
    answer, ended = runtime.answer(prompt, most)
    ends = [token in serving.stops for token in answer]
    if any(ends[:-1]) or ends[-1] != ended:
        raise _error(client, "ends an answer at another token than coterie")
    if _regret(prompt, answer, written) > 2 * limit:
        raise _error(client, "answers a chat otherwise than coterie")
    text = client.model.tokenizer.decode(answer, skip_special_tokens=True).strip()
    return Asked(question, text, len(answer), ended)


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
