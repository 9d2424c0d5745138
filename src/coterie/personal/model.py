"""A personal language model in use: continued text, suggested words, and weights of experts."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from coterie.core.errors import CheckpointError
from coterie.core.files import load as load_tensors
from coterie.core.isolation import inference
from coterie.core.tensors import MOST_OF_ONE
from coterie.data.chats import ChatTemplate
from coterie.data.chats.messages import of_user, user
from coterie.data.text_encoding import TextEncoder
from coterie.models import artifact
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.slots import Attachable
from coterie.models.windows import TextBatch
from coterie.personal.following import Following
from coterie.personal.inference.stacks import Stacks
from coterie.personal.text_inference import TextInference
from coterie.personal.word_search import Word

ANSWER = 128  # most tokens of an answer, by default


class PersonalModel:
    """A client's trained model: the base, which other personal models may share, with the client's
    adapter. Used like a transformers model.

    Several models on one backbone do not affect each other; threads that use it take turns.

    Examples:
        >>> import coterie
        >>> small = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
        >>> short = {"name": "fedavg", "rounds": 1, "local_steps": 1}
        >>> run = coterie.run("synthetic", out="words", data=small, method=short)
        >>> model = coterie.PersonalModel.from_pretrained("words/clients/client-0")
        >>> model.about.client
        'client-0'

    Args:
        language: The base with the client's adapter.
        about: The origin of the model: client, method, recipe and rounds.
    """

    def __init__(self, language: LanguageModel, about: artifact.About) -> None:
        self.language, self.about = language, about
        self.backbone, self.layout = language.backbone, language.layout
        self.adapter = language.adapter.requires_grad_(False)
        self.weights = torch.ones(1, dtype=torch.float64)  # of the predictions of `adapters`
        self.following: Following | None = None  # of a mixture whose weights follow its owner
        self._inference = self._new_inference()

    def _new_inference(self) -> TextInference:
        whose = f"the model of {self.about.client!r}"
        return TextInference(self.backbone, lambda: self.texts, whose)

    def __repr__(self) -> str:
        return (
            f"PersonalModel(client={self.about.client!r}, method={self.about.method!r}, "
            f"base={self.about.base!r})"
        )

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer. Raises ModelError if it has none."""
        return self.backbone.tokenizer

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def config(self) -> Any:
        """The transformers configuration of the base."""
        return self.backbone.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the base's weights."""
        return self.backbone.dtype

    @property
    def generation_config(self) -> Any:
        """The base's default settings of transformers' `generate`."""
        return self.backbone.model.generation_config

    def can_generate(self) -> bool:
        """Return True, and register this class with transformers' pipelines.

        Pipelines log an error about any class that is not in their list of models or of PEFT's
        wrappers. No documented function adds to either: `AutoModelForCausalLM.register` adds to
        another one.
        """
        from transformers.pipelines import base

        wrappers: list[str] = getattr(base, "SUPPORTED_PEFT_TASKS", {}).get("text-generation", [])
        if (class_name := type(self).__name__) not in wrappers:
            wrappers.append(class_name)
        return True

    def to(self, device: str | int | torch.device) -> "PersonalModel":
        """Move the model with its base to a device, in place, and return it. Models that share the
        base have to be moved as well.
        """
        if torch.device(device) != self.device:
            self.backbone.model.to(device)
            for adapter in self.adapters:
                adapter.to(device)
            self.__dict__.pop("fast", None)  # made of tensors on the other device
            self._inference = self._new_inference()
        return self

    def eval(self) -> "PersonalModel":
        """Return the model, which is always in eval mode."""
        return self

    def save_pretrained(self, folder: Path | str, **_: Any) -> None:
        """Write the adapter and `client.json`, which names the base, to a folder that
        `coterie.load` reads. Raises SaveError.
        """
        artifact.save(Path(folder), self.about, dict(self.adapter.named_parameters()))

    @staticmethod
    def from_pretrained(
        repo: Path | str, *, revision: str | None = None, **settings: Any
    ) -> "PersonalModel":
        """Load a model from a folder, or from a repository of the Hub, where `coterie push` or
        `push_to_hub` wrote it; what is fetched is verified, see `coterie.pull`, and kept in the
        Hub's cache. `settings` are those of `coterie.load`. Raises CoterieError.
        """
        hub = import_module("coterie.export.pull")  # the room that knows the Hub is above this one
        return cast(PersonalModel, hub.from_pretrained(repo, revision, **settings))

    def push_to_hub(
        self, repo: str, *, publish_personal: bool = False, private: bool = True
    ) -> str:
        """Write the model with its card to a repository of the Hub, and return its address. It is
        made if it does not exist, private unless told otherwise; `publish_personal` says that the
        owner agrees. Raises CoterieError.
        """
        hub = import_module("coterie.export.push")
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            agreed = {"publish_personal": publish_personal, "public": not private}
            pushed = hub.push(Path(folder), repo, client=self.about.client, **agreed)
        return cast(str, pushed.url)

    @property
    def experts(self) -> tuple[str, ...]:
        """The names of the experts in the order of `routing`, see `expert_names`."""
        return artifact.expert_names(self.layout)

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters whose predictions are mixed: one."""
        return [self.adapter]

    @cached_property
    def fast(self) -> Attachable:
        """The adapter prepared for inference: a copy of its values, created on first use."""
        return Stacks.of([self.adapter], self.backbone)

    @property
    def shares(self) -> dict[str, float]:
        """The current weights of a mixture's parts, by method; {} of other models."""
        return {}

    @inference()
    def observe(self, *texts: str, growing: bool = False, generated: bool = False) -> None:
        """Let the weights of a mixture that was loaded with `follow` follow what is new of texts
        that its owner has written; those that were `generated` become known, but are not followed.
        `generate`, `answer` and `next_words` do so with the texts that they get and return. The
        last word of a `growing` text may be unfinished, and waits.
        """
        if self.following is not None:
            encode = self._inference.words.finished if growing else self.texts.prompt
            for text in texts:
                self.following.observe(encode(text), generated)

    def speaker(self, word: Word) -> str:
        """Return the name of the expert with the largest weight for a word; "" without a router."""
        if word.experts:
            return self.experts[max(range(len(word.experts)), key=word.experts.__getitem__)]
        return ""

    @inference()
    def __call__(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Run one forward pass, with the arguments and the result of the base's (attention_mask,
        past_key_values, use_cache, ...).
        """
        return self._inference.forward(self.fast, input_ids, inputs)

    @overload
    def generate(self, prompt: str, **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: list[str], **settings: Any) -> list[str]: ...

    @overload
    def generate(self, prompt: Tensor | None = None, **settings: Any) -> Tensor: ...

    @inference()
    def generate(
        self, prompt: str | list[str] | Tensor | None = None, **settings: Any
    ) -> str | list[str] | Tensor:
        """Continue text or token ids by transformers' `generate`.

            model.generate("In my free time, I like to", max_new_tokens=20)
            model.generate(**model.tokenizer("In my free time, I like to", return_tensors="pt"),
            max_new_tokens=20)

        Args:
            prompt: A text; several texts, continued in one batch; (B, C) int64 token ids; or None
                if `settings` contain `input_ids`, as a tokenizer returns them.
            settings: Any arguments of transformers' `generate`.

        Returns:
            The prompt and its continuation: text for text, a list for a list, ids for ids.

        Raises:
            ModelError: The text would grow longer than the base's context, or several sequences are
                asked for each text of a list.
        """
        if isinstance(prompt, list):
            self.observe(*prompt)
            texts = self._inference.generate_texts(self.fast, prompt, settings)
            self.observe(*texts, generated=True)
            return texts
        if isinstance(prompt, str):
            self.observe(prompt)
            ids = torch.tensor([self.texts.prompt(prompt)])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            output = self._inference.generate(self.fast, inputs | settings)
            text = cast(str, self.tokenizer.decode(output[0], skip_special_tokens=True))
            self.observe(text, generated=True)
            return text
        inputs = settings if prompt is None else {"input_ids": prompt} | settings
        return self._inference.generate(self.fast, inputs)

    @cached_property
    def chats(self) -> ChatTemplate:
        """The chat template of the model's training, or else the base's."""
        about = self.about
        return ChatTemplate(self.tokenizer, about.chat_template, about.control_tokens)

    @property
    def texts(self) -> TextEncoder:
        """The encoder of texts, as in training."""
        return self.chats.texts

    @inference()
    def answer(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **settings: Any,
    ) -> str:
        """Answer the last message of a chat, by the base's chat template.

            model.answer("What is two and two?")
            model.answer([{"role": "user", "content": "What is two and two?"}], do_sample=False)

        Args:
            messages: A user's message, or all messages of a chat, each with its `role` and
                `content`, in any form that training data may have.
            tools: Descriptions of tools, if the template supports them.
            settings: Any arguments of transformers' `generate`; by default an answer has at most
                128 tokens, or as many as there is room for.

        Raises:
            DataError: The base has no chat template, or the template refuses or omits a part of the
                chat.
            ModelError: The chat would grow longer than the base's context.
        """
        chat = [user(messages)] if isinstance(messages, str) else messages
        ids = self.chats.prompt(chat, tools)
        self.observe(*of_user(chat))
        room = max(self.backbone.context_limit - len(ids), 1)
        output = self._inference.generate(
            self.fast,
            {"max_new_tokens": min(ANSWER, room), "eos_token_id": list(self.chats.stops) or None}
            | {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
            | settings,
        )
        return str(self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)).strip()

    @overload
    def next_words(self, text: str, k: int = 3) -> list[Word]: ...

    @overload
    def next_words(self, text: list[str], k: int = 3) -> list[list[Word]]: ...

    @inference()
    def next_words(self, text: str | list[str], k: int = 3) -> list[Word] | list[list[Word]]:
        """Return the k most likely next words of a text, best first, or those of each of several
        texts; see `personal.words`. Only the end of a text that is too long for the base counts.
        """
        texts = [text] if isinstance(text, str) else text
        self.observe(*texts, growing=True)
        words = self._inference.next_words(self.fast, texts, k)
        return words[0] if isinstance(text, str) else words

    @inference()
    def routing(self, ids: Tensor) -> Tensor:
        """Return the weight that each token gives each of `experts`: (B, C) int64 ->
        (blocks, B, C, n) fp32. Raises ModelError if the model has no router.
        """
        return self.language.routing(ids)

    @inference()
    def predicted(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Return logits or log-probabilities, (T, V), and their counted targets, (T,)."""
        return self.language.predicted(batch)

    @inference()
    def score(self, batches: Iterable[TextBatch]) -> tuple[float, int]:
        """Return summed negative log-likelihood and number of predicted tokens."""
        nll, tokens = self.language.score(batches).tolist()
        return nll, int(tokens)

    @classmethod
    def load(
        cls,
        folder: Path,
        base: str | None = None,
        backbone: Backbone | None = None,
        dtype: Literal["fp32", "bf16"] = "fp32",
        device: str = "cpu",
    ) -> "PersonalModel":
        """Return the personal model in a client's folder; see `personal.load`."""
        artifact.verify(folder)
        about = artifact.read_about(folder)
        tensors, _ = load_tensors(folder / artifact.WEIGHTS, MOST_OF_ONE)
        backbone = backbone or Backbone.load(
            base or about.base, dtype=dtype, device=device, quantised=about.quantise
        )
        if about.tokenizer is not None and (
            difference := about.tokenizer.difference(backbone.tokenizer)
        ):
            raise CheckpointError(
                f"{folder}: the base's tokenizer is another one than in training: {difference}",
                "Restore the tokenizer's files in the base's folder, name the folder of the base "
                "as it was (--base), or train again.",
            )
        artifact.check_size(backbone.architecture, about, tensors, str(folder / artifact.WEIGHTS))
        language = LanguageModel(backbone, about.layout)
        artifact.fill(
            dict(language.adapter.named_parameters()), tensors, str(folder / artifact.WEIGHTS)
        )
        return cls(language, about)
