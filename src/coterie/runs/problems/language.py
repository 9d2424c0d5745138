"""Language models on the texts of a recipe, and how trained routers treat real text, token by token
(CoMiGS, Fig. 3 and 12-17).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client.client import Client
from coterie.core import devices
from coterie.core.errors import DataError, ModelError
from coterie.core.metrics import PERPLEXITY
from coterie.core.protocol import ClientId
from coterie.core.result import Mixture, Routing
from coterie.core.tensors import Tensors
from coterie.data.chats import ChatSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.refusals import Refusals
from coterie.data.splits import Split, TokenSplit
from coterie.data.text_encoding import REMEDY, ControlTokens, TokenizerDigest, missing_row
from coterie.models import artifact
from coterie.models.adapter import Adapter
from coterie.models.artifact import Content
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.memory import Step
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.sections import LanguageSection

TOKENS = 80  # of each text
CLIENTS = 8  # at most: every model reads every text, and nobody looks at more pictures
END, PART = "¶", "◌"  # the end of a document, and a token that is but a part of a character


def look(
    clients: Sequence[ClientId],
    model: Callable[[ClientId], LanguageModel],
    splits: Mapping[ClientId, Split],
    tokenizer: Any,
) -> Routing:
    """Return the routing of the first `CLIENTS` clients' models at the beginnings of all their
    splits; a `model` is valid until the next one is requested.
    """
    clients = clients[:CLIENTS]
    windows = {i: beginning(splits[i]) for i in clients}
    texts = {i: pieces(tokenizer, rows.flatten().tolist()[:TOKENS]) for i, rows in windows.items()}
    experts, weights, depth, blocks = {}, {}, None, None
    for i in clients:
        reader = model(i)
        if reader.layout.routed:
            depth = len(reader.backbone.architecture.blocks)
            blocks = sorted({0, (depth - 1) // 2, depth - 1})
            experts[i] = Mixture(reader.layout.generalists, reader.layout.specialists)
            weights[i] = {text: _weights(reader, rows, blocks) for text, rows in windows.items()}
    return Routing(texts, experts, weights, depth, blocks)


def _weights(
    model: LanguageModel, windows: Tensor, blocks: Sequence[int]
) -> list[list[list[float]]]:
    """Return weights (blocks, tokens, n), rounded to three places."""
    weights = model.routing(windows)[list(blocks)].flatten(1, 2)[:, :TOKENS]
    return [[[round(w, 3) for w in token] for token in block] for block in weights.tolist()]


def beginning(split: Split) -> Tensor:
    """Return (W, C) int64: the split's first windows with `TOKENS` tokens, or all; or the first
    conversation or document with as many, or the longest.
    """
    if isinstance(split, ChatSplit):
        number = int(np.minimum(split.lengths, TOKENS).argmax())
        return torch.from_numpy(split.conversation(number))[None]
    count = min(-(-TOKENS // split.context), split.windows)
    windows: Tensor = split.take(np.arange(count))[:, :-1].to(torch.int64)
    return windows


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's share of the decoded text, with its spaces. A character of several
    byte-level tokens is assigned to the last of them; the others are `PART`. The end token is
    `END`.
    """
    texts: list[str] = []
    start, read = 0, ""  # of the document, and what is decoded of it so far
    for k, id in enumerate(ids):
        if id == tokenizer.eos_token_id:
            texts.append(END)
            start, read = k + 1, ""
            continue
        now = tokenizer.decode(
            ids[start : k + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if now.endswith("\ufffd"):
            texts.append(PART)
        else:
            texts.append(now.removeprefix(read))
            read = now
    return texts


@dataclass
class Language(LearningProblem):
    """Causal language models: LoRA adapters on one frozen backbone."""

    section: LanguageSection
    backbone: Backbone
    federation: Federation
    chat_template: str | None = None  # in place of the base's own
    content: Content = "text"
    control_tokens: ControlTokens = "text"
    long_steps: bool | None = None  # whether clients had better compute at once; None: not measured
    metric = PERPLEXITY

    def __post_init__(self) -> None:
        self.device, self.dtype = self.backbone.device, self.backbone.dtype

    @property
    def base(self) -> Layout:
        return self.section.layout()

    @property
    def bases(self) -> tuple[str, ...]:
        return (self.section.base,)

    def check(self, method: str, layout: Layout) -> None:
        if type(layout) is not Layout:
            raise ModelError(
                f"method.name: {method} trains whole networks, which a language model with "
                f"adapters does not have",
                "Use a classifier (model.kind: classifier with images, or text-classifier with "
                "labelled texts).",
            )
        if layout.local_part == "norms":
            raise ModelError(
                f"method.name: {method} keeps normalisation layers local, which adapters do not "
                f"have",
                "Use a classifier, or a method such as fedper or comigs-1g1s.",
            )

    def build(self, layout: Layout) -> LanguageModel:
        return LanguageModel(self.backbone, layout)

    def trainable(self, layout: Layout) -> Adapter:
        return Adapter(self.backbone.architecture, layout)

    def flops(self, layout: Layout, trained: bool) -> int:
        return self.backbone.flops_per_token(layout if trained else None, self.section.context)

    def keep(self, folder: Path, client: Client, layout: Layout, origin: artifact.Origin) -> None:
        assert isinstance(client.model, LanguageModel)
        self.write(folder, client.id, *client.model.settled(), origin)

    def write(
        self, folder: Path, id: ClientId, layout: Layout, tensors: Tensors, origin: artifact.Origin
    ) -> None:
        """Write a personal model that is `LanguageModel.settled` to a folder. Raises SaveError."""
        about = artifact.About(
            id,
            self.section.base,
            layout,
            self.section.context,
            **vars(origin),
            chat_template=self.chat_template,
            quantise=self.section.quantise,
            content=self.content,
            control_tokens=self.control_tokens,
            tokenizer=self._tokenizer_digest,
        )
        artifact.save(folder, about, tensors)

    @cached_property
    def _tokenizer_digest(self) -> TokenizerDigest:
        return TokenizerDigest.of(self.backbone.tokenizer)

    def look(
        self, clients: Sequence[ClientId], build: Callable[[ClientId], Client]
    ) -> Routing | None:
        shown = {i: build(i) for i in clients[:CLIENTS]}

        def model(id: ClientId) -> LanguageModel:
            client = shown[id]
            client.bind()  # clients of one layout take turns in one model
            assert isinstance(client.model, LanguageModel)
            return client.model

        if not any(model(i).layout.routed for i in shown):
            return None
        splits = {i: client.test for i, client in shown.items()}
        return look(tuple(shown), model, splits, self.backbone.tokenizer)


@lru_cache(maxsize=1)
def load_backbone(
    base: str, dtype: Literal["fp32", "bf16"], device: str, quantised: str | None = None
) -> Backbone:
    """Return the frozen base; the last one is kept for the next row of a comparison."""
    return Backbone.load(base, dtype=dtype, device=device, quantised=quantised)


def pick_dtype(dtype: Literal["auto", "fp32", "bf16"], device: str) -> Literal["fp32", "bf16"]:
    """Resolve `auto`: bf16 on accelerators that support it, else fp32, see `with_dtype`."""
    if dtype != "auto":
        return dtype
    on_cpu = torch.device(device).type == "cpu"
    return "bf16" if not on_cpu and devices.has_bf16(device) else "fp32"


def memory_step(
    section: LanguageSection, dtype: str, device: str, context: int | None = None
) -> Step:
    """Return a local step as far as its memory depends on it."""
    on_cpu, tokens = torch.device(device).type == "cpu", context or section.context
    return Step(section.base, tokens, section.layout(), dtype, section.quantise, on_cpu)


def fitted_federation(federation: Federation, backbone: Backbone) -> Federation:
    """Return a federation with the texts of all clients `fitted`. Raises DataError."""
    everyone: dict[str, ClientData] = {}
    with Refusals() as refusals:
        for id, data in federation.everyone.items():
            with refusals.gather():
                everyone[id] = fitted(data, backbone)
    return federation.with_data(everyone)


def fitted(data: ClientData, backbone: Backbone) -> ClientData:
    """Return a client's texts, in rows of one document each if documents in one row would see each
    other. Raises DataError for a token that the base lacks.
    """
    with Refusals() as refusals:
        for split in data.splits:
            with refusals.gather(f"client {data.id!r}, {split.name}: "):
                _check(backbone, split)
    packed = any(isinstance(split, ChatSplit) and split.packing for split in data.splits)
    if not packed or backbone.packs:
        return data
    chats = [replace(s, packing=False) if isinstance(s, ChatSplit) else s for s in data.splits]
    return ClientData(data.id, *chats)


def _check(backbone: Backbone, split: Split) -> None:
    """Refuse a token without a row in the base's embedding. Raises DataError."""
    assert isinstance(split, TokenSplit | ChatSplit)
    largest, rows = int(split.tokens.max(initial=0)), backbone.architecture.vocabulary
    if largest >= rows:
        raise DataError(missing_row(backbone.tokenizer, largest, rows), REMEDY)
