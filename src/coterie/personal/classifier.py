"""A classifier in use: it predicts the class of a sample and, with a pool, the expert that the gate
chooses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from coterie.core.errors import CheckpointError, Refused
from coterie.core.files import load as load_tensors
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import MOST_OF_ONE, Named, Tensors, prefixed, under
from coterie.data.examples import Examples, ExampleSplit
from coterie.models.classifier import Classifier, Shape
from coterie.models.common import CommonExpert, Normalisation
from coterie.models.layout import MOST_ALPHA
from coterie.models.network_tensors import check, check_size
from coterie.models.networks import NetworkShape
from coterie.models.pool import PoolClassifier
from coterie.models.pool_layout import ABSENT, Mixture, PoolLayout
from coterie.models.text import TextShape
from coterie.personal.artifact import (
    CLASSIFIER,
    CLASSIFIER_WEIGHTS,
    Origin,
    checked,
    fill,
    read_about_json,
    verify,
    write,
)
from coterie.personal.samples import as_samples
from coterie.personal.sampling import not_usable, usable

COMMON = "common"  # what the names of the common expert's tensors begin with
_ROWS = 32  # samples at a time


@dataclass(frozen=True)
class Share:
    """A client's share of a pool.

    Args:
        size: M, experts in the pool.
        experts: The numbers of those that the client has, in rising order.
        mixture: What it trained, see `PoolLayout`.
        answer: What classifies a sample, see `PoolLayout`.
        common: The common expert's network; None without a gate.
        gate_width: Hidden units of the gate; None without one.
        data: How the common expert is given images; None: as it wants them.
        own: The same for its own experts.
    """

    size: int
    experts: tuple[int, ...]
    mixture: Mixture
    answer: Literal["best", "mixture"]
    common: NetworkShape | TextShape | None = None
    gate_width: int | None = None
    data: Normalisation | None = None
    own: Normalisation | None = None

    def __post_init__(self) -> None:
        if list(self.experts) != sorted(set(self.experts)) or not all(
            0 <= number < self.size for number in self.experts
        ):
            raise ValueError(f"experts {self.experts} of a pool of {self.size}")
        if not (self.layout.gated == (self.common is not None) == (self.gate_width is not None)):
            raise ValueError(
                f"mixture {self.mixture} with the common expert {self.common} and a gate of "
                f"width {self.gate_width}"
            )

    @property
    def layout(self) -> PoolLayout:
        """Of a model with a place for each of these experts."""
        return PoolLayout(
            pool=self.size, chosen=len(self.experts), mixture=self.mixture, answer=self.answer
        )


@dataclass(frozen=True)
class AboutClassifier:
    """The content of `client.json` of a classifier.

    Args:
        client: The client's id.
        network: The client's own, or what each of its experts is.
        pool: Where the experts are from; None for a network of its own.
        names: Of the classes.
        mean: Of each channel of images, subtracted.
        std: Of each channel of images, divided by.
        method: Name of the method.
        recipe: Name of the recipe.
        round: Rounds done.
        seed: The run's seed.
    """

    client: str
    network: NetworkShape | TextShape
    pool: Share | None
    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    method: str
    recipe: str
    round: int
    seed: int

    def __post_init__(self) -> None:
        normal = (*map(abs, self.mean), *self.std, *(1 / s for s in self.std if s > 0))
        if not all(value <= MOST_ALPHA for value in normal) or min(self.std, default=1) <= 0:
            raise ValueError(f"images cannot be normalised by mean {self.mean} and std {self.std}")
        if len(self.names) != self.network.classes:
            raise ValueError(f"{len(self.names)} names of {self.network.classes} classes")

    def at(self, base: str) -> "AboutClassifier":
        """Return the same with another location of the base. Raises Refused for a classifier of
        images.
        """
        if not isinstance(self.network, TextShape):
            raise Refused(
                f"{self.client} has a classifier of images, which has no base", "Leave --base out."
            )
        network, pool = replace(self.network, base=base), self.pool
        if (
            pool is not None
            and isinstance(pool.common, TextShape)
            and pool.common.base == self.network.base
        ):
            pool = replace(pool, common=replace(pool.common, base=base))
        return replace(self, network=network, pool=pool)


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample.

    Args:
        label: Number of the likeliest class.
        name: Its name.
        probability: That it is that.
        expert: Number in the pool of the expert that the gate wants most, of those that the client
            has; None without a gate.
    """

    label: int
    name: str
    probability: float
    expert: int | None


class PersonalClassifier:
    """A client's trained classifier: a network of its own, or experts of a pool with the gate and
    the common expert that embeds for it.

    Args:
        model: With the client's values.
        about: Where it comes from: client, method, recipe and rounds.
    """

    def __init__(self, model: Classifier | PoolClassifier, about: AboutClassifier) -> None:
        self.model, self.about = model, about

    def __repr__(self) -> str:
        own = f", experts={self.experts}" if self.experts else ""
        return (
            f"PersonalClassifier(client={self.about.client!r}, method={self.about.method!r}, "
            f"network={self.shape.title!r}{own})"
        )

    @property
    def shape(self) -> NetworkShape | TextShape:
        """Of its network, or of each of its experts."""
        return self.about.network

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def experts(self) -> tuple[int, ...]:
        """The numbers of its experts in the pool; () for a network of its own."""
        return self.about.pool.experts if self.about.pool else ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the log-probability of each class, (B, classes).

        Args:
            x: (B, C, H, W) float32, normalised by `about.mean` and `about.std`; or (B, T) int64
                token ids, -1 after the end.

        Raises:
            ModelError: It is not.
        """
        return self.answer(x)[0]

    @torch.no_grad()
    def answer(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities as `__call__`, and (B,) the number of the expert that the gate
        wants most of those that the client has; None without a gate.

        Raises:
            ModelError: See `__call__`, or scores are not finite.
        """
        found = self._answer(x)
        if not usable(found[0]).all():
            raise not_usable(f"the classifier of {self.about.client!r}")
        return found

    def _answer(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        batch = Examples(x, torch.zeros(len(x), dtype=torch.int64))
        if isinstance(self.model, Classifier):
            inputs, _ = self.model.checked(batch)
            return self.model(inputs).log_softmax(dim=1), None
        self.shape.check_inputs(x)
        if self.model.embed is None:
            return self.model.predict(batch)[0], None
        return self.model.predict(replace(batch, embedding=self.model.embed(batch)))

    def predict(self, given: Any) -> list[Prediction]:
        """Predict the class of each sample.

        Args:
            given: A path of a file or folder of images or texts, or several; images as an array or
                tensor; or a text, or several, as `str`: see `personal.samples`.

        Raises:
            DataError: The input is empty, or of an unsupported kind.
            ModelError: See `answer`.
        """
        found: list[Prediction] = []
        for batch in self.batches(given):
            outputs, experts = self.answer(batch.x)
            best, labels = outputs.exp().max(dim=1)
            numbers = [None] * len(batch) if experts is None else experts.tolist()
            for label, probability, expert in zip(
                labels.tolist(), best.tolist(), numbers, strict=True
            ):
                found.append(Prediction(label, self.about.names[label], probability, expert))
        return found

    def batches(self, given: Any) -> Iterator[Examples]:
        """Return the samples as `answer` takes them, with the label 0; see `predict`."""
        split = as_samples(given, self.shape).split(
            self.about.mean, self.about.std, self.shape.classes
        )
        return split.scoring(_ROWS)

    @classmethod
    def load(
        cls, folder: Path, base: str | None = None, device: str = "cpu"
    ) -> "PersonalClassifier":
        """Return the classifier in a client's folder.

        Args:
            folder: Of the client.
            base: Where the base of a classifier of texts is now, if not where client.json says.
            device: Where it computes.

        Raises:
            CheckpointError: A file is missing or damaged, or they do not fit each other.
            ModelError: The base of a classifier of texts cannot be loaded.
            Refused: A base of a classifier of images.
        """
        verify(folder)
        about = read_classifier(folder)
        about = about if base is None else about.at(base)
        source = folder / CLASSIFIER_WEIGHTS
        tensors, _ = load_tensors(source, MOST_OF_ONE)
        model = _built(about, tensors, str(source), device)
        common = (
            prefixed(COMMON, under(COMMON, tensors)) if about.pool and about.pool.common else {}
        )
        fill(
            _own(model),
            {name: tensor for name, tensor in tensors.items() if name not in common},
            str(source),
        )
        return cls(model, about)


def save_classifier(
    folder: Path,
    client: str,
    model: Classifier | PoolClassifier,
    data: ExampleSplit,
    names: Sequence[str],
    origin: Origin,
) -> None:
    """Write a client's classifier to `folder`: everything needed to use it, except a text
    tokenizer, which its base provides.

    Args:
        folder: Made if it is missing.
        client: The client's id.
        model: With the client's values.
        data: Any of its splits, for the normalisation of images.
        names: Of the classes; their numbers if there are none.
        origin: Where it comes from.

    Raises:
        SaveError: It could not be written.
    """
    share, tensors = None, _own(model)
    if isinstance(model, PoolClassifier):
        layout, gate, common = model.layout, model.gate, model.common if model.gate else None
        width = cast(NetworkShape, gate.shape).hidden[0] if gate else None
        network = _known(common.shape) if common else None
        given, wanted = (common.data, common.own) if common else (None, None)
        share = Share(
            layout.pool,
            tuple(_present(model)),
            layout.mixture,
            layout.answer,
            network,
            width,
            given,
            wanted,
        )
        tensors |= prefixed(COMMON, common.tensors) if common else {}
    called = tuple(names) or tuple(map(str, range(model.shape.classes)))
    about = AboutClassifier(
        client, _known(model.shape), share, called, data.mean, data.std, **vars(origin)
    )
    write(folder, CLASSIFIER_WEIGHTS, tensors, {"kind": CLASSIFIER} | asdict(about))


def read_classifier(folder: Path) -> AboutClassifier:
    """Return what `client.json` in `folder` says of a classifier.

    Raises:
        CheckpointError: It is missing, damaged, of a newer format, or of a language model.
    """
    found = read_about_json(folder)
    if found.pop("kind", None) != CLASSIFIER:
        raise CheckpointError(
            f"{folder} holds a language model, not a classifier", "See `coterie predict --text`."
        )
    return checked(AboutClassifier, found, folder)


def _built(
    about: AboutClassifier, tensors: Named, source: str, device: str
) -> Classifier | PoolClassifier:
    """Return a model like the one that was saved, of which only the common expert has its values.
    Raises ModelError, before it takes memory.
    """
    if about.pool is None:
        check_size(about.network, tensors, source)
        return Classifier(about.network, device)
    for number in about.pool.experts:
        check_size(
            about.network, under(f"{EXPERT}/{number}", tensors), f"{source}, {EXPERT} {number}"
        )
    common = None
    if about.pool.common is not None:
        check(about.pool.common, under(COMMON, tensors), f"{source}, {COMMON}")
        common = CommonExpert(
            about.pool.common, under(COMMON, tensors), device, about.pool.data, about.pool.own
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


def _own(model: Classifier | PoolClassifier) -> Tensors:
    """Return a client's tensors themselves, by their names in the file: `expert/<number>/...` and
    `gate/...` where they are of a pool.
    """
    if isinstance(model, Classifier):
        return _values(model)
    found = prefixed(GATE, _values(model.gate)) if model.gate is not None else {}
    for number, expert in zip(_present(model), model.experts, strict=False):
        found |= prefixed(f"{EXPERT}/{number}", _values(expert))
    return found


def _present(model: PoolClassifier) -> list[int]:
    """Return the numbers of the experts that are there, in the order of their places."""
    return [number for number in model.numbers.tolist() if number != ABSENT]


def _known(shape: Shape) -> NetworkShape | TextShape:
    assert isinstance(shape, NetworkShape | TextShape)
    return shape


def _values(classifier: Classifier) -> Tensors:
    return dict(classifier.network.named_parameters()) | classifier.buffers()
