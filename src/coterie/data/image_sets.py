"""The data sets of images that have a kind of their own: scikit-learn's digits (on every machine),
CIFAR-10, CIFAR-100, MNIST and EMNIST.
"""

import string
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.extras import require
from coterie.data.fetching import download
from coterie.data.images import Images, StoredImages
from coterie.data.partition import Labelled
from coterie.data.plain_text import decompressed
from coterie.data.section import stamps
from coterie.data.splits import Numbers

_THINGS = (  # of CIFAR-100
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain "
    "mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain "
    "plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


class Digits(Images):
    """Handwritten digits of 8 x 8 pixels, which come with scikit-learn. A third of each class is
    for testing.
    """

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
    """CIFAR-100 (Krizhevsky, 2009): colour photographs of 32 x 32 pixels, a hundred kinds of
    things.
    """

    kind: Literal["cifar100"] = "cifar100"

    name: ClassVar[str] = "CIFAR-100"
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    folder: ClassVar[str] = "cifar100"
    dataset: ClassVar[str] = "uoft-cs/cifar100"
    columns: ClassVar[tuple[str, str]] = ("img", "fine_label")
    class_names: ClassVar[tuple[str, ...]] = tuple(_THINGS.split())


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
    class_names: ClassVar[tuple[str, ...]] = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )


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
    class_names: ClassVar[tuple[str, ...]] = (
        *string.digits,
        *string.ascii_uppercase,
        *string.ascii_lowercase,
    )

    def images(self, cache: Path) -> Labelled:
        paths = self._located() or [download(self.dataset, file) for file in self.files]
        return self._stored(cache, stamps(paths), lambda: [paths[:2], paths[2:]])

    def _decode(self, table: Any, name: str) -> tuple[npt.NDArray[np.uint8], Numbers]:
        """Return the images and labels of two files. Raises DataError if their shapes differ."""
        images, labels = map(_bytes, table)
        if images.shape != (*labels.shape, *self.shape[1:]):
            problem = (
                f"{self.name}, {name}: images of shape {list(images.shape)} with labels of shape "
                f"{list(labels.shape)}"
            )
            raise DataError(problem, f"Use the files of {self.dataset}.")
        return images.swapaxes(1, 2)[:, None], labels.astype(np.int64)


def _bytes(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of a compressed IDX file of bytes. Raises DataError."""
    try:
        data = decompressed(path)
        shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + shape.nbytes).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {error}", "It must be a compressed IDX file; fetch it again."
        ) from error
