"""What is learned: everything in which language models and image classifiers differ, behind one surface."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from coterie import personal
from coterie.client import Client, Model, Trainable
from coterie.data.dealing import Dealing
from coterie.data.examples import ExampleSplit
from coterie.data.federation import Federation
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.section import Section
from coterie.errors import ModelError, RecipeError
from coterie.evaluation import ACCURACY, PERPLEXITY, Metric
from coterie.models.adapter import Adapter
from coterie.models.architecture import tokenizer
from coterie.models.backbone import Backbone
from coterie.models.classifier import Classifier, NetworkShape, Shape
from coterie.models.common import CommonExpert, Normalisation, pretrained, trained
from coterie.models.generalising import (
    AdversarialClassifier,
    AdversarialLayout,
    ExtendedClassifier,
    StochasticClassifier,
    StochasticLayout,
)
from coterie.models.language import LanguageModel
from coterie.models.layout import CommonLayout, Layout
from coterie.models.networks import statistics
from coterie.models.pool import PoolClassifier, PoolLayout
from coterie.models.text import TextShape
from coterie.protocol import ClientId
from coterie.recipe import ClassifierSection, CommonSection, LanguageSection, Recipe, TextClassifierSection
from coterie.reports.looking import CLIENTS, look
from coterie.tensors import Tensors, to_bytes


class Modality(ABC):
    """A kind of model on the data of a recipe, loaded and checked."""

    metric: ClassVar[Metric]
    device: torch.device
    dtype: torch.dtype
    federation: Federation

    @property
    def threads(self) -> int | None:
        """Threads that suit models so small that waiting for a second one costs more than it does; None for as many as PyTorch has."""
        return None

    @property
    @abstractmethod
    def base(self) -> Layout:
        """The layout before a method says what it needs."""

    @abstractmethod
    def check(self, method: str, layout: Layout) -> None:
        """Refuse a layout that models of this kind cannot have. Raises ModelError."""

    @abstractmethod
    def build(self, layout: Layout) -> Model:
        """A model for the clients of one layout to take turns in."""

    @abstractmethod
    def trainable(self, layout: Layout) -> Trainable:
        """The trainable part of a model."""

    @abstractmethod
    def flops(self, layout: Layout, trained: bool) -> int:
        """Of one prediction's forward pass; `trained`: whether the method trains anything at all."""

    def scores(self, layout: Layout) -> Tensors:
        """The form of a client's score of a split, see `Client.score`, as its device sends it with the split's name."""
        score = torch.empty(self.metric.totals, dtype=torch.float64)
        return {"valid": score, "test": score}

    @property
    def fingerprint(self) -> str | None:
        """Of what everybody has from the beginning, where it may become another one without a word in the recipe."""
        return None

    @property
    def bases(self) -> tuple[str, ...]:
        """The pretrained bases that it is made of: Hub ids, local folders, or `embedded`."""
        return ()

    @property
    def once_bytes(self) -> int:
        """What everybody has from the beginning, and not from the server: sent once, if at all."""
        return 0

    @abstractmethod
    def keep(self, folder: Path, client: Client, layout: Layout, origin: personal.Origin) -> None:
        """Write the client's personal model to a folder of its own."""

    def look(self, clients: Mapping[ClientId, Client]) -> Any | None:
        """What every client's router does with the beginnings of all test texts; None where there is no router."""
        return None


@dataclass
class Language(Modality):
    """Causal language models: LoRA adapters on one frozen backbone."""

    section: LanguageSection
    backbone: Backbone
    federation: Federation
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
                f"method.name: {method} is made of whole networks, which a language model with adapters does not have",
                "Use a classifier (model.kind: classifier with images, or text-classifier with labelled texts).",
            )

    def build(self, layout: Layout) -> LanguageModel:
        return LanguageModel(self.backbone, layout)

    def trainable(self, layout: Layout) -> Adapter:
        return Adapter(self.backbone.architecture, layout)

    def flops(self, layout: Layout, trained: bool) -> int:
        return self.backbone.flops_per_token(self.build(layout).adapter if trained else None, self.section.context)

    def keep(self, folder: Path, client: Client, layout: Layout, origin: personal.Origin) -> None:
        assert isinstance(client.model, LanguageModel)
        self.write(folder, client.id, *client.model.settled(), origin)

    def write(self, folder: Path, id: ClientId, layout: Layout, tensors: Tensors, origin: personal.Origin) -> None:
        """Write a personal model that needs no pool, see `LanguageModel.settled`, to a folder. Raises SaveError."""
        personal.save(folder, personal.About(id, self.section.base, layout, self.section.context, **vars(origin)), tensors)

    def look(self, clients: Mapping[ClientId, Client]) -> Any | None:
        shown = {i: clients[i] for i in islice(clients, CLIENTS)}
        if not any(isinstance(c.model, LanguageModel) and c.model.layout.routed for c in shown.values()):
            return None

        def model(id: ClientId) -> LanguageModel:
            client = shown[id]
            client.bind()  # clients of one layout take turns in one model
            assert isinstance(client.model, LanguageModel)
            return client.model

        return look(tuple(shown), model, {i: client.test for i, client in shown.items()}, self.backbone.tokenizer)


@dataclass
class Examples(Modality):
    """Classifiers of images or of texts: every client has a whole network, or a share of a pool of them.

    Args:
        shape: Of a network.
        common: The expert that everybody has, where the recipe names one.
        section: Of the recipe.
        names: Of the classes, if they have some.
    """

    shape: Shape
    common: CommonExpert | None
    section: ClassifierSection | TextClassifierSection
    device: torch.device
    federation: Federation
    names: tuple[str, ...] = ()
    metric = ACCURACY
    dtype = torch.float32

    @property
    def base(self) -> Layout:
        return Layout()

    def check(self, method: str, layout: Layout) -> None:
        if not layout.plain:
            raise ModelError(
                f"method.name: {method} is made of LoRA experts, which a classifier does not have",
                "Use a language model (model.kind: language with texts), or a method such as local, fedavg, ditto, ifca, cobo or ddome.",
            )
        if self.common is None and isinstance(layout, PoolLayout) and layout.gated:
            raise ModelError(f"method.name: the gate of {method} needs embeddings", "Say what makes them: model.common.")
        if self.common is None and isinstance(layout, CommonLayout):
            raise ModelError(f"method.name: {method} needs a common expert", "Say where it comes from: model.common.")
        self._start(layout.start if isinstance(layout, PoolLayout) else self.section.start)

    def build(self, layout: Layout) -> Classifier | PoolClassifier:
        return self._model(layout, self.device)

    def trainable(self, layout: Layout) -> Classifier | PoolClassifier:
        return self._model(layout, torch.device("cpu"))

    def _model(self, layout: Layout, device: torch.device) -> Classifier | PoolClassifier:
        match layout:
            case PoolLayout():
                return PoolClassifier(self.shape, layout, self.common, self._start(layout.start), self.section.gate_width, device)
            case StochasticLayout():
                return StochasticClassifier(self.shape, layout, device, self._start(self.section.start), self._shared)
            case AdversarialLayout():
                return AdversarialClassifier(self.shape, layout, device, self._start(self.section.start), self._shared)
            case CommonLayout():
                assert self.common is not None
                return self.common.classifier(device)
            case _:
                return Classifier(self.shape, device, self._start(self.section.start), self._shared)

    def _start(self, choice: Literal["auto", "random", "common"]) -> Tensors | None:
        """Where networks start: None for at random. Raises ModelError for a common expert that is there not, or another network."""
        own = self.common.tensors if choice != "random" and self.common is not None else None
        if own is not None:
            network = self.shape.build("meta")
            needed = dict(network.named_parameters()) | statistics(network)
            if {name: t.shape for name, t in needed.items()} != {name: t.shape for name, t in own.items()}:
                own = None
        if choice == "common" and own is None:
            raise ModelError(
                "start: common, but the common expert is another network", "Leave model.common.network out, or start at random."
            )
        return own

    @property
    def _shared(self) -> bool:
        """Whether running statistics travel with the network."""
        if self.section.statistics == "auto":
            return bool(self.federation.unseen)
        return self.section.statistics == "shared"

    @property
    def threads(self) -> int | None:
        return 1 if isinstance(self.shape, NetworkShape) and self.shape.network == "mlp" else None

    @property
    def fingerprint(self) -> str | None:
        return None if self.common is None else blake2b(to_bytes(self.common.tensors), digest_size=8).hexdigest()

    @property
    def bases(self) -> tuple[str, ...]:
        shapes = (self.shape, self.common.shape if self.common is not None else None)
        return tuple(dict.fromkeys(shape.base for shape in shapes if isinstance(shape, TextShape)))

    @property
    def once_bytes(self) -> int:
        return self.common.nbytes if self.common is not None else 0

    def flops(self, layout: Layout, trained: bool) -> int:
        return self.trainable(layout).flops()

    def scores(self, layout: Layout) -> Tensors:
        choices = (
            {"choices": torch.empty(2, self.shape.classes, layout.pool, dtype=torch.float64)} if isinstance(layout, PoolLayout) else {}
        )
        return super().scores(layout) | choices

    def keep(self, folder: Path, client: Client, layout: Layout, origin: personal.Origin) -> None:
        assert isinstance(client.model, Classifier | PoolClassifier)
        assert isinstance(client.data.test, ExampleSplit)
        model = client.model.plain() if isinstance(client.model, ExtendedClassifier) else client.model
        if model is not None:  # of texts with a head of their own nothing plain predicts alike
            personal.save_classifier(folder, client.id, model, client.data.test, self.names, origin)


@lru_cache(maxsize=1)
def load_backbone(base: str, dtype: Literal["fp32", "bf16"], device: str) -> Backbone:
    """The frozen base; the last one is kept, so that the rows of a comparison share it."""
    return Backbone.load(base, dtype=dtype, device=device)


def pick_device(device: str) -> str:
    """`auto`: CUDA where there is one.

    Raises:
        RecipeError: CUDA is asked for and is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RecipeError("recipe", [f"model.device: {device} is not available here; use auto or cpu"])
    return device


def pick_dtype(dtype: Literal["auto", "fp32", "bf16"], device: str) -> Literal["fp32", "bf16"]:
    """`auto`: bf16 on CUDA; fp32 on a CPU, where bf16 without native support is many times slower."""
    if dtype != "auto":
        return dtype
    return "bf16" if device.startswith("cuda") else "fp32"


def load(recipe: Recipe) -> Modality:
    """The base and the data of a recipe.

    Raises:
        Refused: The base or the data will not do.
    """
    device = pick_device(recipe.model.device)
    match recipe.model, recipe.data:
        case ClassifierSection() as section, Images() as data:
            federation = data.load(order_seed=recipe.seed)
            shape = section.shape(data.shape, data.classes)
            common = _common(section.common, section.common_shape(data.shape, data.classes), federation, data, device)
            return Examples(shape, common, section, torch.device(device), federation, data.names)
        case TextClassifierSection() as section, LabelledTexts() as data:
            federation = data.load(tokenizer(section.base), section.length, order_seed=recipe.seed)
            common = _common(section.common, section.common_shape(data.classes), federation, data, device)
            return Examples(section.shape(data.classes), common, section, torch.device(device), federation, data.names)
        case LanguageSection() as section, Section() as data:
            backbone = load_backbone(section.base, pick_dtype(section.dtype, device), device)
            if section.context > backbone.context_limit:
                problem = f"model.context: {section.context} tokens, but {section.base} allows {backbone.context_limit}"
                raise ModelError(problem, f"Set model.context to at most {backbone.context_limit}.")
            return Language(section, backbone, data.load(backbone.tokenizer, section.context, order_seed=recipe.seed))
    raise AssertionError("the recipe checked that data and model fit")


def distant(recipe: Recipe, federation: Federation) -> Modality:
    """What a server knows of the base and the data of a recipe: shapes, from configurations, and who the clients are. No weights of a base.

    A common expert is everybody's, and so the server's too: from a file that the recipe names, or trained on the recipe's public examples.

    Args:
        recipe: Resolved.
        federation: The clients, whose data are on their devices.

    Raises:
        Refused: The configuration of the base, the common expert or the public examples will not do.
    """
    match recipe.model, recipe.data:
        case ClassifierSection() as section, Images() as data:
            shape, wanted = section.shape(data.shape, data.classes), section.common_shape(data.shape, data.classes)
            public = data.load(order_seed=recipe.seed) if _trained_here(section.common) else federation
            return Examples(
                shape, _common(section.common, wanted, public, data, "cpu"), section, torch.device("cpu"), federation, data.names
            )
        case TextClassifierSection() as section, LabelledTexts() as data:
            wide = _trained_here(section.common)
            public = data.load(tokenizer(section.base), section.length, order_seed=recipe.seed) if wide else federation
            common = _common(section.common, section.common_shape(data.classes), public, data, "cpu")
            return Examples(section.shape(data.classes), common, section, torch.device("cpu"), federation, data.names)
        case LanguageSection() as section, Section():
            return Language(section, Backbone.outlined(section.base), federation)
    raise AssertionError("the recipe checked that data and model fit")


def _trained_here(section: CommonSection | None) -> bool:
    return section is not None and section.pretraining is not None


def _common(
    section: CommonSection | None, shape: NetworkShape | TextShape, federation: Federation, data: Dealing, device: str
) -> CommonExpert | None:
    """The common expert of a recipe. Raises Refused."""
    if section is None:
        return None
    if section.path is not None:
        own = Normalisation(section.mean, section.std) if section.mean is not None and section.std is not None else None
        return pretrained(_below(section.path), shape, device, Normalisation(data.mean, data.std), own)
    if section.pretraining is None:
        if isinstance(shape, TextShape):  # its base is pretrained
            return CommonExpert(shape, shape.initial(0), device)
        raise ModelError(
            "model.common: neither a path nor pretraining", "Give model.common.path, or model.common.pretraining with data.public."
        )
    if federation.public is None:
        raise ModelError("model.common.pretraining: there are no public examples", "Set aside some that no client gets: data.public.")
    assert isinstance(federation.public, ExampleSplit)
    return trained(shape, federation.public, section.pretraining, device)


def _below(path: str) -> Path:
    """A file by a path that may also start at $COTERIE_DATA, or beside it."""
    roots = [Path(), *(root for data in [os.environ.get("COTERIE_DATA")] if data for root in (Path(data), Path(data).parent))]
    return next((root / path for root in roots if (root / path).is_file()), Path(path))
