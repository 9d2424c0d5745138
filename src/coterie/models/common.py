"""The common expert (DDOME, Section 3): a frozen network that embeds all clients' data."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from coterie.core import devices
from coterie.core.errors import CheckpointError, CoterieError, ModelError
from coterie.core.files import save
from coterie.core.protocol import derive_seed
from coterie.core.tensors import Tensors, all_finite
from coterie.data.examples import ExampleSplit
from coterie.data.store import cached, default_cache
from coterie.models import network_tensors
from coterie.models.classifier import Classifier
from coterie.models.networks import Shape

# raise it whenever equal keys would no longer mean an expert that was trained in the same way
FORMAT = 1

_CHECKS = 10  # of the accuracy in each epoch
_ROWS = 512  # scored at a time
_LEAST_STD = 1e-4
_FILE = "network.safetensors"


class Normalisation(NamedTuple):
    """Normalisation of inputs: the value subtracted from each channel, and the divisor."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, values: Tensor) -> "Normalisation":
        """Return what standardises columns of (N, e); one that hardly varies keeps its scale."""
        std, mean = torch.std_mean(values.cpu().double(), dim=0, correction=0)
        return cls(tuple(mean.tolist()), tuple(std.where(std > _LEAST_STD, 1).tolist()))


class Pretraining(BaseModel):
    """The training of a common expert with momentum: v <- beta v + g and x <- x - lr v."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(20, ge=1)  # passes over the public examples, a tenth of which is held out
    lr: float = Field(0.05, gt=0, allow_inf_nan=False)  # the learning rate
    momentum: float = Field(0.9, ge=0, lt=1)  # beta
    batch_size: int = Field(64, ge=1)  # examples per step
    # stop once this share of the held-out examples is classified correctly; null: train all epochs
    stop_at: float | None = Field(None, gt=0, le=1)
    seed: int = Field(0, ge=0)  # seed of the initial values, the held-out examples and the order


class CommonExpert:
    """A trained, frozen network that uses its running statistics and has no gradients. Other
    networks may start from its `tensors`, parameters and running statistics by name.

    Batches come normalised as `data` says and are given to the network as it expected them in
    training; networks that start from `tensors` get them as they are. Embeddings are normalised by
    `embedding`. Raises ModelError for tensors of another network, or other channels.
    """

    def __init__(
        self,
        shape: Shape,
        tensors: Tensors,
        device: torch.device | str = "cpu",
        data: Normalisation | None = None,
        expected: Normalisation | None = None,
        embedding: Normalisation | None = None,
    ) -> None:
        self.shape, self.device, self.tensors = shape, torch.device(device), tensors
        self.data, self.expected, self.embedding = data, expected, embedding
        channels = shape.example().shape[1]
        self._change = None if expected is None else _change(channels, data, expected)
        self._model = self.classifier(device)

    @cached_property
    def width(self) -> int:
        """The length of an embedding, e."""
        return self.embed(self.shape.example()).shape[1]

    def flops(self) -> int:
        """Return the floating-point operations of embedding and classifying one example."""
        return self._model.flops()

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """Return the (B, e) inputs of the last layer for a batch of B inputs, normalised."""
        network: Any = self._model.network
        embedding: Tensor = network.features(self._normalised(x.to(self.device)))
        if self.embedding is None:
            return embedding
        mean, std = (torch.tensor(values, device=self.device) for values in self.embedding)
        return (embedding - mean) / std

    def standardised(self, public: ExampleSplit) -> "CommonExpert":
        """Return the same with embeddings standardised by those of public examples."""
        embeddings = torch.cat([self.embed(batch.x).cpu() for batch in public.scoring(_ROWS)])
        to = Normalisation.of(embeddings)
        return CommonExpert(self.shape, self.tensors, self.device, self.data, self.expected, to)

    def classifier(self, device: torch.device | str = "cpu") -> Classifier:
        """Return a classifier with the same values, which takes the same batches."""
        model = Classifier(self.shape, device, self.tensors)
        model.network.register_forward_pre_hook(lambda _, inputs: (self._normalised(inputs[0]),))
        return model

    def _normalised(self, x: Tensor) -> Tensor:
        if self._change is None:
            return x
        factor, offset = (values.to(x.device) for values in self._change)
        return x * factor + offset


def _change(
    channels: int, data: Normalisation | None, expected: Normalisation
) -> tuple[Tensor, Tensor]:
    """Return factor and offset, (C, 1, 1) each, from one normalisation to another."""
    data = data or Normalisation((0.0,) * channels, (1.0,) * channels)
    if {len(values) for values in (*data, *expected)} != {channels} or min(
        *data.std, *expected.std
    ) <= 0:
        raise ModelError(
            f"common expert: {data} of the data and {expected} of the network, for {channels} "
            f"channels",
            "Give one mean and one positive std for each channel.",
        )
    mean, std, new_mean, new_std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (*data, *expected)
    )
    return (std / new_std).float(), ((mean - new_mean) / new_std).float()


def trained(
    shape: Shape,
    public: ExampleSplit,
    settings: Pretraining,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
) -> CommonExpert:
    """Return a common expert trained on two or more examples that no client has, once per shape,
    settings and examples: it is kept in the cache (default: $COTERIE_CACHE, else
    $XDG_CACHE_HOME/coterie, else ~/.cache/coterie). PyTorch's random generators are left unchanged.

    Raises DataError for too few examples, ModelError if they do not fit the network, CoterieError
    if it diverged or did not reach `stop_at`, SaveError if the cache cannot be written.
    """
    start, device = shape.initial(derive_seed(settings.seed, "common expert")), torch.device(device)

    def read(entry: Path) -> Tensors | None:
        try:
            return network_tensors.load(entry / _FILE, shape)
        except (CheckpointError, ModelError):  # missing or damaged
            return None

    def build() -> Callable[[Path], None]:
        with devices.forked(device):
            devices.seed(derive_seed(settings.seed, "dropout"), device)
            tensors = _train(shape, start, public, settings, device)
        return lambda folder: save(folder / _FILE, tensors)

    entry = (cache or default_cache()) / f"common-{_key(shape, start, public, settings)}"
    return CommonExpert(shape, cached(entry, "common expert", read, build), device)


def _key(shape: Shape, start: Tensors, public: ExampleSplit, settings: Pretraining) -> str:
    """Return a hash of all that determines the trained network except the machine."""
    inputs, labels = public.inputs[public.rows], public.labels[public.rows]
    about = [
        FORMAT,
        repr(shape),
        settings.model_dump(),
        inputs.dtype.name,
        inputs.shape,
        public.mean,
        public.std,
        public.classes,
    ]
    digest = blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for values in (inputs, labels, *(tensor.numpy() for tensor in start.values())):
        digest.update(values.tobytes())
    return digest.hexdigest()


def _train(
    shape: Shape, start: Tensors, public: ExampleSplit, settings: Pretraining, device: torch.device
) -> Tensors:
    """Return parameters and running statistics of the last epoch, or once `stop_at` is reached."""
    rows = np.random.default_rng(derive_seed(settings.seed, "held out")).permutation(public.rows)
    held = max(1, len(rows) // 10)
    train = replace(public, name="train", rows=rows[held:], seed=settings.seed)
    valid = replace(public, name="valid", rows=rows[:held])
    model = Classifier(shape, device)
    model.network.load_state_dict(start, strict=False)
    parameters = list(model.network.parameters())
    optimiser = torch.optim.SGD(parameters, settings.lr, settings.momentum)
    size = min(settings.batch_size, train.windows)
    every = math.ceil(train.windows / size / _CHECKS)
    steps = math.ceil(settings.epochs * train.windows / size)
    accuracy = 0.0
    for step in range(1, steps + 1):
        gradients, _ = model.gradient(train.batch((step - 1) * size, size), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        if settings.stop_at is not None and (step % every == 0 or step == steps):
            _, examples, right = model.score(valid.scoring(_ROWS)).tolist()
            if (accuracy := right / examples) >= settings.stop_at:
                break
    tensors = {
        name: tensor.detach().cpu().clone()
        for name, tensor in [*model.network.named_parameters(), *model.buffers.items()]
    }
    if not all_finite(tensors):
        problem = "the common expert diverged: its values are not finite"
        raise CoterieError(problem, "Train it with a lower learning rate.")
    if settings.stop_at is not None and accuracy < settings.stop_at:
        raise CoterieError(
            f"the common expert classifies {accuracy:.1%} of the held-out examples correctly after "
            f"{settings.epochs} epochs, not {settings.stop_at:.1%}",
            "Train it for more epochs, or with a lower stop_at.",
        )
    return tensors
