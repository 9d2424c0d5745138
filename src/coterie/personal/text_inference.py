"""Inference with personal language models: forward passes, generated text, and next words."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from torch import Tensor
from transformers import LogitsProcessorList

from coterie.core.errors import ModelError
from coterie.core.isolation import inference
from coterie.data.text_encoding import TextEncoder
from coterie.models.backbone import Backbone
from coterie.models.slots import Attachable
from coterie.personal.inference.stacks import Mixed, attached
from coterie.personal.sampling import check_temperature, not_usable, usable
from coterie.personal.word_search import Word
from coterie.personal.words import Words, left_padded


class TextInference:
    """Inference with a base and one model's adapter, for all rows of a batch, or the adapters of
    several models, each for its own rows. Messages name it by `whose`.
    """

    def __init__(
        self, backbone: Backbone, encoder: Callable[[], TextEncoder], whose: str = "a model"
    ) -> None:
        self.backbone, self._encoder, self._whose = backbone, encoder, whose

    @cached_property
    def words(self) -> Words:
        """The search for words."""
        return Words(self.backbone, self._encoder(), self._whose)

    def forward(self, adapter: Attachable, ids: Tensor, inputs: Mapping[str, Any]) -> Any:
        """Return the base's output for (B, C) ids and its other arguments."""
        with attached(self.backbone, adapter):
            return self.backbone.model(ids.to(self.backbone.device), **self._moved(inputs))

    @inference()
    def generate(self, adapter: Attachable, settings: Mapping[str, Any]) -> Tensor:
        """Continue (B, C) ids, one of the settings, by transformers' `generate`; return (B, ...)
        ids.

        Raises:
            ModelError: The text would grow longer than the base's context, or has a token that the
                base lacks; the temperature is out of range; or scores are not finite.
        """
        generation, limit = self.backbone.model.generation_config, self.backbone.context_limit
        ids = settings.get("input_ids", settings.get("inputs"))
        new = settings.get("max_new_tokens", 0)
        if ids is not None and ids.shape[-1] + new > limit:
            raise ModelError(
                f"{ids.shape[-1]} tokens of prompt and {new} more exceed the base's context of "
                f"{limit}",
                "Shorten the prompt, or ask for fewer tokens.",
            )
        if ids is not None:
            self.backbone.check_ids(ids)
        if settings.get("do_sample", generation.do_sample):
            check_temperature(settings.get("temperature", generation.temperature))
        processors = [*settings.get("logits_processor", ()), self._checked]
        arguments = {**settings, "logits_processor": LogitsProcessorList(processors)}
        # transformers warns without a padding token
        if generation.pad_token_id is None:
            arguments = {"pad_token_id": generation.eos_token_id} | arguments
        beams = settings.get("num_beams", generation.num_beams) or 1
        if isinstance(adapter, Mixed) and beams > 1:
            raise ModelError(
                f"{self._whose} mixes the predictions of several, which no beams can search",
                "Set num_beams to 1.",
            )
        with attached(self.backbone, adapter):
            return cast(Tensor, self.backbone.model.generate(**self._moved(arguments)))

    def _checked(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of a step of `generate`. Raises ModelError if they are not finite."""
        if not usable(scores).all():
            raise not_usable(self._whose)
        return scores

    def generate_texts(
        self, adapter: Attachable, texts: Sequence[str], settings: Mapping[str, Any]
    ) -> list[str]:
        """Continue several texts in one batch by transformers' `generate`. Raises ModelError as
        `generate`, or if several sequences are asked for each.
        """
        if settings.get("num_return_sequences", 1) > 1:
            raise ModelError(
                "several sequences for one text", "Give token ids instead; the result is ids too."
            )
        if not texts:
            return []
        encoder = self._encoder()
        tokenizer = encoder.tokenizer
        ids = [encoder.prompt(text) for text in texts]
        # pad with a special token, which is not decoded, also after texts that end before others
        filling = tokenizer.eos_token_id or 0
        inputs, mask = left_padded(ids, filling)
        inputs_and_mask = {"input_ids": inputs, "attention_mask": mask, "pad_token_id": filling}
        outputs = self.generate(adapter, inputs_and_mask | dict(settings))
        width = inputs.shape[1]
        return [
            tokenizer.decode(row[width - len(prompt) :], skip_special_tokens=True)
            for row, prompt in zip(outputs, ids, strict=True)
        ]

    def next_words(self, adapter: Attachable, texts: Sequence[str], k: int) -> list[list[Word]]:
        """Return the k most likely next words of each text, best first; see `personal.words`."""
        return self.words.of(adapter, texts, k) if texts else []

    def _moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with their tensors on the base's device."""
        return {
            name: value.to(self.backbone.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
