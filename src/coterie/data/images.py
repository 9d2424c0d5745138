"""Federations of images, read from files, decoded and cached. Data sets with a kind of their own:
digits of scikit-learn (on every machine), CIFAR-10, CIFAR-100, MNIST, EMNIST.
"""

import json
import string
import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.importing import require
from coterie.data.federation import Federation
from coterie.data.fetching import Root, download, fetch_splits, located
from coterie.data.partition import CLASSES, Labelled, Partitioner
from coterie.data.plain_text import decompressed
from coterie.data.rows import parquet_rows
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
        """Return the federation, whose clients are views of the same arrays, decoded into a cache
        (None: `store.default_cache`); `order_seed`, the run's seed, fixes the order in which images
        are drawn. Raises DataError: they are missing, damaged, invalid, or too few for the clients;
        SaveError.
        """
        return self.federated(lambda: self.images(cache or default_cache()), order_seed)


class StoredImages(Images):
    """Images in files below `root` or $COTERIE_DATA, or on the Hub: decoded once, memory-mapped."""

    root: Root = None

    folder: ClassVar[str]  # below the root
    files: ClassVar[tuple[str, ...]] = tuple(f"{name}.parquet" for name in _FILES)  # in it
    dataset: ClassVar[str]  # on the Hub
    columns: ClassVar[tuple[str, str]]  # of images and of labels

    def images(self, cache: Path) -> Labelled:
        if paths := self._located():
            read = partial(parquet_rows, columns=self.columns, extra="vision")
            return self._stored(cache, stamps(paths), lambda: [list(read(path)) for path in paths])
        data = fetch_splits(self.dataset, None, _FILES, self.columns)
        chosen = [part.select_columns(list(self.columns)).with_format("arrow") for part in data]
        prints = [part._fingerprint for part in data]
        return self._stored(cache, prints, lambda: [part[:].to_pylist() for part in chosen])

    def _located(self) -> list[Path] | None:
        return located(self.root, [f"{self.folder}/{file}" for file in self.files])

    def _stored(self, cache: Path, fingerprint: Any, tables: Callable[[], list[Any]]) -> Labelled:
        """Return the decoded images of the cache, decoded first if they are missing or damaged."""
        about = [FORMAT, self.dataset, self.columns, self.shape, self.classes, fingerprint]
        key = blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()
        entry = cache / f"images-{key}"

        def build() -> Callable[[Path], None]:
            pairs = zip(tables(), _FILES, strict=True)
            train, test = (self._decode(table, name) for table, name in pairs)
            return partial(_write, Labelled(*train, *test))

        return cached(entry, "image", _open, build)

    def _decode(self, table: Any, name: str) -> tuple[npt.NDArray[np.uint8], Numbers]:
        pictures, labels = ([row[column] for row in table] for column in self.columns)
        remedy = f"Use the files of {self.dataset}, or repair that row."
        images = np.empty((len(pictures), *self.shape), dtype=np.uint8)
        for row, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            where = f"{self.name}, {name}: row {row}"
            if not isinstance(label, int) or not 0 <= label < self.classes:
                problem = f"{where} has label {label!r}, expected 0 to {self.classes - 1}"
                raise DataError(problem, remedy)
            try:
                images[row] = pixels(BytesIO(picture["bytes"]), self.shape)
            # errors of PIL, missing bytes, another size
            except (KeyError, OSError, SyntaxError, TypeError, ValueError) as error:
                channels, height, width = self.shape
                problem = f"{where} is not an image of {channels} x {height} x {width}: {error}"
                raise DataError(problem, remedy) from error
        return images, np.array(labels, dtype=np.int64)


def pixels(file: BinaryIO, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Return an image file's (C, H, W) pixels. Raises ValueError for another size or kind, or
    PIL's errors.
    """
    require("reading images", "vision", "PIL")
    from PIL import Image, ImageOps

    channels, height, width = shape
    image: Image.Image = Image.open(file)
    if sorted(image.size) == sorted((height, width)):  # nothing larger is decoded
        image = ImageOps.exif_transpose(image)
    if image.size != (width, height):
        raise ValueError(f"it is {image.height} x {image.width}")
    if image.mode.startswith("I"):
        raise ValueError("it has 16 bits a channel; save it with 8")
    # drawn on nothing, strokes and background would have one colour
    if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] != 255:
        raise ValueError("it is transparent in parts; save it on a background")
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
    for name, values in vars(images).items():
        np.save(folder / f"{name}.npy", values)


class Digits(Images):
    """Handwritten digits of 8 x 8 pixels, from scikit-learn; a third of each class for tests."""

    kind: Literal["digits"] = "digits"

    name: ClassVar[str] = "digits"
    shape: ClassVar[tuple[int, int, int]] = (1, 8, 8)
    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.3053,)
    std: ClassVar[tuple[float, ...]] = (0.3760,)

    def images(self, cache: Path) -> Labelled:
        require("data.kind: digits", "vision", "sklearn")
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs = (digits.images[:, None] / 16).astype(np.float32)  # 17 shades of grey
        labels = digits.target.astype(np.int64)
        classes = [
            self._random("held out", label).permutation(np.flatnonzero(labels == label))
            for label in range(self.classes)
        ]
        test = np.sort(np.concatenate([rows[: round(len(rows) / 3)] for rows in classes]))
        train = np.setdiff1d(np.arange(len(labels)), test)
        return Labelled(inputs[train], labels[train], inputs[test], labels[test])


class Cifar100(StoredImages):
    """CIFAR-100 (Krizhevsky, 2009): colour photographs of 32 x 32 pixels, of a hundred kinds."""

    kind: Literal["cifar100"] = "cifar100"

    name: ClassVar[str] = "CIFAR-100"
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    folder: ClassVar[str] = "cifar100"
    dataset: ClassVar[str] = "uoft-cs/cifar100"
    columns: ClassVar[tuple[str, str]] = ("img", "fine_label")
    class_names: ClassVar[tuple[str, ...]] = tuple(CLASSES["cifar100"].split())


class Cifar10(StoredImages):
    """CIFAR-10 (Krizhevsky, 2009): colour photographs of 32 x 32 pixels, ten kinds of things."""

    kind: Literal["cifar10"] = "cifar10"

    name: ClassVar[str] = "CIFAR-10"
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    folder: ClassVar[str] = "cifar10"
    dataset: ClassVar[str] = "uoft-cs/cifar10"
    columns: ClassVar[tuple[str, str]] = ("img", "label")
    class_names: ClassVar[tuple[str, ...]] = tuple(CLASSES["cifar10"].split())


class Mnist(StoredImages):
    """MNIST (LeCun et al., 1998): handwritten digits of 28 x 28 pixels."""

    kind: Literal["mnist"] = "mnist"

    name: ClassVar[str] = "MNIST"
    shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    folder: ClassVar[str] = "mnist"
    dataset: ClassVar[str] = "ylecun/mnist"
    columns: ClassVar[tuple[str, str]] = ("image", "label")


class Emnist(StoredImages):
    """EMNIST "By Class" (Cohen et al., 2017): handwritten digits and letters of 28 x 28 pixels, 62
    unequal classes.

    In NIST's own files, which `Royc30ne/emnist-byclass` has on the Hub: IDX, where pictures are
    transposed. Here they stand upright.
    """

    kind: Literal["emnist"] = "emnist"

    name: ClassVar[str] = "EMNIST"
    shape: ClassVar[tuple[int, int, int]] = (1, 28, 28)
    classes: ClassVar[int] = 62
    mean: ClassVar[tuple[float, ...]] = (0.1736,)
    std: ClassVar[tuple[float, ...]] = (0.3317,)
    folder: ClassVar[str] = "emnist"
    files: ClassVar[tuple[str, ...]] = tuple(
        f"emnist-byclass-{name}-{part}-ubyte.gz"
        for name in ("train", "test")
        for part in ("images-idx3", "labels-idx1")
    )
    dataset: ClassVar[str] = "Royc30ne/emnist-byclass"
    columns: ClassVar[tuple[str, str]] = ("images", "labels")
    class_names: ClassVar[tuple[str, ...]] = tuple(
        string.digits + string.ascii_uppercase + string.ascii_lowercase
    )

    def images(self, cache: Path) -> Labelled:
        paths = self._located() or [download(self.dataset, file) for file in self.files]
        return self._stored(cache, stamps(paths), lambda: [paths[:2], paths[2:]])

    def _decode(self, table: Any, name: str) -> tuple[npt.NDArray[np.uint8], Numbers]:
        images, labels = map(_bytes, table)
        if images.shape != (*labels.shape, *self.shape[1:]):
            sizes = list(images.shape), list(labels.shape)
            shapes = "images of shape {} with labels of shape {}".format(*sizes)
            raise DataError(f"{self.name}, {name}: {shapes}", f"Use the files of {self.dataset}.")
        return images.swapaxes(1, 2)[:, None], labels.astype(np.int64)


def _bytes(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of a compressed IDX file of bytes. Raises DataError."""
    try:
        data = decompressed(path)
        shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + shape.nbytes).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        problem = f"{path} cannot be read: {error}"
        raise DataError(problem, "It must be a compressed IDX file; fetch it again.") from error
