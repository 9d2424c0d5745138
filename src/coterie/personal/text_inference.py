"""Inference with personal language models: forward passes, generated text, and next words."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coterie.core.errors import ModelError
from coterie.core.isolation import inference
from coterie.data.text_encoding import TextEncoder
from coterie.models.backbone import Backbone
from coterie.models.routing import Routing
from coterie.models.slots import Attachable
from coterie.personal.inference.stacks import Mixed, attached
from coterie.personal.sampling import check_temperature, not_usable, usable
from coterie.personal.word_search import PUNCTUATION, SPACES, Beginning, Search, Word

LONGEST = 8  # most tokens of a word
UNFINISHED = 8  # most tokens of an unfinished word that are taken back
# the control characters too, as byte-level vocabularies write them
NO_LETTERS = PUNCTUATION | {chr(256 + i) for i in range(34)} - set(SPACES)
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name of a token for a single byte
LAST = chr(0x10FFFF)  # sorts after every name of a token
# SentencePiece's letters and line ends that byte-level vocabularies give another meaning
_OTHERS = {256 + i: 0xE100 + i for i in range(34)} | {10: "Ċ", 9: "ĉ", 13: "č"}


class Vocabulary:
    """A tokenizer's tokens as text, decoded after a letter: tokenizers may drop a first space."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.anchor: int = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self.anchor_text: str = tokenizer.decode([self.anchor])

    @cached_property
    def longest(self) -> int:
        """The largest number of characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens after a letter, `special` ones such as the end included."""
        text = self.tokenizer.decode([self.anchor, *ids], skip_special_tokens=not special)
        return str(text)[len(self.anchor_text) :]

    def content(self, token: int) -> bytes | None:
        """Return the bytes of a token, which need not be whole characters; None if unknown."""
        text = self.decode([token])
        if "\ufffd" not in text:
            return text.encode()
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if match := _BYTE.fullmatch(name):
            return bytes.fromhex(match[1])
        letters = _letters()
        return bytes(letters[c] for c in name) if all(c in letters for c in name) else None


class Words:
    """The search for words in one vocabulary. Messages name the model by `whose`."""

    def __init__(self, backbone: Backbone, texts: TextEncoder, whose: str = "a model") -> None:
        self._whose = whose
        self.backbone, self.texts, self.tokenizer = backbone, texts, texts.tokenizer
        size = backbone.architecture.vocabulary
        names = self.tokenizer.convert_ids_to_tokens(list(range(min(size, len(self.tokenizer)))))
        if any(name and "▁" in name for name in names):
            names = [name and name.translate(_OTHERS) for name in names]
        names += [None] * (size - len(names))
        special = set(self.tokenizer.all_special_ids)
        self.names = ["" if i in special or not name else str(name) for i, name in enumerate(names)]
        device = backbone.device
        self.starts = torch.tensor([_starts(name) for name in self.names], device=device)
        no_word = {"", *SPACES, *NO_LETTERS}
        self.inside = torch.tensor([n[:1] not in no_word for n in self.names], device=device)
        self._sorted = sorted((name, i) for i, name in enumerate(self.names) if name)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.anchor = self.vocabulary.anchor
        # the prompt if a text has no tokens before its last word
        self.first: int = (texts.prompt("") or [0])[-1]

    @inference()
    def of(self, adapter: Attachable, texts: Sequence[str], k: int) -> list[list[Word]]:
        """Return the k most likely next words of each text, best first, searched in one batch. The
        adapter is that of one model, or of several with the same number of texts each, in the
        texts' order. Raises ModelError if scores are not finite.
        """
        prompt_ids, searches = zip(*(self._begin(text, k) for text in texts), strict=True)
        prompts, present = left_padded(prompt_ids, self.anchor)
        mask = None if present.all() else present.to(self.backbone.device)
        groups = getattr(adapter, "groups", 1)  # of rows, each computed by another model
        each = len(texts) // groups
        with self.backbone.using(adapter):
            cache, p, experts = self._forward(adapter, prompts.to(self.backbone.device), mask=mask)
            places, kept = list(range(len(texts))), [1] * len(texts)
            for _ in range(UNFINISHED + LONGEST + 1):
                for search, at, count in zip(searches, places, kept, strict=True):
                    self._extend(search, p[at : at + count], experts[at : at + count])
                before, size = places, len(p) // groups
                kept = [search.prune() for search in searches]
                rows = max(sum(kept[i : i + each]) for i in range(0, len(kept), each))
                if not rows:
                    break
                # the beginnings of a group's texts, one after another, and copies of its first row
                last, parents, places = list[int](), list[int](), list[int]()
                for i, search in enumerate(searches):
                    places.append(len(last))
                    last += [b.ids[-1] for b in search.level]
                    parents += [before[i] + b.row for b in search.level]
                    if (i + 1) % each == 0:
                        group = i // each
                        filling = (group + 1) * rows - len(last)
                        last += [self.anchor] * filling
                        parents += [group * size] * filling
                chosen = torch.tensor(parents, device=self.backbone.device)
                if mask is not None:
                    mask = torch.cat([mask[chosen], mask.new_ones(len(chosen), 1)], dim=1)
                if isinstance(adapter, Mixed):
                    chosen = adapter.cache_rows(chosen, size * groups)
                cache.batch_select_indices(chosen)
                ids = torch.tensor(last, device=self.backbone.device)[:, None]
                cache, p, experts = self._forward(adapter, ids, cache, mask)
        return [search.best() for search in searches]

    def finished(self, text: str) -> list[int]:
        """Return the ids of a text before its last word, which may go on."""
        ids = self.texts.prompt(text if text.strip() else "")
        return ids[: len(ids) - self._unfinished(ids)]

    def _begin(self, text: str, k: int) -> tuple[list[int], Search]:
        """Return a text's prompt and search. Raises ModelError: a token that the base lacks."""
        ids = self.texts.prompt(text if text.strip() else "")
        self.backbone.check_ids(ids)
        cut = len(ids) - self._unfinished(ids)
        end = "".join(self.names[i] for i in ids[cut:])
        # the end of a word only shows at the next token, hence one more
        shown = self.texts.unmarked(text)
        search = Search(
            shown, end, self.vocabulary.decode(ids[cut:]), len(ids) - cut + LONGEST + 1, k
        )
        prompt = ids[:cut][-max(self.backbone.context_limit - search.depth, 1) :]
        return prompt or [self.first], search

    def _unfinished(self, ids: Sequence[int]) -> int:
        """Return the number of tokens of the last word, or of a final space that may begin one."""
        for count, i in enumerate(reversed(ids)):
            name = self.names[i]
            if count == UNFINISHED or not name or name[-1] in NO_LETTERS:
                return count
            if name[0] in SPACES or any(c in NO_LETTERS for c in name):
                line_break = not name.strip(SPACES) and name[-1] not in "Ġ▁"
                return count if count and line_break else count + 1
        return len(ids)

    def _extend(self, search: Search, p: Tensor, experts: Sequence[Tensor | None]) -> None:
        """Record complete words, and extend the others by p (beginnings, V), their next tokens'."""
        if not search.level:
            return
        allowed = torch.stack([self._allowed(b) for b in search.level])
        goes_on = p * allowed
        for b, end in zip(search.level, (1 - goes_on.sum(dim=-1)).tolist(), strict=True):
            if b.begun:
                search.note(self.vocabulary.decode(b.ids), b, b.p * max(end, 0.0))
        top, ids = goes_on.topk(min(search.beam, p.shape[1]), dim=-1)
        level: list[Beginning] = []
        for number, (b, row, e, values, tokens) in enumerate(
            zip(search.level, p, experts, top.tolist(), ids.tolist(), strict=True)
        ):
            longer = dict(zip(tokens, values, strict=True))
            if b.left:
                completing = self._longer(b.left)
                search.mass += b.p * float(row[completing].sum())
                shorter = [i for size in range(1, len(b.left)) for i in self._named(b.left[:size])]
                longer |= dict(zip(shorter, row[shorter].tolist(), strict=True))
            level += [
                self._extended(search, b, number, token, b.p * value, e)
                for token, value in longer.items()
                if value > 0
            ]
        search.level = level

    def _allowed(self, b: Beginning) -> Tensor:
        """Return (V,) which tokens may extend a beginning within the same word."""
        if b.begun:
            return self.inside
        if not b.left:
            return self.starts | self.inside
        allowed = torch.zeros_like(self.inside)
        fitting = [
            i
            for i in self._longer(b.left)
            if not (rest := self.names[i][len(b.left) :]) or rest[0] not in NO_LETTERS
        ]
        allowed[fitting] = True
        return allowed

    def _longer(self, left: str) -> list[int]:
        first, last = (bisect_left(self._sorted, (end, 0)) for end in (left, left + LAST))
        return [i for _, i in self._sorted[first:last]]

    def _named(self, name: str) -> Iterator[int]:
        """Yield the tokens of a name: none, one, or several of the same name."""
        place = bisect_left(self._sorted, (name, 0))
        while place < len(self._sorted) and self._sorted[place][0] == name:
            yield self._sorted[place][1]
            place += 1

    def _extended(
        self, search: Search, b: Beginning, row: int, token: int, p: float, experts: Tensor | None
    ) -> Beginning:
        """Return a beginning extended by a token, which was chosen with the experts' weights."""
        name = self.names[token]
        left = b.left[len(name) :]
        begun = b.begun or (not left and name != b.left)
        # the tokens of a finished word do not count for the next word
        starts_over = begun and not b.begun and not b.left and search.within and name[0] in SPACES
        tokens, before = (0, None) if starts_over else (b.tokens, b.experts)
        summed = experts if before is None or experts is None else before + experts
        letters = b.letters + (" " + name.lstrip(SPACES) if name[0] in SPACES else name)
        return Beginning((*b.ids, token), p, left, letters, begun, tokens + 1, summed, row)

    def _forward(
        self, adapter: Attachable, ids: Tensor, cache: Any = None, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Sequence[Tensor | None]]:
        """Run one pass over prompts, or one more token of each row, (rows, C), behind a cache, with
        a mask if there is padding, (rows, length so far). Return the cache, and for each row (V,)
        the next token's probabilities and (n,) the experts' weights at the last position.
        """
        length = ids.shape[1]
        padding = {}
        if mask is not None:
            at = (mask.cumsum(dim=1) - 1)[:, -length:]
            # rows that only fill the batch may go on beyond the last position
            at = at.clamp(0, self.backbone.context_limit - 1)
            padding = {"attention_mask": mask, "position_ids": at}
        record: list[Routing] = []
        with attached(self.backbone, adapter, record):
            output = self.backbone.model(
                ids,
                use_cache=True,
                logits_to_keep=1,
                **{self.backbone.cache_name: cache},
                **padding,
            )
        cache = output[self.backbone.cache_name]
        logits = output.logits[:, -1].float()
        if not usable(logits).all():
            raise not_usable(self._whose)
        p = logits.softmax(dim=-1)
        if not record:
            return cache, p, [None] * len(p)
        weights = torch.stack([r.weights.view(len(p), length, -1)[:, -1] for r in record]).mean(
            dim=0
        )
        return cache, p, list(weights)


def _starts(name: str) -> bool:
    """Return whether a token begins a new word, with the space before it."""
    bare = name.lstrip(SPACES)
    return bare != name and bare[:1] not in NO_LETTERS


def left_padded(prompts: Sequence[Sequence[int]], filling: int) -> tuple[Tensor, Tensor]:
    """Return (B, C) ids padded on the left, and (B, C) a mask that is 0 for padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[filling] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    return ids, torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    )


@cache
def _letters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


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
        ids. Raises ModelError for a text that would grow longer than the base's context, or has a
        token that the base lacks, a temperature out of range, or scores that are not finite.
        """
        generation, limit = self.backbone.model.generation_config, self.backbone.context_limit
        ids = settings.get("input_ids", settings.get("inputs"))
        if ids is not None:
            given = ids.shape[-1]
            new = settings.get("max_new_tokens") or (settings.get("max_length") or given) - given
            if given + new > limit:
                raise ModelError(
                    f"{given} tokens of prompt and {new} more exceed the base's context of {limit}",
                    "Shorten the prompt, or ask for fewer tokens.",
                )
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
            problem = f"{self._whose} mixes the predictions of several, which no beams can search"
            raise ModelError(problem, "Set num_beams to 1.")
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
            problem = "several sequences for one text"
            raise ModelError(problem, "Give token ids instead; the result is ids too.")
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
        return {
            name: value.to(self.backbone.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
