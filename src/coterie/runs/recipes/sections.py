"""The sections of a recipe for models, and for who takes part in a round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Tag, model_validator

from coterie.aggregation.noise import Source
from coterie.core import devices, unions
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.federation import Federation
from coterie.models.common import Pretraining
from coterie.models.layout import MOST_ALPHA, Layout
from coterie.models.networks import NetworkShape, Norm, Shape
from coterie.models.quantised import Quantisation
from coterie.models.text import TextShape
from coterie.runs.recipes.mistakes import Mistakes


def _device(value: str) -> str:
    if value != "auto" and not devices.is_known(value):
        raise ValueError("is auto, cpu, or an accelerator that PyTorch knows (cuda:1, mps, xpu)")
    return value


Device = Annotated[
    str,
    AfterValidator(_device),
    Field(
        description="where models are: cpu, or any accelerator of PyTorch, such as cuda:1, mps or "
        "xpu; auto: the accelerator if there is one, otherwise the CPU"
    ),
]


class LanguageSection(BaseModel):
    """The base model and the adapters on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["language"] = "language"  # a causal language model with LoRA adapters, for texts
    # Hub id or local folder of a causal LM, or a GGUF file of one (a path, or OWNER/NAME/FILE.gguf
    # on the Hub); `embedded` is the one in the package
    base: str = Field("embedded", min_length=1)
    # dtype of the base; auto: bf16 on an accelerator that has it, and on a CPU that computes a base
    # of 50 M weights or more faster so; else fp32
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    # bits of the base's weights while clients train on it: 8, 4, or 4 by a normal distribution;
    # null: as dtype says
    quantise: Quantisation | None = None
    # whether a block keeps its input only, and is computed again in the backward pass: less memory,
    # a third more time; null: where a step does not fit otherwise
    checkpointing: bool | None = None
    device: Device = "auto"
    context: int = Field(128, ge=2)  # window length in tokens
    rank: int = Field(8, ge=1, le=1024)  # rank r of every LoRA
    # alpha of every LoRA; its output is scaled by gamma = alpha / sqrt(r)
    alpha: float = Field(16.0, gt=0, le=MOST_ALPHA)
    # false: gamma = alpha / r, PEFT's default; null or true: alpha / sqrt(r)
    use_rslora: bool | None = None
    # the base's layers that have LoRAs, by names or ends of paths such as q_proj or mlp.c_proj;
    # null: all linear layers of attention and MLPs
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout on the input of every LoRA

    def layout(self) -> Layout:
        """Return the adapter's layout before the method's requirements for MLPs."""
        given = self.model_dump(include={"rank", "alpha", "dropout", "target_modules"})
        return Layout(**given, use_rslora=self.use_rslora is not False)


Network = Literal["mlp", "cnn", "resnet9", "resnet20", "resnet56", "resnet34"]
Width = Annotated[
    int | None,
    Field(
        ge=1,
        description="channels of the first convolution; null: 16 for a resnet20 or resnet56, 64 "
        "for others",
    ),
]
Hidden = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    Field(description="widths of the hidden layers of an mlp"),
]
Channels = Annotated[
    tuple[float, ...] | None,
    Field(
        description="for images: its input normalisation, one value per channel; null: as the "
        "data are"
    ),
]


class CommonSection(BaseModel):
    """A frozen, pretrained expert of all clients; embeds data for a gate, may start networks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # for images: its architecture; null: the model's, with its settings
    network: Network | None = None
    hidden: Hidden = (64, 64)
    width: Width = None
    norm: Norm = "batch"  # normalisation after convolutions
    # for images: a safetensors file with its weights, also below or beside $COTERIE_DATA
    path: str | None = None
    mean: Channels = None
    std: Channels = None
    base: str | None = None  # for texts: Hub id or local folder of its base; null: the model's
    pretraining: Pretraining | None = None  # training on data.public; null: no training
    # whether embeddings are standardised by those of data.public, so that a gate learns from all of
    # their values alike; null: no
    standardise: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "CommonSection":
        if (self.mean is None) != (self.std is None):
            raise Mistakes("model.common.mean and model.common.std: give both of them, or none")
        if self.mean is not None and self.path is None:
            raise Mistakes(
                "model.common.mean: an expert that is trained here takes images as the data are; "
                "leave it and std out"
            )
        if self.network is None and (
            self.hidden != (64, 64) or self.width is not None or self.norm != "batch"
        ):
            raise Mistakes(
                "model.common.network: missing, though hidden, width or norm are given; without "
                "it the model's own are taken"
            )
        if self.path is not None and self.pretraining is not None:
            raise Mistakes(
                "model.common.path and model.common.pretraining: its weights are there, or they "
                "are to be trained; give one"
            )
        return self


class _Classifying(BaseModel):
    """The common fields of classifiers of images and of texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    common: CommonSection | None = None  # a pretrained expert that every client has
    # initial values of a network that all clients share; auto: common where it fits
    start: Literal["auto", "random", "common"] = "auto"
    gate_width: int = Field(64, ge=1)  # hidden units of a pool's gate
    # whether running statistics are averaged with the network; auto: if there are unseen clients
    statistics: Literal["auto", "local", "shared"] = "auto"
    device: Device = "auto"


class ClassifierSection(_Classifying):
    """An image classifier."""

    kind: Literal["classifier"]  # an image classifier, for images
    network: Network = "mlp"  # its architecture
    hidden: Hidden = (64, 64)
    width: Width = None
    norm: Norm = "batch"  # normalisation after convolutions

    def shape(self, inputs: tuple[int, int, int], classes: int) -> NetworkShape:
        """Return the network for images of (channels, height, width) and this number of classes."""
        return NetworkShape(self.network, inputs, classes, self.hidden, self.norm, self.width)

    def common_shape(self, inputs: tuple[int, int, int], classes: int) -> NetworkShape:
        """Return the common expert's network."""
        common = self.common
        if common is None or common.network is None:
            return self.shape(inputs, classes)
        kind, hidden = common.network, common.hidden
        return NetworkShape(kind, inputs, classes, hidden, common.norm, common.width)


class TextClassifierSection(_Classifying):
    """A classifier of texts: any sequence classifier of transformers, or a head on one."""

    kind: Literal["text-classifier"]  # a sequence classifier, for labelled texts
    # Hub id or local folder; `embedded` is the small base in the package
    base: str = Field("embedded", min_length=1)
    length: int = Field(64, ge=1)  # most tokens of a text
    # widths of the hidden layers of an mlp that alone is trained, on the mean of the frozen base's
    # last hidden states, standardised by those of data.public; null: all of the base is trained
    head: Hidden | None = None

    @model_validator(mode="after")
    def _check_head(self) -> "TextClassifierSection":
        common = self.common
        if self.head is not None and common is not None:
            if common.base is not None:
                problem = "model.common.base: with model.head it has the model's; leave it out"
                raise Mistakes(problem)
            if common.network not in (None, "mlp"):
                raise Mistakes("model.common.network: with model.head it is an mlp, or null")
        return self

    def encoder(self, classes: int) -> TextShape:
        """Return the whole network for this number of classes; with a head, its frozen encoder."""
        return TextShape(self.base, classes, self.length)

    def shape(self, classes: int) -> Shape:
        """Return the trained network."""
        text = self.encoder(classes)
        if self.head is None:
            return text
        return NetworkShape("mlp", (text.width, 1, 1), classes, self.head)

    def common_shape(self, classes: int) -> Shape:
        """Return the common expert's network."""
        common = self.common
        if self.head is not None and common is not None and common.network is not None:
            return NetworkShape("mlp", (self.encoder(classes).width, 1, 1), classes, common.hidden)
        if common is None or common.base is None:
            return self.shape(classes)
        return TextShape(common.base, classes, self.length)


ModelSection = Annotated[
    Annotated[LanguageSection, Tag("language")]
    | Annotated[ClassifierSection, Tag("classifier")]
    | Annotated[TextClassifierSection, Tag("text-classifier")],
    unions.by("kind", LanguageSection, ClassifierSection, TextClassifierSection),
]


class Participation(BaseModel):
    """The clients that take part in a round. They depend only on the run's seed and the round, so
    that all methods of a comparison see the same clients.

    With central privacy on devices it depends on the server's secret in the place of the seed,
    which every device knows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    clients: int | None = Field(None, ge=1)  # number of clients drawn in each round; null: all
    # number of anchors drawn besides; null: anchors are drawn like other clients
    anchors: int | None = Field(None, ge=0)
    # grow: one more cluster of the data joins after every `every` rounds; turns: clusters take
    # turns, and only anchors stay
    schedule: Literal["all", "grow", "turns"] = "all"
    every: int = Field(200, ge=1)  # rounds until the next cluster

    def of(
        self,
        clients: Sequence[str],
        anchors: Sequence[str],
        clusters: Mapping[str, int] | None,
        seed: int,
        round: int,
        secret: bytes | None = None,
    ) -> tuple[str, ...]:
        """Return the clients that take part in a round, in order, drawn by seed or secret key."""
        here = set(self._here(clients, anchors, clusters or {}, round))
        held = set() if self.anchors is None else here & set(anchors)
        draw = _repeatable(seed, round)
        if secret is not None:
            draw = Source.keyed(secret, "participation", round).sample
        active: set[str] = set()
        for group, most in ((held, self.anchors), (here - held, self.clients)):
            members = sorted(group)
            active.update(members if most is None or most >= len(members) else draw(members, most))
        return tuple(i for i in clients if i in active)

    def _here(
        self, clients: Sequence[str], anchors: Sequence[str], clusters: Mapping[str, int], at: int
    ) -> list[str]:
        """Return the clients available by the schedule."""
        if self.schedule == "all":
            return list(clients)
        groups, turn = sorted(set(clusters.values())), at // self.every
        come = groups[: turn + 1]
        now = come if self.schedule == "grow" else [groups[turn % len(groups)]]
        return [i for i in clients if clusters[i] in now or (i in anchors and clusters[i] in come)]


def _repeatable(seed: int, round: int) -> Callable[[Sequence[str], int], Sequence[str]]:
    """Return a function that draws some of several, reproducibly by seed and round."""
    random = np.random.default_rng(derive_seed(seed, "participation", round))
    return lambda clients, most: list(map(str, random.choice(clients, most, replace=False)))


def evaluated(
    federation: Federation, most: int | None, seed: int
) -> dict[str, tuple[ClientId, ...]]:
    """Return the scored clients in order, at most `most` of each group of unseen ones, or of the
    group "" if none is unseen. They are drawn by the seed and their names, so that a client that
    joins later replaces at most one.
    """
    groups = federation.unseen or {"": federation.clients}
    if most is None:
        return {group: tuple(clients) for group, clients in groups.items()}
    scored = {}
    for group, clients in groups.items():
        drawn = set(sorted(clients, key=lambda i: derive_seed(seed, "evaluation", i))[:most])
        scored[group] = tuple(i for i in clients if i in drawn)
    return scored


class Quorum(BaseModel):
    """When a server continues without clients that did not answer in time, or not validly."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # least number of clients that must answer; all of them, if fewer were asked
    min_clients: int = Field(1, ge=1)
    # seconds to wait for the replies of one exchange; only across devices
    deadline: float = Field(3600.0, gt=0)
    # if fewer answer: stop (continue with --resume), or ask the others again; only across devices
    otherwise: Literal["stop", "wait"] = "stop"
