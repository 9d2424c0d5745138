"""The contract of a format: what it takes, what it writes, and the program that runs it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie.data.chats import ChatBatch
from coterie.data.splits import Split
from coterie.export.serving import Serving, ids_of
from coterie.personal import PersonalModel

Logits = Callable[[Tensor], Tensor]  # (B, C) int64 -> (B, C, V)


@dataclass(frozen=True)
class ClientModel:
    """The model of one client, and its text.

    Args:
        model: The personal model.
        valid: The client's validation text; None where it is not here.
        test: The client's test text; None where it is not here.
        absent: Why there is no text; "" where there is.
        chats: Whether the model was trained on conversations.
    """

    model: PersonalModel
    valid: Split | None = None
    test: Split | None = None
    absent: str = ""
    chats: bool = False

    @property
    def client(self) -> str:
        return self.model.about.client

    @cached_property
    def serving(self) -> Serving:
        """How the model is used. Raises DataError."""
        return Serving.of(self.model, self.chats)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """(B, C) int64 -> (B, C, V), of the personal model."""
        return self.model.language.forward(ids)


@dataclass(frozen=True)
class Options:
    """What a format is asked for, each one of those that it lists.

    Args:
        part: Which part of a model is written.
        precision: Of the values that are written.
        expert: The name of the expert that is written, of a part that is one expert; None: the
            first generalist, or the only expert.
        base_precision: Of the base, of a format that writes one for all clients apart from theirs;
            "" of others.
        chat: Whether texts are answers to messages, of a format that `chats`.
    """

    part: str
    precision: str
    expert: str | None = None
    base_precision: str = ""
    chat: bool = False


@dataclass(frozen=True)
class Written:
    """What was written for one client.

    Args:
        folder: Where its files are.
        files: Their names in it.
        expected: What the files should compute.
        likeness: The name of what they should compute, for messages.
        notes: What its user has to know, sentence by sentence.
        details: What export.json says besides.
        shared: Names of the files in `folder` that are all clients', the base first.
    """

    folder: Path
    files: tuple[str, ...]
    expected: Logits
    likeness: str = "the personal model"
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    shared: tuple[str, ...] = ()


class Runtime(ABC):
    """What was written, loaded by the program that it is for.

    `quantity` names what `logits` returns, `probe` is (rows, tokens) of what is compared value by
    value, `most_tokens` limits the text whose perplexity is measured, `longest` is how many tokens
    the program takes at once, if that is less than the base, and `window` how many in all.
    """

    quantity: ClassVar[str] = "logits"
    probe: tuple[int, int] = (2, 64)
    most_tokens: int = 50_000
    longest: int | None = None
    window: int | None = None

    @abstractmethod
    def logits(self, ids: Tensor) -> Tensor:
        """(B, C) int64 -> (B, C, V) fp32."""

    def logits_by_token(self, ids: Tensor) -> Tensor | None:
        """Return the same logits computed token by token, with a cache of those before; None of
        what has none of its own.
        """
        return None

    def nll(self, rows: ChatBatch) -> float:
        """Return the summed negative log-likelihood of the next tokens that count, in nats."""
        logits, counted = self.logits(rows.ids[:, :-1]), rows.counted[:, 1:]
        targets = rows.ids[:, 1:][counted]
        return float(functional.cross_entropy(logits[counted], targets, reduction="sum").double())

    def chat_ids(self, folder: Path, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that a chat is asked with, by what was written alone."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids

    @abstractmethod
    def ending(self, prompt: Sequence[int], stops: Sequence[int]) -> set[int]:
        """Return those of some tokens at which the program ends the answer to a prompt."""

    @abstractmethod
    def answer(self, prompt: Sequence[int], most: int) -> tuple[list[int], bool]:
        """Return the likeliest tokens behind a prompt, up to the one at which the program ends by
        itself, or `most`, and whether it ended.
        """


class TorchRuntime(Runtime):
    """A model of transformers, or one called alike.

    Args:
        model: Takes (B, C) token ids, and returns what has `logits`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits.float()

    def ending(self, prompt: Sequence[int], stops: Sequence[int]) -> set[int]:
        return {*stops} & {*ids_of(self.model.generation_config.eos_token_id)}

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], most: int) -> tuple[list[int], bool]:
        ids = torch.tensor([[*prompt]])
        likeliest = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            max_new_tokens=most,
            **likeliest,
        )
        answer = output[0, len(prompt) :].tolist()
        return answer, bool(self.ending(prompt, answer[-1:]))


class Format(ABC):
    """One format of files.

    `name` is what --format takes, `about` says in a few words what it is. `packages` are the
    modules that it needs besides coterie's own, and `extra` brings them; `parts` and `precisions`
    are what --part and --precision take, the default first, and `base_precisions` what
    --base-precision takes, where the base is written apart. `chats` says whether it has --chat.
    Where `shares_base`, the files of all clients lie in one folder beside those of the base; else
    several clients have folders of their own.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = "device"
    parts: ClassVar[tuple[str, ...]] = ("routed",)
    precisions: ClassVar[tuple[str, ...]] = ("f32", "f16")
    base_precisions: ClassVar[tuple[str, ...]] = ()
    chats: ClassVar[bool] = False
    shares_base: ClassVar[bool] = False

    @abstractmethod
    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse, before anything is written, a model that the format cannot hold. Raises Refused,
        with another format as its remedy.
        """

    def write_base(  # noqa: B027 - formats without a common base write none
        self, clients: Sequence[ClientModel], folder: Path, options: Options
    ) -> None:
        """Write what all clients have in common."""

    @abstractmethod
    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        """Write what one client has for itself. Raises SaveError."""

    @abstractmethod
    def runtime(self, client: ClientModel, written: Written) -> AbstractContextManager[Runtime]:
        """Load what was written, by the program that it is for."""

    @abstractmethod
    def interface(self, client: ClientModel) -> dict[str, Any]:
        """Return the inputs and the outputs of what is written, for export.json."""


def interface(vocabulary: int) -> dict[str, Any]:
    """Return the inputs and outputs of a causal language model as transformers has them."""
    return {
        "inputs": {"input_ids": {"dtype": "int64", "shape": ["batch", "tokens"]}},
        "outputs": {"logits": {"dtype": "float32", "shape": ["batch", "tokens", vocabulary]}},
    }
