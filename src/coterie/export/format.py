"""The interface of a format: its options, the files it writes, and the program that runs them."""

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

from coterie.core.foreign import read_text
from coterie.data.chats import ChatBatch
from coterie.data.splits import Split
from coterie.export.serving import Serving, ids_of
from coterie.models.windows import TextBatch
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture

_READMES = Path(__file__).parent / "readmes"
Logits = Callable[[Tensor], Tensor]  # (B, C) int64 -> (B, C, V)


@dataclass(frozen=True)
class ClientModel:
    """The model of one client, and its text."""

    model: PersonalModel  # that is written
    valid: Split | None = None
    test: Split | None = None
    absent: str = ""  # the reason why there is no text
    train: Split | None = None
    mixture: PersonalMixture | None = None  # in whose place `model` is
    note: str = ""  # a sentence on that

    @property
    def client(self) -> str:
        return self.model.about.client

    @property
    def chats(self) -> bool:
        """Whether the model was trained on conversations."""
        return self.model.about.content == "chats"

    @cached_property
    def serving(self) -> Serving:
        """The tokenizer and the settings of generation. Raises DataError."""
        return Serving.of(self.model, self.chats)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Return the written model's logits: (B, C) int64 -> (B, C, V)."""
        return self.model.language.forward(ids)


@dataclass(frozen=True)
class Options:
    """The options of an export, each among those that the format lists."""

    part: str
    precision: str
    # for a part that is one expert; None: the first generalist, or the only one
    expert: str | None = None
    base_precision: str = ""  # if the format writes one base for all clients
    chat: bool = False  # whether texts are answers to messages, for a format that `chats`


@dataclass(frozen=True)
class Written:
    """The files written for one client."""

    folder: Path
    files: tuple[str, ...]  # the names of the client's own files
    expected: Logits  # the function that the files should compute
    likeness: str = "the personal model"  # the name of that function, for messages
    notes: tuple[str, ...] = ()  # sentences that the user has to know
    details: dict[str, Any] = field(default_factory=dict)  # further entries of export.json
    # the names of the files in `folder` that all clients share, the base first
    shared: tuple[str, ...] = ()


class Runtime(ABC):
    """An exported model, loaded by the program that it is for."""

    quantity: ClassVar[str] = "logits"  # what `logits` returns
    probe: tuple[int, int] = (2, 64)  # (rows, tokens) of the input whose logits are compared
    most_tokens: int = 50_000  # of the text whose perplexity is measured
    window: int | None = None  # the most tokens in all; None: as many as the base takes

    @abstractmethod
    def logits(self, ids: Tensor) -> Tensor:
        """Return logits: (B, C) int64 -> (B, C, V) fp32."""

    def logits_by_token(self, ids: Tensor) -> Tensor | None:
        """Return the logits computed token by token with the program's cache, if it has one."""
        return None

    def nll(self, rows: ChatBatch) -> float:
        """Return the summed negative log-likelihood of the next tokens that count, in nats."""
        logits, counted = self.logits(rows.ids[:, :-1]), rows.counted[:, 1:]
        targets = rows.ids[:, 1:][counted]
        return float(functional.cross_entropy(logits[counted], targets, reduction="sum").double())

    def chat_ids(self, folder: Path, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat's prompt, from the exported files alone."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids

    @abstractmethod
    def ending(self, prompt: Sequence[int], stops: Sequence[int]) -> set[int]:
        """Return the tokens among `stops` at which the program ends the answer to a prompt."""

    @abstractmethod
    def answer(self, prompt: Sequence[int], most: int) -> tuple[list[int], bool]:
        """Return the likeliest tokens after a prompt, up to the token at which the program stops or
        `most` tokens, and whether it stopped.
        """


class TorchRuntime(Runtime):
    """A model of transformers, or one that takes (B, C) token ids and returns `logits`."""

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
    """One format of files. Of parts and precisions, the first is the default."""

    name: ClassVar[str]  # the value of --format
    about: ClassVar[str]  # a description in a few words
    packages: ClassVar[tuple[str, ...]] = ()  # modules beside coterie's own requirements
    extra: ClassVar[str] = "device"  # the extra that installs the packages
    parts: ClassVar[tuple[str, ...]] = ("routed",)  # the values of --part
    precisions: ClassVar[tuple[str, ...]] = ("f32", "f16")  # the values of --precision
    # the values of --base-precision, if the base is written apart
    base_precisions: ClassVar[tuple[str, ...]] = ()
    chats: ClassVar[bool] = False  # whether the format has --chat
    # all clients' files are in one folder with the base, else each has a folder
    shares_base: ClassVar[bool] = False

    @abstractmethod
    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse a model that the format cannot hold, before anything is written. Raises Refused,
        with another format as its remedy.
        """

    def write_base(  # noqa: B027 - formats without a common base write none
        self, clients: Sequence[ClientModel], folder: Path, options: Options
    ) -> None:
        """Write the files that all clients share."""

    @abstractmethod
    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        """Write the files of one client. Raises SaveError."""

    @abstractmethod
    def runtime(self, client: ClientModel, written: Written) -> AbstractContextManager[Runtime]:
        """Load the files of one client by the program that they are for."""

    def interface(self, client: ClientModel) -> dict[str, Any]:
        """Return the inputs and the outputs of the exported model, for export.json; by default
        those of a causal language model of transformers.
        """
        vocabulary = client.model.backbone.architecture.vocabulary
        return {
            "inputs": {"input_ids": {"dtype": "int64", "shape": ["batch", "tokens"]}},
            "outputs": {"logits": {"dtype": "float32", "shape": ["batch", "tokens", vocabulary]}},
        }


def rows_of(batch: TextBatch, width: int | None = None) -> ChatBatch:
    """Return a batch as rows of at most `width` tokens with masks, of ones for running text."""
    if isinstance(batch, Tensor):
        everywhere = torch.ones_like(batch, dtype=torch.bool)
        batch = ChatBatch(batch, everywhere, torch.arange(batch.shape[1]).expand_as(batch))
    parts = (batch.ids, batch.counted, batch.positions)
    return ChatBatch(*(values[:, :width] for values in parts))


def filled_readme(name: str, **values: Any) -> str:
    """Return the text of a README in `readmes/`, with values in its braces."""
    return read_text(_READMES / f"{name}.md").format(**values)
