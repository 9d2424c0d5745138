"""Classifiers on the labelled examples of a recipe."""

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
from coterie.models import artifact, text
from coterie.models.artifact import save_classifier
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert
from coterie.models.generalising import (
    AdversarialClassifier,
    AdversarialLayout,
    ExtendedClassifier,
    PrototypeClassifier,
    PrototypeLayout,
    StochasticClassifier,
    StochasticLayout,
)
from coterie.models.layout import CommonLayout, Layout, PoolLayout
from coterie.models.network_tensors import statistics
from coterie.models.networks import NetworkShape, Shape
from coterie.models.pool import PoolClassifier
from coterie.models.text import TextShape
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.sections import ClassifierSection, TextClassifierSection


@dataclass
class Classification(LearningProblem):
    """Classifiers of images or texts: every client has a whole network, or a share of a pool."""

    shape: Shape
    common: CommonExpert | None  # the expert that all clients have, if the recipe names one
    section: ClassifierSection | TextClassifierSection  # of the recipe
    device: torch.device
    federation: Federation
    names: tuple[str, ...] = ()  # of the classes, if any
    encoder: TextShape | None = None  # of texts whose features are classified
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
            problem = f"method.name: the gate of {method} needs embeddings"
            raise ModelError(problem, "Name the model that makes them: model.common.")
        if self.common is None and isinstance(layout, CommonLayout):
            problem = f"method.name: {method} needs a common expert"
            raise ModelError(problem, "Give it: model.common.")
        self._start(layout.start if isinstance(layout, PoolLayout) else self.section.start)

    def build(self, layout: Layout) -> Classifier | PoolClassifier:
        return self._model(layout, self.device)

    def trainable(self, layout: Layout) -> Classifier | PoolClassifier:
        return self._model(layout, torch.device("cpu"))

    def _model(self, layout: Layout, device: torch.device) -> Classifier | PoolClassifier:
        shape, common, section = self.shape, self.common, self.section
        if isinstance(layout, PoolLayout):
            start = self._start(layout.start)
            return PoolClassifier(shape, layout, common, start, section.gate_width, device)
        if isinstance(layout, CommonLayout):
            assert common is not None
            return common.classifier(device)
        start = self._start(section.start)
        match layout:
            case StochasticLayout():
                return StochasticClassifier(shape, layout, device, start, self._shared)
            case PrototypeLayout():
                return PrototypeClassifier(shape, layout, device, start, self._shared)
            case AdversarialLayout():
                return AdversarialClassifier(shape, layout, device, start, self._shared)
            case _:
                part = layout.local_part
                shared = self._shared and part != "norms"  # whose statistics are their own
                return Classifier(shape, device, start, shared, part)

    def _start(self, choice: Literal["auto", "random", "common"]) -> Tensors | None:
        """Return networks' initial tensors; None: random. Raises ModelError if none fit."""
        if choice != "random" and self.common is not None:
            network = self.shape.build("meta")
            needed = dict(network.named_parameters()) | statistics(network)
            shapes = {name: t.shape for name, t in self.common.tensors.items()}
            if shapes == {name: t.shape for name, t in needed.items()}:
                return self.common.tensors
        if choice == "common":
            problem = "start: common, but the common expert has a different network"
            raise ModelError(problem, "Leave model.common.network out, or start at random.")
        return None

    @property
    def _shared(self) -> bool:
        if self.section.statistics == "auto":
            return bool(self.federation.unseen)
        return self.section.statistics == "shared"

    @property
    def threads(self) -> int | None:
        return 1 if isinstance(self.shape, NetworkShape) and self.shape.network == "mlp" else None

    @property
    def fingerprint(self) -> str | None:
        if self.common is None:
            return None
        return blake2b(to_bytes(self.common.tensors), digest_size=8).hexdigest()

    @property
    def bases(self) -> tuple[str, ...]:
        shapes = (self.shape, self.encoder, self.common.shape if self.common is not None else None)
        return tuple(dict.fromkeys(shape.base for shape in shapes if isinstance(shape, TextShape)))

    @property
    def once_bytes(self) -> int:
        return nbytes(self.common.tensors) if self.common is not None else 0

    def flops(self, layout: Layout, trained: bool) -> int:
        encoding = 0 if self.encoder is None else text.flops(self.encoder)
        return encoding + self.trainable(layout).flops()

    def scores(self, layout: Layout) -> Tensors:
        scores = super().scores(layout)
        if not isinstance(layout, PoolLayout):
            return scores
        choices = torch.empty(2, self.shape.classes, layout.pool, dtype=torch.float64)
        return scores | {"choices": choices}

    def keep(self, folder: Path, client: Client, layout: Layout, origin: artifact.Origin) -> None:
        assert isinstance(client.model, Classifier | PoolClassifier)
        assert isinstance(client.data.test, ExampleSplit)
        model: Classifier | PoolClassifier | None = client.model
        if isinstance(model, ExtendedClassifier):
            model = model.plain()
        if model is not None:  # of texts with a head of their own nothing plain predicts alike
            test = client.data.test
            save_classifier(folder, client.id, model, test, self.names, origin, self.encoder)
