"""Classifiers of texts on a pretrained encoder; of a frozen one the features of texts are computed
once, and heads on them are trained alone.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from coterie.core.errors import ModelError
from coterie.core.importing import quietly
from coterie.core.protocol import derive_seed
from coterie.core.roles import GENERALIST, tag
from coterie.core.tensors import Tensors, to_bytes
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.splits import Numbers, Split
from coterie.data.store import cached, default_cache
from coterie.models.architecture import configuration, explained, locate, trusted
from coterie.models.common import Normalisation
from coterie.models.predictions import flops_of

_WEIGHTS = (".safetensors", ".bin")  # endings of files that hold them
_RANGE = 0.02  # standard deviation of initial weights, where a configuration names none


@dataclass(frozen=True)
class TextShape:
    """All that determines a classifier of texts without data. Raises ModelError for bad sizes."""

    base: str  # the pretrained model: a Hub id, a local folder, or "embedded"
    classes: int  # width of the output
    length: int  # tokens of a text, at most

    def __post_init__(self) -> None:
        if min(self.classes, self.length) < 1:
            problem = f"a classifier of {self.length} tokens into {self.classes} classes"
            raise ModelError(problem, "Every size is at least 1.")

    @property
    def title(self) -> str:
        """A short description of the network."""
        return f"{self.base} for {self.length} tokens and {self.classes} classes"

    @property
    def vocabulary(self) -> int:
        """The number of token ids. Raises ModelError as `build`."""
        return int(_config(self.base, self.classes).get_text_config().vocab_size)

    @property
    def width(self) -> int:
        """The number of features of a text, e. Raises ModelError as `build`."""
        return int(_config(self.base, self.classes).get_text_config().hidden_size)

    def build(self, device: torch.device | str = "cpu") -> "TextNetwork":
        """Return the network, every parameter a GENERALIST, with `initial` values of seed 0, and
        PyTorch's random generators unchanged. On "meta" no weights are read.

        Raises ModelError if the base is missing, incomplete, damaged, of a kind that cannot
        classify, or made for shorter texts.
        """
        config = _config(self.base, self.classes).get_text_config()
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and self.length > most:
            problem = f"texts of {self.length} tokens, but {self.base} allows {most}"
            raise ModelError(problem, f"Use a length of at most {most}.")
        if torch.device(device).type == "meta":
            return TextNetwork(_random(self.base, self.classes, "meta"))
        network = deepcopy(_loaded(self.base, self.classes)[0])
        network.load_state_dict(self.initial(0), strict=False)
        return network.to(device)

    def initial(self, seed: int) -> Tensors:
        """Return initial values of every parameter, fp32 on the CPU: the base's, or random ones for
        what it lacks (usually the head).

        Random weights are N(0, s), s being the base's initializer_range, norms start as the
        identity, and biases at 0. Each tensor is drawn from its own stream, named by (seed,
        "generalist", name).
        """
        network, missing = _loaded(self.base, self.classes)
        values: Tensors = {}
        for name, parameter in network.named_parameters():
            if name not in missing:
                values[name] = parameter.detach().clone()
            elif parameter.ndim > 1:
                generator = torch.Generator().manual_seed(derive_seed(seed, GENERALIST, name))
                values[name] = torch.empty(parameter.shape)
                values[name].normal_(0, network.scale, generator=generator)
            else:
                values[name] = torch.full(parameter.shape, float(name.endswith("weight")))
        return values

    def check_inputs(self, x: Tensor) -> None:
        """Refuse invalid texts. Raises ModelError if they are not (B, T) int64 with T at most
        `length`, a text is empty, or an id is not in the vocabulary.
        """
        if x.dtype != torch.int64 or x.ndim != 2 or not 1 <= x.shape[1] <= self.length:
            remedy = f"Expected int64 [texts, tokens], at most {self.length} tokens."
            raise ModelError(f"a batch of {x.dtype}{list(x.shape)} texts", remedy)
        if len(x) and int(x.max()) >= self.vocabulary:
            problem = f"token {int(x.max())} of a vocabulary of {self.vocabulary}"
            raise ModelError(problem, f"Encode the texts with the tokenizer of {self.base}.")
        if bool((x[:, 0] < 0).any()):
            raise ModelError("a batch has a text without tokens", "Leave out empty texts.")
        if bool(((x[:, :-1] < 0) & (x[:, 1:] >= 0)).any()) or bool((x < -1).any()):
            problem = "a batch has texts with gaps"
            raise ModelError(problem, "Put -1 behind the end of a text, and nowhere else.")

    def example(self) -> Tensor:
        """Return a text of maximal length, (1, length)."""
        return torch.zeros(1, self.length, dtype=torch.int64)


class TextNetwork(nn.Module):
    """A sequence classifier of transformers that takes texts padded with -1.

    Dropout, if configured, acts in training mode only, and is drawn from PyTorch's global
    generator, which an engine seeds for every task. A `model` without a padding token is given one,
    since classifiers made of decoders use it to locate a text's last token.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        # Only now, since an embedding that knows of a padding token when it is made does not train
        # it.
        config.pad_token_id = self.padding = _padding(config)
        self.scale = float(getattr(config, "initializer_range", _RANGE))
        tag(self, GENERALIST)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes) logits of (B, T) int64, independent of padding."""
        ids, mask = self._padded(x)
        return cast(Tensor, self.model(ids, attention_mask=mask).logits)

    def features(self, x: Tensor) -> Tensor:
        """Return the mean of the last hidden states of a text's tokens, (B, e), of (B, T) int64."""
        ids, mask = self._padded(x)
        hidden: Tensor = self.model.base_model(ids, attention_mask=mask).last_hidden_state
        return (hidden * mask.unsqueeze(2)).sum(dim=1) / mask.sum(dim=1, keepdim=True)

    def _padded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x >= 0
        longest = int(mask.sum(dim=1).max())
        return x.where(mask, self.padding)[:, :longest], mask[:, :longest].long()


def _padding(config: Any) -> int:
    """Return a base's padding token, else its end token, which ends no text, else 0."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = (config.pad_token_id, *ends)
    return next((id for id in ids if id is not None and 0 <= id < config.vocab_size), 0)


@lru_cache(maxsize=8)
def _config(base: str, classes: int) -> Any:
    """Return the configuration of a classifier on a base. Raises ModelError."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    with explained(base):
        config = configuration(base, num_labels=classes)
    problem = ""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = "and transformers has no text classifier of that kind"
    elif config.is_encoder_decoder:
        problem = "of an encoder and a decoder: text classifiers of that kind are not supported"
    if problem:
        remedy = "Use an encoder such as BERT, DistilBERT or MiniLM, or a decoder such as Llama."
        raise ModelError(f"base {base!r} is a {config.model_type} model, {problem}", remedy)
    config.use_cache = False  # of decoders: nothing is generated
    return config


def _random(base: str, classes: int, device: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    with explained(base), torch.device(device):
        config = deepcopy(_config(base, classes))
        return AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, trust_remote_code=trusted()
        )


@lru_cache(maxsize=2)
def _loaded(base: str, classes: int) -> tuple[TextNetwork, frozenset[str]]:
    """Return the network of a base, on the CPU, and the names of the parameters that the base has
    no values for: all, in a folder without weights. Raises ModelError as `TextShape.build`.
    """
    from transformers import AutoModelForSequenceClassification

    folder = Path(locate(base))
    config = _config(base, classes)
    with torch.random.fork_rng([]):
        if folder.is_dir() and not any(path.suffix in _WEIGHTS for path in folder.iterdir()):
            network = TextNetwork(_random(base, classes, "cpu"))
            return network, frozenset(name for name, _ in network.named_parameters())
        with explained(base), quietly():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=trusted(),
                weights_only=True,
            )
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    pooler = getattr(model.base_model, "pooler", None)
    head = set(pooler.parameters()) if isinstance(pooler, nn.Module) else set()
    inner = set(model.base_model.parameters()) if model.base_model is not model else set()
    named = model.named_parameters()
    if broken := sorted(name for name, p in named if name in missing and p in inner - head):
        problem = f"base {base!r}: its weights lack {broken[0]!r} ({len(broken)} tensors in all)"
        remedy = "The files are incomplete or belong to another configuration: get the base again."
        raise ModelError(problem, remedy)
    return TextNetwork(model), frozenset(f"model.{name}" for name in missing)


FORMAT = 1  # raise it whenever equal keys would no longer mean equal features
_ROWS = 128  # texts at a time
_FILE = "features.npy"

Features = npt.NDArray[np.float32]  # (N, e, 1, 1): images of one pixel, a channel each


@lru_cache(maxsize=2)
def encoder(shape: TextShape, device: str = "cpu") -> TextNetwork:
    """Return the network whose features are taken, once for all clients. Raises ModelError."""
    return shape.build(device).eval().requires_grad_(False)


@torch.no_grad()
def features(x: Tensor, shape: TextShape, device: str = "cpu") -> Tensor:
    """Return the features of (B, T) token ids, -1 after the end: (B, e, 1, 1), on the CPU. Raises
    ModelError for a base whose hidden states are not as wide as its configuration says.
    """
    values = encoder(shape, device).features(x.to(device)).cpu()
    if values.shape[1] != shape.width:
        problem = (
            f"base {shape.base!r}: {values.shape[1]} features, its configuration says {shape.width}"
        )
        raise ModelError(problem, "Use another base, or train all of it: leave model.head out.")
    return values[:, :, None, None]


def flops(shape: TextShape) -> int:
    """Return the floating-point operations of the features of one text of maximal length."""
    return flops_of(lambda: features(shape.example(), shape))


def kept(
    texts: Numbers, shape: TextShape, device: str = "cpu", cache: Path | None = None
) -> Features:
    """Return the features of (N, T) token ids, -1 after the end, from the cache (by default
    `store.default_cache`), computed first if they are missing. Raises ModelError if the base cannot
    be used, SaveError if the cache cannot be written.
    """
    digest = blake2b(f"{FORMAT} {shape} {texts.shape}".encode(), digest_size=16)
    digest.update(to_bytes(dict(encoder(shape, device).named_parameters())))
    digest.update(texts.tobytes())

    def read(entry: Path) -> Features | None:
        try:
            values: Features = np.load(entry / _FILE, mmap_mode="r")
        except (OSError, ValueError):
            return None
        return values if values.shape == (len(texts), shape.width, 1, 1) else None

    def build() -> Callable[[Path], None]:
        values = np.empty((len(texts), shape.width, 1, 1), np.float32)
        order = (texts >= 0).sum(axis=1).argsort(kind="stable")  # little padding
        for start in range(0, len(texts), _ROWS):
            rows = order[start : start + _ROWS]
            values[rows] = features(torch.from_numpy(texts[rows]), shape, device).numpy()
        return lambda folder: np.save(folder / _FILE, values)

    entry = (cache or default_cache()) / f"features-{digest.hexdigest()}"
    return cached(entry, "feature", read, build)


def of_federation(federation: Federation, shape: TextShape, device: str = "cpu") -> Federation:
    """Return a federation of texts with their features in place of token ids, normalised by mean
    and standard deviation of the public texts; without such texts as they are.

    Raises ModelError and SaveError as `kept`.
    """
    arrays: dict[int, Features] = {}  # clients share arrays
    normal = Normalisation((0.0,) * shape.width, (1.0,) * shape.width)._asdict()

    def encoded(split: Split) -> ExampleSplit:
        assert isinstance(split, ExampleSplit)
        if id(split.inputs) not in arrays:
            arrays[id(split.inputs)] = kept(split.inputs, shape, device)
        inputs = arrays[id(split.inputs)]
        return replace(split, inputs=inputs, texts=split.inputs, **normal)

    public = federation.public
    if public is not None:
        public = encoded(public)
        values = torch.from_numpy(public.inputs[public.rows, :, 0, 0])
        normal = Normalisation.of(values)._asdict()
        public = replace(public, **normal)
    everyone = federation.everyone.items()
    features = {id: ClientData(id, *map(encoded, data.splits)) for id, data in everyone}
    return replace(federation.with_data(features), public=public)
