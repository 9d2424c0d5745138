"""Loading of a run's personal models, of any kind, and batched inference with many on one base."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from coterie.core import names
from coterie.core.errors import CheckpointError, ModelError, Refused
from coterie.core.isolation import inference, isolated
from coterie.data.chats import ChatTemplate
from coterie.data.text_encoding import TextEncoder
from coterie.models.artifact import ABOUT, CLASSIFIER, model_folders, read_about_json
from coterie.models.backbone import Backbone
from coterie.models.slots import Attachable
from coterie.personal.classifier import ClassifierMixture, PersonalClassifier
from coterie.personal.inference.stacks import Mixed, Stacks
from coterie.personal.mixture import PersonalMixture
from coterie.personal.model import PersonalModel
from coterie.personal.text_inference import TextInference
from coterie.personal.word_search import Word

# selections of clients whose copies are kept: prompts and next tokens alternate between two
CHOICES = 2


class ManyModels:
    """Personal models, by client, on one backbone, computed in one batch. Each row gets the output
    of its client's model alone.

    Layouts may differ: smaller ranks are padded with zeros and missing experts get no weight, so
    that every row costs as much as the largest. A second, stacked copy of the adapters is kept. A
    batch of all models in order uses it directly; for another selection of clients their part is
    copied once, and the copies of the last two selections are kept.

    Raises:
        ModelError: There are no models, or they do not share one backbone, as those of `load_all`
            and `load_many` do.
    """

    def __init__(self, models: Mapping[str, PersonalModel]) -> None:
        self.models = dict(models)
        backbones = {id(model.backbone): model.backbone for model in self.models.values()}
        if len(backbones) != 1:
            problem = f"{len(self.models)} models on {len(backbones)} backbones cannot be one batch"
            remedy = "Load them by coterie.load_many, or give each the same backbone=."
            raise ModelError(problem, remedy)
        (self.backbone,) = backbones.values()
        self._places = {client: place for place, client in enumerate(self.models)}
        # models with fewer parts than others repeat one of theirs, without weight
        self.parts = max(len(model.adapters) for model in self.models.values())
        of_each = [
            [*model.adapters, *[model.adapters[0]] * (self.parts - len(model.adapters))]
            for model in self.models.values()
        ]
        self._all = Stacks.of(list(chain.from_iterable(of_each)), self.backbone)
        self._select = lru_cache(CHOICES)(self._selected)
        self._inference = TextInference(
            self.backbone, lambda: self.texts, f"a model of {', '.join(self.models)}"
        )

    def __repr__(self) -> str:
        return f"ManyModels({', '.join(self.models)})"

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer. Raises ModelError if it has none."""
        return self.backbone.tokenizer

    @property
    def chats(self) -> ChatTemplate:
        """The chat template, see `PersonalModel.chats`; models of one run have the same."""
        return next(iter(self.models.values())).chats

    @property
    def texts(self) -> TextEncoder:
        """The encoder of texts, as in training."""
        return self.chats.texts

    @inference()
    def __call__(
        self, input_ids: Tensor, clients: Sequence[str], weights: Any = (), **inputs: Any
    ) -> Any:
        """Run one forward pass over (B, C) int64 ids, with the arguments and the result of the
        base's (attention_mask, past_key_values, use_cache, ...). Each row is computed by the model
        of its client, with `weights_of` it now or as they were; one row of each client, in the
        order of `models`, is the fastest.

        Raises:
            ModelError: A client is unknown, or there is not one client for each row.
        """
        # caches of mixed models have a text's rows side by side, whatever texts are beside it
        adapter = self._of(clients, len(input_ids), apart=self.parts > 1)
        if isinstance(adapter, Mixed) and weights:
            adapter = Mixed(adapter.stacks, torch.stack(weights))
        return self._inference.forward(adapter, input_ids, inputs)

    @overload
    def generate(
        self, prompts: Mapping[str, str], clients: None = None, **settings: Any
    ) -> dict[str, str]: ...

    @overload
    def generate(self, prompts: Tensor, clients: Sequence[str], **settings: Any) -> Tensor: ...

    @inference()
    def generate(
        self,
        prompts: Mapping[str, str] | Tensor,
        clients: Sequence[str] | None = None,
        **settings: Any,
    ) -> dict[str, str] | Tensor:
        """Continue a prompt of each client in one batch by transformers' `generate`. Sampled rows
        share one stream of random numbers, so that texts differ from those that each model
        generates alone.

        Args:
            prompts: Text by client, or token ids (B, C), which `settings` may give an
                `attention_mask` with zeros for padding on the left.
            clients: For ids: the client whose model continues each row.
            settings: Any arguments of transformers' `generate`.

        Returns:
            The prompts and their continuations: text by client for text, (B, ...) ids for ids,
            where several sequences for a row follow each other.

        Raises:
            ModelError: See `__call__`; a text would grow longer than the base's context; or several
                sequences are asked for a text.
        """
        if isinstance(prompts, Tensor):
            adapter = self._of(clients or (), len(prompts))
            return self._inference.generate(adapter, {"input_ids": prompts} | settings)
        self._observe(prompts)
        adapter = self._of(tuple(prompts), len(prompts))
        texts = self._inference.generate_texts(adapter, list(prompts.values()), settings)
        by_client = dict(zip(prompts, texts, strict=True))
        self._observe(by_client, generated=True)
        return by_client

    @inference()
    def next_words(
        self, texts: str | Mapping[str, str], k: int = 3, follow: bool = True
    ) -> dict[str, list[Word]]:
        """Return the k most likely next words of a text of each client, or of one text for all, by
        client, best first; see `personal.words`. No weights follow a text for all, nor any text
        without `follow`. Raises ModelError for an unknown client.
        """
        if isinstance(texts, str):
            texts = dict.fromkeys(self.models, texts)
        elif follow:
            self._observe(texts, growing=True)
        adapter = self._of(tuple(texts), len(texts))
        suggestions = self._inference.next_words(adapter, list(texts.values()), k)
        return {
            client: _trimmed(self.models[client], words)
            for client, words in zip(texts, suggestions, strict=True)
        }

    def _observe(self, texts: Mapping[str, str], **how: bool) -> None:
        """See `PersonalModel.observe`: a text of each client."""
        for client in texts.keys() & self.models.keys():
            self.models[client].observe(texts[client], **how)

    def weights_of(self, client: str) -> Tensor:
        """Return the weights of a client's parts, (P,) float64: a copy, 0 for parts it lacks."""
        weights = self.models[client].weights
        return torch.cat([weights, weights.new_zeros(self.parts - len(weights))])

    def _of(self, clients: Sequence[str], rows: int, apart: bool = False) -> Attachable:
        """Return the adapter that computes each row by its client's model. Consecutive rows of the
        same client form one group if all groups are equally long, unless each is to be one.
        """
        if not len(clients) == rows > 0:
            problem = f"{len(clients)} clients for {rows} rows"
            raise ModelError(problem, "Name the client of each row.")
        if unknown := [client for client in clients if client not in self.models]:
            problem = f"no model of client {unknown[0]!r}"
            raise ModelError(problem, f"There are: {', '.join(self.models)}.")
        groups = tuple(clients)
        if not apart:
            groups = groups[:: math.gcd(*(len(list(run)) for _, run in groupby(clients)))]
        if len(groups) == 1 and self.parts == len(self.models[groups[0]].adapters):
            return self.models[groups[0]].fast
        stacks = self._all if groups == tuple(self.models) else self._select(groups)
        if self.parts == 1:
            return stacks
        return Mixed(stacks, torch.stack([self.weights_of(client) for client in groups]))

    def _selected(self, groups: tuple[str, ...]) -> Stacks:
        """Return a copy of the stacks of a selection of clients."""
        places = torch.tensor([self._places[client] for client in groups])
        parts = places[:, None] * self.parts + torch.arange(self.parts)
        return self._all.select(parts.flatten().to(self.backbone.device))


def _trimmed(model: PersonalModel, words: Sequence[Word]) -> list[Word]:
    """Return the words of one model without the weights of experts that only other models have."""
    count = model.layout.experts if model.layout.routed else 0
    return [replace(word, experts=word.experts[:count]) for word in words]


Personal = PersonalModel | PersonalClassifier


class Settings(TypedDict, total=False):
    """The settings of `load` for several models."""

    base: str | None
    backbone: Backbone | None
    dtype: Literal["fp32", "bf16"]
    device: str
    follow: bool


@isolated()
def load(
    run: Path | str,
    client: str | None = None,
    *,
    base: str | None = None,
    backbone: Backbone | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
    device: str = "cpu",
    follow: bool = False,
) -> Personal:
    """Load the personal model of a client.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> model = coterie.load("digits", "c0-0")
        >>> model.about.client, model.about.method
        ('c0-0', 'cobo')

    Args:
        run: A run's folder, or a client's folder in it (clients/ID).
        client: The client's id; not needed for a client's folder, or if there is only one client.
        base: Path or Hub id of the base; default: that in client.json.
        backbone: For language models, in place of `base`: a loaded base that several personal
            models share.
        dtype: For language models: dtype of the base if it is loaded here, "fp32" or "bf16".
        device: Device to load the model to.
        follow: Whether the weights of a mixture of models follow what its owner writes, from where
            they were the last time, see `PersonalModel.observe`; other models have none.

    Raises:
        CheckpointError: There is no such client, or its files are damaged or belong to another
            base.
        ModelError: The base cannot be loaded.
        Refused: A backbone is given for a model without one.
    """
    folder = folder_of(run, client).absolute()
    first, *others = model_folders(folder)
    if read_about_json(first).get("kind") != CLASSIFIER:
        model = (PersonalMixture if others else PersonalModel).load(
            folder, base=base, backbone=backbone, dtype=dtype, device=device
        )
        if follow and isinstance(model, PersonalMixture):
            model.follow(folder)
        return model
    if backbone is not None:
        raise Refused(f"{folder} holds a classifier, which has no backbone", "Leave it out.")
    return (ClassifierMixture if others else PersonalClassifier).load(folder, base, device)


@isolated()
def load_all(
    run: Path | str, clients: Sequence[str] | None = None, **settings: Unpack[Settings]
) -> dict[str, Personal]:
    """Load the personal models of several clients. Language models share a backbone, so that each
    needs little more memory than its adapter.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> models = coterie.load_all("digits", ["c0-0", "c3-1"])
        >>> sorted(models)
        ['c0-0', 'c3-1']

    By default, `clients` are all clients. Errors and the other arguments are those of `load`.
    """
    ids: list[str | None] = [*dict.fromkeys(map(names.normal, clients or ()))]
    if not ids:
        ids = [None] if (Path(run) / ABOUT).is_file() else [*clients_of(run)]
    models: dict[str, Personal] = {}
    for client in ids:
        model = load(run, client, **settings)
        models[client or model.about.client] = model
        settings["backbone"] = model.backbone if isinstance(model, PersonalModel) else None
    return models


@isolated()
def load_many(
    run: Path | str, clients: Sequence[str] | None = None, **settings: Unpack[Settings]
) -> ManyModels:
    """Load the language models of several clients, to compute all of them in one batch.

    Examples:
        >>> import coterie
        >>> run = coterie.run(
        ...     "synthetic",
        ...     out="words",
        ...     data={"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200},
        ...     method={"name": "fedavg", "rounds": 1, "local_steps": 1},
        ... )
        >>> models = coterie.load_many("words")
        >>> words = models.next_words("the water and the", k=1)
        >>> sorted(words)
        ['client-0', 'client-1']

    The arguments are those of `load_all`.

    Raises:
        Refused: The run's models are classifiers.
    """
    models = load_all(run, clients, **settings)
    if classifiers := [i for i, model in models.items() if not isinstance(model, PersonalModel)]:
        problem = f"{run} holds classifiers (of {classifiers[0]}), which share no backbone"
        raise Refused(problem, "Load them by load_all.")
    return ManyModels({client: cast(PersonalModel, model) for client, model in models.items()})


def clients_of(run: Path | str) -> list[str]:
    """Return the ids of the clients with a model in a run's folder. Raises CheckpointError."""
    return list(_folders(Path(run)))


def _folders(run: Path) -> dict[str, Path]:
    """Return the folder of each client's personal model, by client id. Raises CheckpointError."""
    folders = [path.parent for path in (run / "clients").glob(f"*/{ABOUT}")]
    if not folders:
        remedy = "Give the folder of a finished run, with clients/ in it (`coterie run`)."
        raise CheckpointError(f"{run} holds no personal models", remedy)
    return dict(sorted((_client_of(folder), folder) for folder in folders))


def _client_of(folder: Path) -> str:
    client = (
        read_about_json(folder).get("client")
        if names.is_cut(folder.name)
        else names.decoded(folder.name)
    )
    return names.normal(str(client))


def folder_of(run: Path | str, client: str | None) -> Path:
    """Return a client's folder, from a run's folder or the client's own. Raises CheckpointError."""
    run, client = Path(run), None if client is None else names.normal(client)
    if (run / ABOUT).is_file():
        if client not in (None, owner := read_about_json(run).get("client")):
            raise CheckpointError(
                f"{run} is the folder of client {owner!r}, not of {client!r}",
                "Give the run's folder.",
            )
        return run
    folders = _folders(run)
    if client is None and len(folders) == 1:
        return next(iter(folders.values()))
    if client not in folders:
        problem = (
            f"{run} has several clients" if client is None else f"{run} has no client {client!r}"
        )
        raise CheckpointError(problem, f"Its clients: {', '.join(folders)}.")
    return folders[client]
