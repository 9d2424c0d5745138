"""A client's folder in a run: tensors as safetensors, described by JSON. Never pickle."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import TypeAdapter, ValidationError

from coterie.core.errors import CheckpointError, ModelError, Refused, TensorError
from coterie.core.files import SUMS, check_all_sums, read_json, replaced, write_json
from coterie.core.files import save as save_tensors
from coterie.core.names import encoded
from coterie.core.roles import EXPERT, GATE
from coterie.core.tensors import Named, Tensors, all_finite, check_alike, prefixed
from coterie.data.examples import ExampleSplit
from coterie.data.text_encoding import ControlTokens, TokenizerDigest
from coterie.models.adapter import Adapter
from coterie.models.architecture import Architecture
from coterie.models.classifier import Classifier
from coterie.models.common import Normalisation
from coterie.models.layout import ABSENT, MOST_ALPHA, Layout, Mixture, PoolLayout
from coterie.models.networks import NetworkShape
from coterie.models.pool import PoolClassifier
from coterie.models.quantised import Quantisation
from coterie.models.text import TextShape

Content = Literal["text", "chats"]

FORMAT = 1
WEIGHTS, CLASSIFIER_WEIGHTS, ABOUT = "adapter.safetensors", "classifier.safetensors", "client.json"
CLASSIFIER = "classifier"  # the kind of a client's model that is a classifier
MIXTURE = "mixture"  # the kind that is several models in folders below, predictions mixed
FOLLOWED = ".weights.safetensors"  # of a mixture: hidden, as it changes and has no checksum
CHECKSUMS = {"checksums": SUMS}  # in client.json: none of a model that an earlier coterie saved
FOREIGN = "It was changed by hand, or written by another version of coterie."


@dataclass(frozen=True)
class Origin:
    """Names of method and recipe, rounds done, and seed of a personal model's run."""

    method: str
    recipe: str
    round: int
    seed: int


@dataclass(frozen=True)
class About:
    """The content of `client.json`."""

    client: str
    base: str  # Hub id, local folder, or `embedded`
    layout: Layout
    context: int  # the training window length in tokens
    method: str
    recipe: str
    round: int  # rounds done
    seed: int
    chat_template: str | None = None  # used in training, if not the base's own
    # bits of the base's weights in training; None: unquantised
    quantise: Quantisation | None = None
    content: Content | None = None  # the kind of training text; None in models of earlier versions
    control_tokens: ControlTokens = "text"  # how control tokens in texts were treated
    # of the base in training; None in models of earlier versions
    tokenizer: TokenizerDigest | None = None


def save(folder: Path, about: About, tensors: Named) -> None:
    """Write a personal model to `folder`. Raises SaveError, with the previous files intact."""
    optional = ("chat_template", "content", "tokenizer")  # which many are without
    content = {k: v for k, v in asdict(about).items() if v is not None or k not in optional}
    write(folder, WEIGHTS, tensors, content)


def write(folder: Path, weights: str, tensors: Named, content: Mapping[str, Any]) -> None:
    """Write a personal model of any kind. Raises SaveError, with the previous files intact."""
    with replaced(folder) as new:
        save_tensors(new / weights, tensors, {"format": "pt"})
        write_json(new / ABOUT, {"format": FORMAT, **CHECKSUMS, **content})


@dataclass(frozen=True)
class AboutMixture:
    """The content of `client.json` of models whose predictions are mixed, with an `Origin`."""

    client: str
    weights: Mapping[str, float]  # by part
    method: str
    recipe: str
    round: int
    seed: int

    def __post_init__(self) -> None:
        sound = all(0 <= weight <= 1 for weight in self.weights.values())
        if len(self.weights) < 2 or not sound or abs(sum(self.weights.values()) - 1) > 1e-6:
            raise ValueError(f"weights {dict(self.weights)} of parts do not sum to 1")


def save_mixture(folder: Path, client: str, weights: Mapping[str, float], origin: Origin) -> None:
    """Write what mixes the models in the folders of these parts. Raises SaveError."""
    with replaced(folder) as new:
        about = AboutMixture(client, weights, **vars(origin))
        write_json(new / ABOUT, {"format": FORMAT, **CHECKSUMS, "kind": MIXTURE} | asdict(about))
        (folder / FOLLOWED).unlink(missing_ok=True)  # it followed an earlier mixture


def read_mixture(folder: Path) -> AboutMixture:
    """Return `client.json` of models whose predictions are mixed. Raises CheckpointError."""
    content = {k: v for k, v in read_about_json(folder).items() if k != "kind"}
    return checked(AboutMixture, content, folder)


def model_folders(folder: Path) -> list[Path]:
    """Return the folders of a client's tensors: its own, or its parts'. Raises CheckpointError."""
    if read_about_json(folder).get("kind") != MIXTURE:
        return [folder]
    return [folder / encoded(part) for part in read_mixture(folder).weights]


def verify(folder: Path) -> None:
    """Refuse a personal model whose files are not as saved, before any is used. Models of earlier
    versions have no checksums. Raises CheckpointError that names a changed, missing or extra file.
    """
    if (folder / SUMS).exists() or CHECKSUMS.keys() <= _content(folder).keys():
        check_all_sums(folder)


def read_about(folder: Path) -> About:
    """Return a language model's `client.json`. Raises CheckpointError: missing, damaged, other."""
    content = read_about_json(folder)
    if content.get("kind") == CLASSIFIER:
        raise CheckpointError(
            f"{folder} holds a classifier, not a language model",
            f"See `coterie predict --data`; other programs read {CLASSIFIER_WEIGHTS} and {ABOUT} "
            f"in it as they are.",
        )
    if isinstance(layout := content.get("layout"), dict):
        layout.pop("members", None)  # 0 in models of earlier versions
        checked(Layout, layout, folder)
    about, weights = checked(About, content, folder), folder / WEIGHTS
    shape, size = about.layout, weights.stat().st_size if weights.is_file() else math.inf
    if max(shape.experts, shape.rank, shape.expert_rank) > size:
        problem = f"{folder / ABOUT}: {size:,} bytes of {WEIGHTS} cannot be of {shape}"
        raise CheckpointError(problem, FOREIGN)
    return about


_T = TypeVar("_T")


def checked(kind: type[_T], content: Mapping[str, Any], folder: Path) -> _T:
    """Return client.json's content as its dataclass. Raises CheckpointError for invalid values."""
    if foreign := sorted(content.keys() - {field.name for field in fields(cast(Any, kind))}):
        raise CheckpointError(f"{folder / ABOUT}: {foreign[0]}: unknown", FOREIGN)
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder / ABOUT}: {where}: {first['msg']}", FOREIGN) from None
    except ModelError as error:
        raise CheckpointError(f"{folder / ABOUT}: {error.problem}", FOREIGN) from None


def read_about_json(folder: Path) -> dict[str, Any]:
    """Return the content of `client.json` for any kind of model. Raises CheckpointError."""
    return {k: v for k, v in _content(folder).items() if k not in CHECKSUMS}


def _content(folder: Path) -> dict[str, Any]:
    content = read_json(folder / ABOUT)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        problem = f"{folder / ABOUT}: not of format {FORMAT}"
        raise CheckpointError(problem, "Another version of coterie wrote it: update coterie.")
    return content


def expert_names(layout: Layout) -> tuple[str, ...]:
    """Return the experts' names in router order: G or G1, G2, ..., then S or S1, ..."""
    counts = {"G": layout.generalists, "S": layout.specialists}
    return tuple(
        letter if count == 1 else f"{letter}{j}"
        for letter, count in counts.items()
        for j in range(1, count + 1)
    )


def check_size(architecture: Architecture, about: About, tensors: Named, source: str) -> None:
    """Refuse a layout that does not match the tensors before memory is allocated: JSON may claim
    billions of experts. Raises CheckpointError.
    """
    try:
        with torch.device("meta"):
            outline = Adapter(architecture, about.layout)
        check_alike(dict(outline.named_parameters()), tensors, source)
    except (RuntimeError, TypeError) as error:  # sizes too large for any tensor
        raise CheckpointError(f"{source}: {error}", FOREIGN) from None
    except TensorError as error:
        raise CheckpointError(error.problem, _UNLIKE) from None


_UNLIKE = "The file belongs to another base or layout than client.json says."


def fill(parameters: Named, tensors: Named, source: str) -> None:
    """Copy the values of `source` to a model's tensors. Raises CheckpointError for wrong names or
    shapes, or values that are not finite; nothing is changed then.
    """
    try:
        check_alike(parameters, tensors, source)
    except TensorError as error:
        raise CheckpointError(error.problem, _UNLIKE) from None
    if broken := [name for name in parameters if not all_finite({name: tensors[name]})]:
        raise CheckpointError(
            f"{source}: {broken[0]!r} holds values that are not finite ({len(broken)} tensors in "
            f"all)",
            "The file is damaged, or its client diverged: take an earlier copy, or train it "
            "again with a lower learning rate.",
        )
    for name, tensor in parameters.items():
        tensor.data.copy_(tensors[name])


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
            problem = f"{self.client} has a classifier of images, which has no base"
            raise Refused(problem, "Leave --base out.")
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
    """Write a client's classifier with its values to `folder`, made if missing: everything needed
    to use it, except a text tokenizer, which its base provides. Any of the client's splits gives
    the normalisation of images, `encoder` makes features of texts. Raises SaveError.
    """
    share, tensors = None, own_tensors(model)
    if isinstance(model, PoolClassifier):
        layout, gate, common = model.layout, model.gate, model.common if model.gate else None
        width = cast(NetworkShape, gate.shape).hidden[0] if gate else None
        network = cast(NetworkShape | TextShape, common.shape) if common else None
        normal = (common.data, common.expected, common.embedding) if common else ()
        experts = tuple(present_experts(model))
        how = layout.mixture, layout.answer
        share = Share(layout.pool, experts, *how, network, width, *normal)
        tensors |= prefixed(COMMON, common.tensors) if common else {}
    shape = cast(NetworkShape | TextShape, model.shape)
    called = tuple(names) or tuple(map(str, range(model.shape.classes)))
    about = AboutClassifier(
        client, shape, share, called, data.mean, data.std, **vars(origin), encoder=encoder
    )
    content = {k: v for k, v in asdict(about).items() if v is not None or k != "encoder"}
    write(folder, CLASSIFIER_WEIGHTS, tensors, {"kind": CLASSIFIER} | content)


def read_classifier(folder: Path) -> AboutClassifier:
    """Return a classifier's `client.json`. Raises CheckpointError: missing, damaged, or other."""
    content = read_about_json(folder)
    if content.pop("kind", None) != CLASSIFIER:
        problem = f"{folder} holds a language model, not a classifier"
        raise CheckpointError(problem, "See `coterie predict --text`.")
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
    return dict(classifier.network.named_parameters()) | classifier.buffers
