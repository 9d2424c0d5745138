"""Examples of a classification task: inputs with labels, as views of arrays that clients share."""

import hashlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.splits import Numbers, Split


@dataclass(frozen=True)
class Examples:
    """One batch of examples."""

    x: Tensor  # (B, C, H, W) float32, normalised; or (B, T) int64 token ids, -1 after the end
    y: Tensor  # (B,) int64
    embedding: Tensor | None = None  # (B, e) float32, the common expert's embedding of x, if any

    def __len__(self) -> int:
        return len(self.y)

    def at(self, places: slice | Tensor) -> "Examples":
        """Return the examples at these places."""
        embedding = None if self.embedding is None else self.embedding[places]
        return Examples(self.x[places], self.y[places], embedding)

    def split(self, rows: int) -> "list[Examples]":
        """Split into batches of at most `rows` examples, in order."""
        return [self.at(slice(start, start + rows)) for start in range(0, len(self), rows)]


_HASHED = 4096  # rows copied at a time
_DIMENSIONS = {"uint8": 4, "float32": 4, "int64": 2}  # of inputs, by their kind


@dataclass(frozen=True, eq=False)
class ExampleSplit(Split):
    """One split of a client's examples; a row is one example.

    Raises DataError if there is no example, a row or label is out of range, or an input is not
    finite or has no tokens.
    """

    name: str  # see `Split`; or "public"
    # shared and read-only: (N, C, H, W) uint8, scaled by 1/255, or float32; texts (N, T) int64 ids,
    # -1 after the end
    inputs: npt.NDArray[Any]
    labels: Numbers  # (N,) int64, one for each of `inputs`, as this client numbers classes
    rows: Numbers  # (n,) int64, the client's rows of `inputs`
    seed: int
    mean: tuple[float, ...]  # of each channel of images
    std: tuple[float, ...]  # standard deviation of each channel of images
    classes: int
    embeddings: Tensor | None = None  # (n, e) float32, the common expert's embedding of each row
    texts: Numbers | None = None  # (N, T) int64 ids, if `inputs` are their features
    context: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if not len(self.rows):
            remedy = "Give this split examples: use fewer clients, larger shares, or other classes."
            raise DataError(f"{self.name}: no examples", remedy)
        if _DIMENSIONS.get(self.inputs.dtype.name) != self.inputs.ndim or len(self.labels) != len(
            self.inputs
        ):
            raise DataError(
                f"{self.name}: inputs are {self.inputs.dtype}{list(self.inputs.shape)} with "
                f"{len(self.labels):,} labels",
                "Expected uint8 or float32 [examples, channels, height, width], or int64 "
                "[examples, tokens], and a label for each.",
            )
        channels = 0 if self._tokens else self.inputs.shape[1]
        if not len(self.mean) == len(self.std) == channels or min(self.std, default=1.0) <= 0:
            problem = f"{self.name}: mean {self.mean} and std {self.std} of {channels} channels"
            raise DataError(problem, "Give one mean and one positive std for each channel.")
        if self.rows.min() < 0 or self.rows.max() >= len(self.inputs):
            raise DataError(
                f"{self.name}: rows {self.rows.min()} to {self.rows.max()} of {len(self.inputs):,}",
                f"Rows are below {len(self.inputs)}.",
            )
        labels = self.labels[self.rows]
        if len(foreign := labels[(labels < 0) | (labels >= self.classes)]):
            problem = f"{self.name}: label {foreign[0]} of {self.classes} classes"
            raise DataError(problem, f"Labels are 0 to {self.classes - 1}.")
        if self._tokens and len(empty := self.rows[(self.inputs[self.rows] < 0).all(axis=1)]):
            problem = f"{self.name}: input {empty[0]} has no tokens"
            raise DataError(problem, "Leave out that example.")
        if self.inputs.dtype == np.float32 and len(
            broken := self.rows[~np.isfinite(self.inputs[self.rows]).all(axis=(1, 2, 3))]
        ):
            problem = f"{self.name}: input {broken[0]} has values that are not finite"
            raise DataError(problem, "Repair or leave out that example.")

    @property
    def _tokens(self) -> bool:
        """Whether inputs are token ids."""
        return self.inputs.dtype == np.int64

    @property
    def windows(self) -> int:
        return len(self.rows)

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """Factor and offset, (C, 1, 1) each, that normalise an input."""
        unit = 255.0 if self.inputs.dtype == np.uint8 else 1.0
        mean, std = (
            torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (1 / (unit * std)).float(), (-mean / std).float()

    def _normalised(self, inputs: npt.NDArray[Any]) -> Tensor:
        """Return inputs normalised for a network. May overwrite the array."""
        x = torch.from_numpy(inputs)
        if self._tokens:
            return x
        factor, offset = self._scale
        return x.float().mul_(factor).add_(offset)

    def take(self, numbers: Numbers) -> Examples:
        """Return the examples of these numbers in [0, windows)."""
        rows = self.rows[numbers]
        embedding = None if self.embeddings is None else self.embeddings[torch.from_numpy(numbers)]
        return Examples(
            self._normalised(self.inputs[rows]), torch.from_numpy(self.labels[rows]), embedding
        )  # indexing by an array copies

    def digest(self) -> str:
        """Return the SHA-256 of inputs and labels; of texts, not of features, which are rounded."""
        inputs = self.inputs if self.texts is None else self.texts
        sha256 = hashlib.sha256(np.ascontiguousarray(self.labels[self.rows]))
        for start in range(0, len(self.rows), _HASHED):
            sha256.update(np.ascontiguousarray(inputs[self.rows[start : start + _HASHED]]))
        return sha256.hexdigest()

    def join(self, batches: Sequence[Examples], order: Numbers) -> Examples:
        embeddings = [batch.embedding for batch in batches if batch.embedding is not None]
        behind = Examples(
            torch.cat([batch.x for batch in batches]),
            torch.cat([batch.y for batch in batches]),
            torch.cat(embeddings) if embeddings else None,
        )
        return behind.at(torch.from_numpy(order))

    def embedded(self, embeddings: Tensor) -> Self:
        """Return the same examples with (windows, e) float32 embeddings, in the order of `scoring`.
        Raises DataError if they are not one finite vector for each example.
        """
        if embeddings.ndim != 2 or len(embeddings) != self.windows:
            raise DataError(
                f"{self.name}: embeddings are {list(embeddings.shape)} for {self.windows:,} "
                f"examples",
                "Give one vector for each example.",
            )
        if len(broken := (~embeddings.isfinite().all(dim=1)).nonzero()):
            raise DataError(
                f"{self.name}: the embedding of example {int(broken[0])} has values that are not "
                f"finite",
                "Repair that example, or use another common expert.",
            )
        twin = copy(self)  # not `replace`, which would check the data again
        object.__setattr__(twin, "embeddings", embeddings)
        return twin
