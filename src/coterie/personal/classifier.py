"""A personal classifier in use: it predicts classes and, with a pool, reports the chosen expert."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import CheckpointError
from coterie.core.files import load as load_tensors
from coterie.core.isolation import inference
from coterie.core.names import encoded
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import MOST_OF_ONE, Named, prefixed, under
from coterie.data.examples import Examples
from coterie.models import artifact
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert
from coterie.models.interpolation import interpolate
from coterie.models.network_tensors import check, check_size
from coterie.models.networks import NetworkShape
from coterie.models.pool import PoolClassifier
from coterie.models.text import TextShape, features
from coterie.personal.samples import Samples, as_samples
from coterie.personal.sampling import not_usable, usable

_ROWS = 32  # samples at a time


@dataclass(frozen=True)
class Prediction:
    """The most likely class of a sample: its number `label`, its name and its probability.

    Args:
        expert: The number in the pool of the client's expert that the gate scores highest; None
            without a gate.
    """

    label: int
    name: str
    probability: float
    expert: int | None


class PersonalClassifier:
    """A client's trained classifier: its own network, or experts of a pool with the gate and the
    common expert that computes the gate's embeddings.

    Args:
        model: The model with the client's values.
        about: The origin of the model: client, method, recipe and rounds.
    """

    def __init__(self, model: Classifier | PoolClassifier, about: artifact.AboutClassifier) -> None:
        self.model, self.about = model, about

    def __repr__(self) -> str:
        experts = f", experts={self.experts}" if self.experts else ""
        return (
            f"{type(self).__name__}(client={self.about.client!r}, method={self.about.method!r}, "
            f"network={self.shape.title!r}{experts})"
        )

    @property
    def shape(self) -> NetworkShape | TextShape:
        """The shape of its network, or of each of its experts; of texts with an encoder."""
        return self.about.encoder or self.about.network

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def experts(self) -> tuple[int, ...]:
        """The numbers of its experts in the pool; () without a pool."""
        return self.about.pool.experts if self.about.pool else ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the log-probability of each class, (B, classes).

        Args:
            x: (B, C, H, W) float32, normalised by `about.mean` and `about.std`; or (B, T) int64
                token ids, -1 after the end.

        Raises:
            ModelError: `x` has another shape or type.
        """
        return self.answer(x)[0]

    @inference()
    def answer(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities as `__call__`, and (B,) the number of the client's expert that
        the gate scores highest, None without a gate. Raises ModelError also for NaN.
        """
        outputs = self._answer(x)
        if not usable(outputs[0]).all():
            raise not_usable(f"the classifier of {self.about.client!r}")
        return outputs

    def _answer(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.shape.check_inputs(x)
        if self.about.encoder is not None and len(x):
            values = features(x, self.about.encoder, str(self.device)).numpy()
            split = Samples((), values).split(self.about.mean, self.about.std, 1)
            x = split.take(split.rows).x
        batch = Examples(x, torch.zeros(len(x), dtype=torch.int64))
        if isinstance(self.model, Classifier):
            inputs, _ = self.model.checked(batch)
            return self.model(inputs).log_softmax(dim=1), None
        if self.model.embed is None:
            return self.model.predict(batch)[0], None
        return self.model.predict(replace(batch, embedding=self.model.embed(batch)))

    @inference()
    def predict(self, given: Any) -> list[Prediction]:
        """Predict the class of each sample.

        Args:
            given: A path of a file or folder of images or texts, or several; images as an array or
                tensor; or a text, or several, as `str`: see `personal.samples`.

        Raises:
            DataError: The input is empty, or of an unsupported kind.
            ModelError: See `answer`.
        """
        predictions: list[Prediction] = []
        for batch in self.batches(given):
            outputs, experts = self.answer(batch.x)
            best, labels = outputs.exp().max(dim=1)
            numbers = [None] * len(batch) if experts is None else experts.tolist()
            for label, probability, expert in zip(
                labels.tolist(), best.tolist(), numbers, strict=True
            ):
                predictions.append(Prediction(label, self.about.names[label], probability, expert))
        return predictions

    def batches(self, given: Any) -> Iterator[Examples]:
        """Return the samples as batches for `answer`, with the label 0; see `predict`."""
        about = self.about
        normal = ((), ()) if about.encoder else (about.mean, about.std)
        split = as_samples(given, self.shape).split(*normal, self.shape.classes)
        return split.scoring(_ROWS)

    @classmethod
    def load(
        cls, folder: Path, base: str | None = None, device: str = "cpu"
    ) -> "PersonalClassifier":
        """Return the classifier in a client's folder. `base` is the path of the base of a text
        classifier, if not the one in client.json.

        Raises:
            CheckpointError: A file is missing or damaged, or the files do not fit each other.
            ModelError: The base of a text classifier cannot be loaded.
            Refused: A base is given for an image classifier.
        """
        artifact.verify(folder)
        about = artifact.read_classifier(folder)
        about = about if base is None else about.at(base)
        source = folder / artifact.CLASSIFIER_WEIGHTS
        tensors, _ = load_tensors(source, MOST_OF_ONE)
        model = _built(about, tensors, str(source), device)
        common = {}
        if about.pool and about.pool.common:
            common = prefixed(artifact.COMMON, under(artifact.COMMON, tensors))
        values = {name: tensor for name, tensor in tensors.items() if name not in common}
        artifact.fill(artifact.own_tensors(model), values, str(source))
        return cls(model, about)


class ClassifierMixture(PersonalClassifier):
    """A client's classifiers, by method, whose predictions are mixed: p = sum_k w_k p_k."""

    def __init__(
        self, parts: Mapping[str, PersonalClassifier], about: artifact.AboutMixture
    ) -> None:
        self.parts, first = dict(parts), next(iter(parts.values()))
        whole = replace(first.about, pool=None, method=about.method, round=about.round)
        super().__init__(first.model, whole)
        self.weights = torch.tensor([about.weights[name] for name in parts], dtype=torch.float64)

    def _answer(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities; experts are those of a part alone."""
        log_probs = torch.stack([part._answer(x)[0] for part in self.parts.values()])
        return interpolate(log_probs.double(), self.weights).to(log_probs.dtype), None

    @classmethod
    def load(
        cls, folder: Path, base: str | None = None, device: str = "cpu"
    ) -> "ClassifierMixture":
        """Return the mixture in a client's folder, see `PersonalClassifier.load`."""
        artifact.verify(folder)
        about = artifact.read_mixture(folder)
        parts = {
            name: PersonalClassifier.load(folder / encoded(name), base, device)
            for name in about.weights
        }
        inputs = {(part.about.names, part.about.mean, part.about.std) for part in parts.values()}
        if len(inputs) > 1:
            problem = f"{folder}: its parts differ in the names of classes, or in mean and std"
            raise CheckpointError(problem, artifact.FOREIGN)
        return cls(parts, about)


def _built(
    about: artifact.AboutClassifier, tensors: Named, source: str, device: str
) -> Classifier | PoolClassifier:
    """Return a model of the saved layout; only the common expert has values. Raises ModelError."""
    if about.pool is None:
        check_size(about.network, tensors, source)
        return Classifier(about.network, device)
    for number in about.pool.experts:
        check_size(
            about.network, under(f"{EXPERT}/{number}", tensors), f"{source}, {EXPERT} {number}"
        )
    common = None
    if about.pool.common is not None:
        check(about.pool.common, under(artifact.COMMON, tensors), f"{source}, {artifact.COMMON}")
        pool, values = about.pool, under(artifact.COMMON, tensors)
        common = CommonExpert(
            about.pool.common, values, device, pool.data, pool.own, pool.embedding
        )
        gate = NetworkShape(
            "mlp", (1, 1, common.width), about.pool.size, (about.pool.gate_width or 0,)
        )
        check_size(gate, under(GATE, tensors), f"{source}, {GATE}")
    model = PoolClassifier(
        about.network, about.pool.layout, common, None, about.pool.gate_width or 0, device
    )
    model.numbers = torch.tensor(about.pool.experts)
    return model
