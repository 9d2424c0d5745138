"""Classifiers on the labelled examples of a recipe."""

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import torch

from coterie.client.client import Client
from coterie.core.errors import ModelError
from coterie.core.metrics import ACCURACY
from coterie.core.tensors import Tensors, nbytes, to_bytes
from coterie.data.examples import ExampleSplit
from coterie.data.federation import Federation
from coterie.data.partition import Partitioner
from coterie.models import artifact
from coterie.models.classifier import Classifier
from coterie.models.classifier_artifact import save_classifier
from coterie.models.common import CommonExpert, Normalisation, trained
from coterie.models.generalising import (
    AdversarialClassifier,
    AdversarialLayout,
    ExtendedClassifier,
    StochasticClassifier,
    StochasticLayout,
)
from coterie.models.layout import CommonLayout, Layout, PoolLayout
from coterie.models.network_tensors import load, statistics
from coterie.models.networks import NetworkShape, Shape
from coterie.models.pool import PoolClassifier
from coterie.models.text import TextShape
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.sections import ClassifierSection, CommonSection, TextClassifierSection


@dataclass
class Classification(LearningProblem):
    """Classifiers of images or of texts: every client has a whole network, or a share of a pool of
    them.

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
                f"method.name: {method} trains LoRA experts, which a classifier does not have",
                "Use a language model (model.kind: language with texts), or a method such as "
                "local, fedavg, ditto, ifca, cobo or ddome.",
            )
        if self.common is None and isinstance(layout, PoolLayout) and layout.gated:
            raise ModelError(
                f"method.name: the gate of {method} needs embeddings",
                "Name the model that makes them: model.common.",
            )
        if self.common is None and isinstance(layout, CommonLayout):
            raise ModelError(
                f"method.name: {method} needs a common expert",
                "Give it: model.common.",
            )
        self._start(layout.start if isinstance(layout, PoolLayout) else self.section.start)

    def build(self, layout: Layout) -> Classifier | PoolClassifier:
        return self._model(layout, self.device)

    def trainable(self, layout: Layout) -> Classifier | PoolClassifier:
        return self._model(layout, torch.device("cpu"))

    def _model(self, layout: Layout, device: torch.device) -> Classifier | PoolClassifier:
        match layout:
            case PoolLayout():
                return PoolClassifier(
                    self.shape,
                    layout,
                    self.common,
                    self._start(layout.start),
                    self.section.gate_width,
                    device,
                )
            case StochasticLayout():
                return StochasticClassifier(
                    self.shape, layout, device, self._start(self.section.start), self._shared
                )
            case AdversarialLayout():
                return AdversarialClassifier(
                    self.shape, layout, device, self._start(self.section.start), self._shared
                )
            case CommonLayout():
                assert self.common is not None
                return self.common.classifier(device)
            case _:
                return Classifier(self.shape, device, self._start(self.section.start), self._shared)

    def _start(self, choice: Literal["auto", "random", "common"]) -> Tensors | None:
        """Where networks start: None for at random. Raises ModelError for a common expert that
        is there not, or another network.
        """
        start = self.common.tensors if choice != "random" and self.common is not None else None
        if start is not None:
            network = self.shape.build("meta")
            needed = dict(network.named_parameters()) | statistics(network)
            if {name: t.shape for name, t in needed.items()} != {
                name: t.shape for name, t in start.items()
            }:
                start = None
        if choice == "common" and start is None:
            raise ModelError(
                "start: common, but the common expert has a different network",
                "Leave model.common.network out, or start at random.",
            )
        return start

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
        return (
            None
            if self.common is None
            else blake2b(to_bytes(self.common.tensors), digest_size=8).hexdigest()
        )

    @property
    def bases(self) -> tuple[str, ...]:
        shapes = (self.shape, self.common.shape if self.common is not None else None)
        return tuple(dict.fromkeys(shape.base for shape in shapes if isinstance(shape, TextShape)))

    @property
    def once_bytes(self) -> int:
        return nbytes(self.common.tensors) if self.common is not None else 0

    def flops(self, layout: Layout, trained: bool) -> int:
        return self.trainable(layout).flops()

    def scores(self, layout: Layout) -> Tensors:
        choices = (
            {"choices": torch.empty(2, self.shape.classes, layout.pool, dtype=torch.float64)}
            if isinstance(layout, PoolLayout)
            else {}
        )
        return super().scores(layout) | choices

    def keep(self, folder: Path, client: Client, layout: Layout, origin: artifact.Origin) -> None:
        assert isinstance(client.model, Classifier | PoolClassifier)
        assert isinstance(client.data.test, ExampleSplit)
        model = (
            client.model.plain() if isinstance(client.model, ExtendedClassifier) else client.model
        )
        if model is not None:  # of texts with a head of their own nothing plain predicts alike
            save_classifier(folder, client.id, model, client.data.test, self.names, origin)


def _trained_here(section: CommonSection | None) -> bool:
    return section is not None and section.pretraining is not None


def _common(
    section: CommonSection | None,
    shape: NetworkShape | TextShape,
    federation: Federation,
    data: Partitioner,
    device: str,
) -> CommonExpert | None:
    """Return the common expert of a recipe. Raises Refused."""
    if section is None:
        return None
    if section.path is not None:
        preprocessing = (
            Normalisation(section.mean, section.std)
            if section.mean is not None and section.std is not None
            else None
        )
        tensors, here = load(_below(section.path), shape), Normalisation(data.mean, data.std)
        return CommonExpert(shape, tensors, device, here, preprocessing)
    if section.pretraining is None:
        if isinstance(shape, TextShape):  # its base is pretrained
            return CommonExpert(shape, shape.initial(0), device)
        raise ModelError(
            "model.common: gives neither a path nor pretraining",
            "Give model.common.path, or model.common.pretraining with data.public.",
        )
    if federation.public is None:
        raise ModelError(
            "model.common.pretraining: the data have no public examples",
            "Set data.public: examples that no client gets.",
        )
    assert isinstance(federation.public, ExampleSplit)
    return trained(shape, federation.public, section.pretraining, device)


def _below(path: str) -> Path:
    """Return a file by a path that may also start at $COTERIE_DATA, or beside it."""
    roots = [Path()]
    if data := os.environ.get("COTERIE_DATA"):
        roots += [Path(data), Path(data).parent]
    return next((root / path for root in roots if (root / path).is_file()), Path(path))
