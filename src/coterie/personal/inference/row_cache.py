"""The keys and values of texts of different lengths that are continued in one batch.

All texts end in the same column and shorter ones begin later (left padding), in one buffer for each
layer. A next token writes one column of it, and adding or removing a text copies a single row.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

SPARE = 64  # columns that are added if there is no room for the next token


class _Columns:
    """The columns in use in all layers, `begin` to `end`; the next are written from `end` on."""

    def __init__(self) -> None:
        self.begin = self.end = 0


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers' types are not read
    """The buffers of one layer, (rows, heads, columns, d) each."""

    def __init__(self, columns: _Columns) -> None:
        super().__init__()
        self.columns = columns

    def resize(self, rows: int, columns: int, end: int, like: Tensor) -> None:
        """Allocate buffers of rows and columns, in which the used columns end at `end`."""
        used = slice(self.columns.begin, self.columns.end)
        # zeros, since masked values must still be finite
        for name in ("keys", "values"):
            buffer = like.new_zeros((rows, like.shape[0], columns, like.shape[-1]))
            if (old := getattr(self, name)) is not None:
                buffer[: len(old), :, end - used.stop + used.start : end] = old[:, :, used]
            setattr(self, name, buffer)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, t, d) of the next tokens; return (B, heads, used columns + t, d)."""
        rows, begin, end = len(key_states), self.columns.begin, self.columns.end
        after = end + key_states.shape[-2]
        self.keys[:rows, :, end:after] = key_states
        self.values[:rows, :, end:after] = value_states
        return self.keys[:rows, :, begin:after], self.values[:rows, :, begin:after]

    def get_seq_length(self) -> int:
        """Return the number of used columns."""
        return self.columns.end - self.columns.begin


class RowCache(Cache):  # type: ignore[misc]  # transformers' types are not read
    """The cache of a running batch. Each row is a text; rows are numbered from 0 without gaps. Of
    models whose predictions are mixed a text has a row of the buffers for each part.
    """

    def __init__(self, blocks: int, parts: int = 1) -> None:
        self.parts, self.columns = parts, _Columns()
        super().__init__(layers=[_Layer(self.columns) for _ in range(blocks)])
        self.lengths: list[int] = []  # tokens of each row

    def put(self, row: int, source: Cache, place: int, length: int) -> None:
        """Copy a text of `length` tokens from a row of `source`, whose texts all end in the last
        column, into an existing row or the next one.
        """
        lengths = [*self.lengths[:row], length, *self.lengths[row + 1 :]]
        self._fit(len(lengths), max(lengths), source.layers[0].keys[place])
        self.lengths = lengths
        columns = slice(self.columns.end - length, self.columns.end)
        for layer, source_layer in zip(self.layers, source.layers, strict=True):
            to, of = self._of(row), self._of(place)
            layer.keys[to, :, columns] = source_layer.keys[of, :, -length:]
            layer.values[to, :, columns] = source_layer.values[of, :, -length:]
        self._narrow()

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        last = len(self.lengths) - 1
        columns = slice(self.columns.end - self.lengths[last], self.columns.end)
        if row != last:
            for layer in self.layers:
                to, of = self._of(row), self._of(last)
                layer.keys[to, :, columns] = layer.keys[of, :, columns]
                layer.values[to, :, columns] = layer.values[of, :, columns]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._narrow()

    def reserve(self) -> tuple[Tensor, Tensor]:
        """Make room for the next token of every row. Return (B, used columns + 1) int64 the mask of
        the columns that each row attends to, the next token's included, and (B, 1) int64 that
        token's position in its text.
        """
        self._fit(len(self.lengths), max(self.lengths), self._layer.keys[0])
        lengths = torch.tensor(self.lengths, device=self._layer.keys.device)
        column = torch.arange(self.columns.end - self.columns.begin + 1, device=lengths.device)
        return (column >= len(column) - 1 - lengths[:, None]).long(), lengths[:, None]

    def advance(self) -> None:
        """Count the column that the last pass has written as used."""
        self.columns.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def _of(self, row: int) -> slice:
        return slice(row * self.parts, (row + 1) * self.parts)

    @property
    def _layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    def _narrow(self) -> None:
        """Reduce the used columns to the length of the longest row."""
        self.columns.begin = self.columns.end - max(self.lengths, default=0)

    def _fit(self, rows: int, longest: int, like: Tensor) -> None:
        """Make room for a number of rows, for the longest of them, and for one more token."""
        keys, end = self._layer.keys, self.columns.end
        self.columns.begin = max(self.columns.begin, end - longest)
        rows = rows * self.parts
        size = (0, 0) if keys is None else (keys.shape[0], keys.shape[2])
        if rows <= size[0] and longest <= end < size[1]:
            return
        rows = size[0] if rows <= size[0] else max(rows, 2 * size[0])
        for layer in self.layers:
            layer.resize(rows, longest + SPARE, longest, like)
        self.columns.begin += longest - end
        self.columns.end = longest
