"""A personal model in use: it continues text, suggests words, and tells which expert spoke. Used like a transformers model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.personal.artifact import WEIGHTS, About, expert_names, fill, read_about
from coterie.personal.fast import FastAdapter
from coterie.personal.words import Word, Words
from coterie.tensors import load as load_tensors


class PersonalModel:
    """A client's trained model: the base, which other personal models may share, with the client's adapter.

    Several of them on one backbone do not disturb each other, and threads wait for each other.

    Args:
        language: The base with the client's adapter.
        about: What is known of where it comes from.
    """

    def __init__(self, language: LanguageModel, about: About) -> None:
        self.language, self.about = language, about
        self.backbone, self.layout = language.backbone, language.layout
        self.adapter = language.adapter.requires_grad_(False)
        self._fast = FastAdapter(self.adapter, self.backbone)
        self._words: Words | None = None

    def __repr__(self) -> str:
        return f"PersonalModel(client={self.about.client!r}, method={self.about.method!r}, base={self.about.base!r})"

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer. Raises ModelError if it has none."""
        return self.backbone.tokenizer

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def config(self) -> Any:
        """Transformers' configuration of the base."""
        return self.backbone.config

    @property
    def experts(self) -> tuple[str, ...]:
        """The names of the experts in the order of `routing`, see `expert_names`."""
        return tuple(name for names in expert_names(self.layout).values() for name in names)

    def speaker(self, word: Word) -> str:
        """The name of the expert with the largest weight where a word was chosen; "" without a router."""
        return self.experts[max(range(len(word.experts)), key=word.experts.__getitem__)] if word.experts else ""

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **inputs: Any) -> Any:
        """One forward pass, with the arguments and the result of the base's own (attention_mask, past_key_values, use_cache, ...)."""
        with self.backbone.using(self._fast):
            return self.backbone.model(input_ids.to(self.device), **self._here(inputs))

    @overload
    def generate(self, prompt: str, **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: Tensor | None = None, **settings: Any) -> Tensor: ...

    @torch.no_grad()
    def generate(self, prompt: str | Tensor | None = None, **settings: Any) -> str | Tensor:
        """Continue text or token ids by transformers' `generate`, with its settings, key-value cache included.

            model.generate("In my free time, I like to", max_new_tokens=20)
            model.generate(**model.tokenizer("In my free time, I like to", return_tensors="pt"), max_new_tokens=20)

        Args:
            prompt: Text, or (B, C) int64, or nothing if `settings` hold `input_ids`, as a tokenizer gives them.
            settings: Anything that transformers' `generate` takes.

        Returns:
            The prompt and its continuation: text for text, ids for ids.

        Raises:
            ModelError: The text would grow longer than the base's context.
        """
        if isinstance(prompt, str):
            found = self._generate(self.tokenizer(prompt or self.tokenizer.eos_token, return_tensors="pt") | settings)
            return cast(str, self.tokenizer.decode(found[0], skip_special_tokens=True))
        return self._generate(settings if prompt is None else {"input_ids": prompt} | settings)

    def _generate(self, settings: dict[str, Any]) -> Tensor:
        generation = self.backbone.model.generation_config
        ids, new = settings.get("input_ids", settings.get("inputs")), settings.get("max_new_tokens", 0)
        if ids is not None and ids.shape[-1] + new > self.backbone.context_limit:
            raise ModelError(
                f"{ids.shape[-1]} tokens of prompt and {new} more exceed the base's context of {self.backbone.context_limit}",
                "Shorten the prompt, or ask for fewer tokens.",
            )
        if generation.pad_token_id is None:  # otherwise transformers says at every call that it takes eos
            settings.setdefault("pad_token_id", generation.eos_token_id)
        with self.backbone.using(self._fast):
            return cast(Tensor, self.backbone.model.generate(**self._here(settings)))

    def _here(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def next_words(self, text: str, k: int = 3) -> list[Word]:
        """The most likely next words of `text`, best first, see `personal.words`.

        Args:
            text: What was written so far; if it is too long for the base, its end counts.
            k: How many words at most.
        """
        if self._words is None:
            self._words = Words(self.backbone)
        return self._words.next(self._fast, text, k)

    def routing(self, ids: Tensor) -> Tensor:
        """(B, C) int64 -> (blocks, B, C, n): the weight that each token gives each of `experts`, fp32.

        Raises:
            ModelError: The model has no router.
        """
        return self.language.routing(ids)

    def score(self, batches: Iterable[Tensor]) -> tuple[float, int]:
        """Summed negative log-likelihood and number of predicted tokens, see `LanguageModel.score`."""
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
        """The personal model in a client's folder; see `personal.load`."""
        about = read_about(folder)
        language = LanguageModel(backbone or Backbone.load(base or about.base, dtype=dtype, device=device), about.layout)
        fill(dict(language.adapter.named_parameters()), load_tensors(folder / WEIGHTS)[0], str(folder / WEIGHTS))
        return cls(language, about)
