"""The interface of a format: its options, the files it writes, and the program that runs them."""

import copy
import json
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

from coterie.core.files import write_atomically
from coterie.core.foreign import read_text
from coterie.data.chats import ChatBatch
from coterie.data.splits import Split
from coterie.data.text_encoding import TextEncoder
from coterie.models.windows import TextBatch
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture

GENERATION = "generation_config.json"
# the example programs continue this text, or answer this question
TEXT = "In my free time, I like to"
QUESTION = ({"role": "user", "content": "What is two and two?"},)


@dataclass(frozen=True)
class Serving:
    """The tokenizer and the settings of generation of a model."""

    tokenizer: Any  # a copy of the base's, with the chat template of the training
    generation: Any  # settings of transformers' `generate`, with the tokens that end an answer
    chats: bool  # whether the model was trained on conversations
    begin: tuple[int, ...]  # the ids at the beginning of a text that is not a chat
    stops: tuple[int, ...]  # the ids that end a text or an answer
    # the ids of `QUESTION` by the chat template; empty without a template
    prompt: tuple[int, ...] = ()
    prompt_text: str = ""  # their text

    @classmethod
    def of(cls, model: PersonalModel, chats: bool) -> "Serving":
        """Return the settings of a model that was trained on conversations, or on texts. Raises
        DataError if the tokenizer is not a fast one, or the chat template refuses a question.
        """
        tokenizer, generation = copy.copy(model.tokenizer), copy.deepcopy(model.generation_config)
        begin = tuple(TextEncoder(tokenizer).begin)
        if not chats:
            return cls(tokenizer, generation, False, begin, ids_of(generation.eos_token_id))
        chat = model.chats
        generation.eos_token_id = [*chat.stops] or None
        if chat.template is None:
            return cls(tokenizer, generation, True, begin, chat.stops)
        tokenizer.chat_template = chat.template
        prompt = tuple(chat.prompt(QUESTION)), chat.render(QUESTION, prompt=True)
        return cls(tokenizer, generation, True, begin, chat.stops, *prompt)

    @property
    def described(self) -> dict[str, Any]:
        """The entries for export.json."""
        return {
            "content": "chats" if self.chats else "text",
            "begin": self.begin,
            "stops": self.stops,
            "chat_template": bool(self.tokenizer.chat_template),
        }

    @property
    def usage(self) -> str:
        """Sentences on how to prompt the model."""
        begin = self.tokenizer.decode(list(self.begin))
        starts = f" Texts begin with `{begin}`, which the tokenizer writes." if begin else ""
        ends = ", ".join(f"`{token}`" for token in self.tokenizer.convert_ids_to_tokens(self.stops))
        if not self.chats:
            return f"It goes on with texts, up to {ends or 'any length'}.{starts}"
        written = (
            "a chat as `chat_template.jinja` writes it, which is whole: nothing is put before it"
            if self.prompt
            else f"prompts as they are.{starts}"
        )
        return f"It was trained on conversations: ask it {written}. An answer ends with {ends}."

    def in_program(self, program: str) -> str:
        """Replace PROMPT in a program by Python code for a prompt's ids, with a `tokenizer` of the
        package tokenizers, and STOPS by the ids that end an answer.
        """
        text = json.dumps(self.prompt_text or TEXT)
        begin = "" if self.prompt or not self.begin else f"{[*self.begin]} + "
        ids = f"{begin}tokenizer.encode({text}, add_special_tokens=False).ids"
        return program.replace("PROMPT", ids).replace("STOPS", str([*self.stops]))

    @property
    def transformers_program(self) -> str:
        """The end of a program that has a `model` and a `tokenizer` of transformers."""
        if self.prompt:
            prompt = f"""tokenizer.apply_chat_template(
    [{json.dumps(QUESTION[0])}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)"""
        else:
            prompt = f'tokenizer({json.dumps(TEXT)}, return_tensors="pt")'
        return f"""prompt = {prompt}
answer = model.generate(**prompt, max_new_tokens=64)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""

    def save(self, folder: Path) -> None:
        """Write the tokenizer and the settings of `generate`. Raises SaveError."""
        self.tokenizer.save_pretrained(folder)
        text = self.generation.to_json_string(use_diff=True)
        write_atomically(folder / GENERATION, text.encode())


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids of a setting that is one id, several or None."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


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
        """Refuse a model that the format cannot hold, naming one that can. Raises Refused."""

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
        """Return the exported model's inputs and outputs, by default those of a causal LM."""
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


def filled_readme(name: str, /, **values: Any) -> str:
    """Return the text of a README in `readmes/`, with values in its braces."""
    return read_text(_READMES / f"{name}.md").format(**values)
