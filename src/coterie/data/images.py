"""Federations of images, which are read from files, decoded and cached."""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.extras import require
from coterie.core.foreign import opened, path_of
from coterie.data.federation import Federation
from coterie.data.fetching import Root, fetch_splits, located
from coterie.data.partition import Labelled, Partitioner
from coterie.data.section import stamps
from coterie.data.splits import Numbers
from coterie.data.store import cached, default_cache

FORMAT = 1  # raise it whenever equal keys would no longer mean equal arrays

_FILES = ("train", "test")


class Images(Partitioner):
    """A `data` section of images. Subclasses say where they are."""

    things: ClassVar[str] = "images"
    shape: ClassVar[tuple[int, int, int]]  # channels, height, width
    classes: ClassVar[int]
    # of each channel, of the training images as published: known to all, learned from nobody
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    @abstractmethod
    def images(self, cache: Path) -> Labelled:
        """Return all images. Raises DataError if they are missing."""

    def load(self, cache: Path | None = None, order_seed: int = 0) -> Federation:
        """Return the federation. Its clients are views of the same arrays.

        Args:
            cache: Its folder; None: `store.default_cache`.
            order_seed: Fixes the order in which images are drawn: the run's seed.

        Raises:
            DataError: The images are missing, damaged or invalid, or too few for the clients.
            SaveError: The cache cannot be written.
        """
        return self.federated(lambda: self.images(cache or default_cache()), order_seed)


class StoredImages(Images):
    """Images in files (parquet but for EMNIST) below `root` or $COTERIE_DATA, otherwise on the
    Hub: decoded once, then memory-mapped.
    """

    root: Root = None

    folder: ClassVar[str]  # below the root
    files: ClassVar[tuple[str, ...]] = tuple(f"{name}.parquet" for name in _FILES)  # in it
    dataset: ClassVar[str]  # on the Hub
    columns: ClassVar[tuple[str, str]]  # of images and of labels

    def images(self, cache: Path) -> Labelled:
        if paths := self._located():
            return self._stored(
                cache, stamps(paths), lambda: [_read(path, self.columns) for path in paths]
            )
        data = fetch_splits(self.dataset, None, _FILES, self.columns)
        prints = [part._fingerprint for part in data]
        return self._stored(
            cache,
            prints,
            lambda: [
                part.select_columns(list(self.columns)).with_format("arrow")[:] for part in data
            ],
        )

    def _located(self) -> list[Path] | None:
        """Return the files; None if no root is named. Raises DataError if any is missing."""
        return located(self.root, [f"{self.folder}/{file}" for file in self.files])

    def _stored(self, cache: Path, fingerprint: Any, tables: Callable[[], list[Any]]) -> Labelled:
        """Return the decoded images of the cache; decoded first if they are missing or damaged."""
        text = json.dumps(
            [FORMAT, self.dataset, self.columns, self.shape, self.classes, fingerprint]
        )
        entry = cache / f"images-{blake2b(text.encode(), digest_size=16).hexdigest()}"

        def build() -> Callable[[Path], None]:
            parts = [
                self._decode(table, name) for table, name in zip(tables(), _FILES, strict=True)
            ]
            return partial(_write, Labelled(*parts[0], *parts[1]))

        return cached(entry, "image", _open, build)

    def _decode(self, table: Any, name: str) -> tuple[npt.NDArray[np.uint8], Numbers]:
        """Return the images and labels of an Arrow table. Raises DataError for an invalid row."""
        pictures, labels = (table.column(column).to_pylist() for column in self.columns)
        remedy = f"Use the files of {self.dataset}, or repair that row."
        images = np.empty((len(pictures), *self.shape), dtype=np.uint8)
        for row, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            where = f"{self.name}, {name}: row {row}"
            if not isinstance(label, int) or not 0 <= label < self.classes:
                raise DataError(
                    f"{where} has label {label!r}, expected 0 to {self.classes - 1}", remedy
                )
            try:
                images[row] = pixels(BytesIO(picture["bytes"]), self.shape)
            # errors of PIL, missing bytes, another size
            except (OSError, SyntaxError, TypeError, ValueError) as error:
                channels, height, width = self.shape
                raise DataError(
                    f"{where} is not an image of {channels} x {height} x {width}: {error}", remedy
                ) from error
        return images, np.array(labels, dtype=np.int64)


def _read(path: Path, columns: Sequence[str]) -> Any:
    """Return some columns of a parquet file, as an Arrow table. Raises DataError."""
    require(f"{path}: a parquet file", "vision", "pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        with opened(path) as binary:
            file = parquet.ParquetFile(path_of(binary, path))
        if missing := [column for column in columns if column not in file.schema_arrow.names]:
            remedy = f"Name a folder whose files have {' and '.join(columns)}: --set data.root=DIR."
            raise DataError(f"{path}: no column {', '.join(map(repr, missing))}", remedy)
        return file.read(columns=list(columns))
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", "It must be a parquet file; fetch it again."
        ) from error


def pixels(file: BinaryIO, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Return the (C, H, W) pixels of an image file. Raises ValueError for another size, and errors
    of PIL.
    """
    require("reading images", "vision", "PIL")
    from PIL import Image

    channels, height, width = shape
    image = Image.open(file)
    if image.size != (width, height):
        raise ValueError(f"it is {image.height} x {image.width}")
    return np.moveaxis(
        np.atleast_3d(np.asarray(image.convert("L" if channels == 1 else "RGB"))), 2, 0
    )


def _open(entry: Path) -> Labelled | None:
    """Return the memory-mapped arrays of a cache entry; None if one is missing or damaged."""
    try:
        return Labelled(
            *(np.load(entry / f"{field.name}.npy", mmap_mode="r") for field in fields(Labelled))
        )
    except (OSError, ValueError):
        return None


def _write(images: Labelled, folder: Path) -> None:
    for field in fields(Labelled):
        np.save(folder / f"{field.name}.npy", getattr(images, field.name))
