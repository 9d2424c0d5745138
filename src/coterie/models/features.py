"""Features of texts by a frozen encoder, computed once: heads on them are trained alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.core.errors import ModelError
from coterie.core.tensors import to_bytes
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, Federation
from coterie.data.splits import Numbers, Split
from coterie.data.store import cached, default_cache
from coterie.models.common import Normalisation
from coterie.models.text import TextNetwork, TextShape

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
        raise ModelError(
            f"base {shape.base!r}: {values.shape[1]} features, its configuration says "
            f"{shape.width}",
            "Use another base, or train all of it: leave model.head out.",
        )
    return values[:, :, None, None]


def flops(shape: TextShape) -> int:
    """Return the floating-point operations of the features of one text of maximal length."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        features(shape.example(), shape)
    return int(counter.get_total_flops())


def kept(
    texts: Numbers, shape: TextShape, device: str = "cpu", cache: Path | None = None
) -> Features:
    """Return the features of (N, T) token ids from the cache, computed first if they are missing.

    Args:
        texts: Token ids, -1 after the end.
        shape: The base, and the longest text.
        device: The device to compute on.
        cache: Its folder; None: `store.default_cache`.

    Raises:
        ModelError: The base cannot be used.
        SaveError: The cache cannot be written.
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
    # clients share arrays
    arrays: dict[int, Features] = {}
    normal = Normalisation((0.0,) * shape.width, (1.0,) * shape.width)._asdict()

    def encoded(split: Split) -> ExampleSplit:
        assert isinstance(split, ExampleSplit)
        if id(split.inputs) not in arrays:
            arrays[id(split.inputs)] = kept(split.inputs, shape, device)
        inputs = arrays[id(split.inputs)]
        return replace(split, inputs=inputs, texts=split.inputs, **normal)

    def of(data: ClientData) -> ClientData:
        return ClientData(data.id, *map(encoded, data.splits))

    public = federation.public
    if public is not None:
        public = encoded(public)
        values = torch.from_numpy(public.inputs[public.rows, :, 0, 0])
        normal = Normalisation.of(values)._asdict()
        public = replace(public, **normal)
    return replace(
        federation,
        clients={id: of(data) for id, data in federation.clients.items()},
        unseen={
            group: {id: of(data) for id, data in clients.items()}
            for group, clients in federation.unseen.items()
        },
        public=public,
    )
