"""The user's inputs to a classifier: images or texts in files. Labels are never read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.foreign import opened
from coterie.data.documents import read_rows
from coterie.data.examples import ExampleSplit
from coterie.data.images import pixels
from coterie.data.plain_text import read_text
from coterie.data.refusals import Refusals
from coterie.data.store import LONGEST
from coterie.data.text_encoding import TextEncoder
from coterie.models.architecture import tokenizer
from coterie.models.networks import NetworkShape, Shape
from coterie.models.text import TextShape

IMAGES, TEXTS = (".png", ".jpg", ".jpeg"), (".txt", ".jsonl")


@lru_cache(maxsize=4)
def _encoder(base: str) -> TextEncoder:
    return TextEncoder(tokenizer(base))


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of a classifier, without labels.

    Args:
        names: (N,) where each comes from.
        inputs: (N, ...) as `ExampleSplit` takes them.
    """

    names: tuple[str, ...]
    inputs: npt.NDArray[Any]

    def split(
        self, mean: tuple[float, ...], std: tuple[float, ...], classes: int, name: str = "test"
    ) -> ExampleSplit:
        """Return the samples as a client's split. A split needs labels: each one is 0.

        Args:
            mean: Of each channel of images, subtracted.
            std: Of each channel of images, divided by.
            classes: Of whoever classifies them.
            name: Of the split.

        Raises:
            DataError: They are not finite, or not valid inputs.
        """
        labels = np.zeros(len(self.inputs), dtype=np.int64)
        return ExampleSplit(
            name, self.inputs, labels, np.arange(len(self.inputs)), 0, mean, std, classes
        )


def as_samples(given: Any, shape: Shape) -> Samples:
    """Return any supported input as samples.

    Args:
        given: The path of a file or a folder, or several, see `read`, where a `str` is a path too
            unless texts are asked for; images in memory, see `of_array`; or a text, or several, see
            `of_texts`.
        shape: Of the network.

    Raises:
        DataError: It is none of these.
    """
    if isinstance(given, Samples):
        return given
    several = [given] if isinstance(given, str | Path) else given
    if not isinstance(several, Sequence) or not all(isinstance(one, str | Path) for one in several):
        return of_array(given, shape)
    if not several:
        raise DataError("there is nothing to classify", "Give at least one sample.")
    if isinstance(shape, TextShape) and all(isinstance(one, str) for one in several):
        return of_texts([str(one) for one in several], shape)
    return read([Path(one) for one in several], shape)


def read(paths: Sequence[Path], shape: Shape) -> Samples:
    """Return the samples of files, and of folders and the folders in them; names that begin with a
    dot are skipped.

    Args:
        paths: PNG or JPEG images of the size that the network wants, in colour or grey; or texts,
            one in each .txt, and one in each line of a .jsonl as its "text".
        shape: Of the network.

    Raises:
        DataError: There is nothing, a file of another kind, an image that cannot be read or of
            another size, or an empty text; the message names all such files.
    """
    texts = isinstance(shape, TextShape)
    samples: list[tuple[str, Any]] = []
    with Refusals() as refusals:
        for file in (file for path in paths for file in _files(path, TEXTS if texts else IMAGES)):
            with refusals.gather():
                samples += _texts(file) if texts else [(str(file), _image(file, shape))]
    names, values = zip(*samples, strict=True)
    return (
        of_texts(values, shape, names)
        if isinstance(shape, TextShape)
        else Samples(names, np.stack(values))
    )


def of_texts(texts: Sequence[str], shape: TextShape, names: Sequence[str] | None = None) -> Samples:
    """Texts as token ids; longer texts are cut off at the network's length.

    Raises:
        DataError: A text is empty, or there are no texts.
    """
    names = names or [f"text {k}" for k in range(1, len(texts) + 1)]
    ids = _encoder(shape.base).whole([text[:LONGEST] for text in texts], shape.length)
    if empty := [
        name
        for name, text, tokens in zip(names, texts, ids, strict=True)
        if not text.strip() or not tokens
    ]:
        raise DataError(f"{empty[0]}: the text is empty ({len(empty)} in all)", "Leave it out.")
    inputs = np.full((len(ids), max(map(len, ids), default=1)), -1, dtype=np.int64)
    for row, tokens in zip(inputs, ids, strict=True):
        row[: len(tokens)] = tokens
    return Samples(tuple(names), inputs)


def of_array(images: Any, shape: Shape) -> Samples:
    """Images that are in memory already.

    Args:
        images: (N, C, H, W), or (C, H, W) of a single one: integers from 0 to 255, or floats from 0
            to 1.
        shape: Of the network.

    Raises:
        DataError: They are of another size or range.
    """
    if not isinstance(shape, NetworkShape):
        raise DataError(
            f"{type(images).__name__} for a classifier of texts",
            "Give a text or several, or the paths of files.",
        )
    array = np.asarray(images)
    array = array[None] if array.ndim == 3 else array
    most = 1 if array.dtype.kind == "f" else 255
    if array.ndim != 4 or array.shape[1:] != shape.inputs or not len(array):
        expected = ", ".join(map(str, shape.inputs))
        raise DataError(
            f"images are {array.dtype}{list(array.shape)}",
            f"Expected [images, {expected}], or [{expected}] of one.",
        )
    if array.dtype.kind not in "fiu" or not (array.min() >= 0 and array.max() <= most):
        problem = f"images of {array.dtype} from {array.min()} to {array.max()}"
        raise DataError(problem, "Expected integers from 0 to 255, or floats from 0 to 1.")
    return Samples(
        tuple(f"image {k}" for k in range(1, len(array) + 1)),
        array.astype(np.float32 if most == 1 else np.uint8),
    )


def _files(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """Return a file, or those of a folder. Raises DataError."""
    kinds = f"{', '.join(endings[:-1])} or {endings[-1]}"
    if not path.exists():
        raise DataError(
            f"{path}: there is no such file or folder",
            f"Name a file that ends in {kinds}, or a folder of such.",
        )
    if path.is_dir():
        inside = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
        files = [
            path / file for file in inside if not any(part.startswith(".") for part in file.parts)
        ]
    else:
        files = [path]
    if not files:
        raise DataError(
            f"{path}: the folder is empty", f"Put files in it whose names end in {kinds}."
        )
    if foreign := [file for file in files if file.suffix.lower() not in endings]:
        raise DataError(
            f"{foreign[0]} does not end in {kinds} ({len(foreign)} such files)",
            "Convert it, or move it elsewhere.",
        )
    return files


def _image(path: Path, shape: Shape) -> npt.NDArray[np.uint8]:
    """(C, H, W). Raises DataError."""
    assert isinstance(shape, NetworkShape)
    _, height, width = shape.inputs
    try:
        with opened(path) as file:
            return pixels(file, shape.inputs)
    except Exception as error:  # PIL's readers raise errors of many types; other sizes are refused
        problem = f"{path} is no image of {height} x {width} pixels: {error}"
        raise DataError(problem, f"Give images of height {height} and width {width}.") from None


def _texts(path: Path) -> list[tuple[str, str]]:
    """Return the texts of a file with their names. Raises DataError."""
    if path.suffix.lower() == ".txt":
        return [(str(path), read_text(path))]
    return [
        (f"{path}, text {number}", row["text"])
        for number, row in enumerate(read_rows(path, {"text": str}), start=1)
    ]
