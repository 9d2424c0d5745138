"""The files of a classifier: tensors as safetensors, and `client.json`. Never pickle."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, cast

from coterie.core.errors import CheckpointError, Refused
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import Tensors, prefixed
from coterie.data.examples import ExampleSplit
from coterie.models.artifact import (
    CLASSIFIER,
    CLASSIFIER_WEIGHTS,
    Origin,
    checked,
    read_about_json,
    write,
)
from coterie.models.classifier import Classifier
from coterie.models.common import Normalisation
from coterie.models.layout import ABSENT, MOST_ALPHA, Mixture, PoolLayout
from coterie.models.networks import NetworkShape
from coterie.models.pool import PoolClassifier
from coterie.models.text import TextShape

COMMON = "common"  # what the names of the common expert's tensors begin with


@dataclass(frozen=True)
class Share:
    """A client's share of a pool."""

    size: int  # M, experts in the pool
    experts: tuple[int, ...]  # numbers of those that the client has, ascending
    mixture: Mixture  # what it trained, see `PoolLayout`
    answer: Literal["best", "mixture"]  # what classifies a sample, see `PoolLayout`
    # the common expert's network; None without a gate
    common: NetworkShape | TextShape | None = None
    gate_width: int | None = None  # hidden units of the gate; None without one
    # how the common expert is given images; None: as it expects them
    data: Normalisation | None = None
    own: Normalisation | None = None  # the same for the client's experts
    embedding: Normalisation | None = None  # of the common expert's embeddings, if any

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
        """The layout of a model with a place for each of these experts."""
        return PoolLayout(
            pool=self.size, chosen=len(self.experts), mixture=self.mixture, answer=self.answer
        )


@dataclass(frozen=True)
class AboutClassifier:
    """The content of `client.json` of a classifier, with an `Origin`."""

    client: str
    network: NetworkShape | TextShape  # of the client, or of each of its experts
    pool: Share | None  # the source of its experts; None for a single network
    names: tuple[str, ...]  # of the classes
    mean: tuple[float, ...]  # subtracted from each channel of images, or feature of texts
    std: tuple[float, ...]  # divisor of each channel of images, or feature of texts
    method: str
    recipe: str
    round: int
    seed: int
    encoder: TextShape | None = None  # of texts whose features the network takes

    def __post_init__(self) -> None:
        normal = (*map(abs, self.mean), *self.std, *(1 / s for s in self.std if s > 0))
        if not all(value <= MOST_ALPHA for value in normal) or min(self.std, default=1) <= 0:
            raise ValueError(f"images cannot be normalised by mean {self.mean} and std {self.std}")
        if len(self.names) != self.network.classes:
            raise ValueError(f"{len(self.names)} names of {self.network.classes} classes")

    def at(self, base: str) -> "AboutClassifier":
        """Return the same with another base. Raises Refused for a classifier of images."""
        if self.encoder is not None:
            return replace(self, encoder=replace(self.encoder, base=base))
        if not isinstance(self.network, TextShape):
            raise Refused(
                f"{self.client} has a classifier of images, which has no base", "Leave --base out."
            )
        network, pool = replace(self.network, base=base), self.pool
        common = pool.common if pool is not None else None
        if pool and isinstance(common, TextShape) and common.base == self.network.base:
            pool = replace(pool, common=replace(common, base=base))
        return replace(self, network=network, pool=pool)


def save_classifier(
    folder: Path,
    client: str,
    model: Classifier | PoolClassifier,
    data: ExampleSplit,
    names: Sequence[str],
    origin: Origin,
    encoder: TextShape | None = None,
) -> None:
    """Write a client's classifier to `folder`: everything needed to use it, except a text
    tokenizer, which its base provides. Raises SaveError.

    Args:
        folder: Made if it is missing.
        client: The client's id.
        model: Has the client's values loaded.
        data: Any of its splits, for the normalisation of images.
        names: Of the classes; their numbers if there are none.
        origin: The run that it comes from.
        encoder: What makes features of texts, if the model takes these.
    """
    share, tensors = None, own_tensors(model)
    if isinstance(model, PoolClassifier):
        layout, gate, common = model.layout, model.gate, model.common if model.gate else None
        width = cast(NetworkShape, gate.shape).hidden[0] if gate else None
        network = cast(NetworkShape | TextShape, common.shape) if common else None
        share = Share(
            layout.pool,
            tuple(present_experts(model)),
            layout.mixture,
            layout.answer,
            network,
            width,
            common.data if common else None,
            common.expected if common else None,
            common.embedding if common else None,
        )
        tensors |= prefixed(COMMON, common.tensors) if common else {}
    shape = cast(NetworkShape | TextShape, model.shape)
    called = tuple(names) or tuple(map(str, range(model.shape.classes)))
    about = AboutClassifier(
        client, shape, share, called, data.mean, data.std, **vars(origin), encoder=encoder
    )
    content = {k: v for k, v in asdict(about).items() if v is not None or k != "encoder"}
    write(folder, CLASSIFIER_WEIGHTS, tensors, {"kind": CLASSIFIER} | content)


def read_classifier(folder: Path) -> AboutClassifier:
    """Return `client.json` of a classifier. Raises CheckpointError if it is missing, damaged,
    newer, or a language model's.
    """
    content = read_about_json(folder)
    if content.pop("kind", None) != CLASSIFIER:
        raise CheckpointError(
            f"{folder} holds a language model, not a classifier", "See `coterie predict --text`."
        )
    return checked(AboutClassifier, content, folder)


def own_tensors(model: Classifier | PoolClassifier) -> Tensors:
    """Return a client's tensors by name in the file: `expert/<number>/...`, `gate/...`."""
    if isinstance(model, Classifier):
        return _values(model)
    tensors = prefixed(GATE, _values(model.gate)) if model.gate is not None else {}
    for number, expert in zip(present_experts(model), model.experts, strict=False):
        tensors |= prefixed(f"{EXPERT}/{number}", _values(expert))
    return tensors


def present_experts(model: PoolClassifier) -> list[int]:
    """Return the numbers of the client's experts in the order of their places."""
    return [number for number in model.numbers.tolist() if number != ABSENT]


def _values(classifier: Classifier) -> Tensors:
    return dict(classifier.network.named_parameters()) | classifier.buffers()
