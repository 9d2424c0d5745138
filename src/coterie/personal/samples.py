"""The inputs of a classifier: images or texts, in files or in memory. Labels are never read."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.foreign import opened
from coterie.data.examples import ExampleSplit
from coterie.data.fetching import files_of, read_rows
from coterie.data.images import pixels
from coterie.data.plain_text import read_text
from coterie.data.refusals import Refusals
from coterie.data.store import LONGEST
from coterie.data.text_encoding import TextEncoder
from coterie.models.architecture import tokenizer
from coterie.models.networks import NetworkShape, Shape
from coterie.models.text import TextShape

IMAGES, TEXTS = (".png", ".jpg", ".jpeg"), (".txt", ".jsonl")
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # of PNG and JPEG


@lru_cache(maxsize=4)
def _encoder(base: str) -> TextEncoder:
    return TextEncoder(tokenizer(base))


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of a classifier, (N, ...) as `ExampleSplit` has them, and their names; no labels."""

    names: tuple[str, ...]
    inputs: npt.NDArray[Any]

    def split(
        self, mean: tuple[float, ...], std: tuple[float, ...], classes: int, name: str = "test"
    ) -> ExampleSplit:
        """Return the samples as a client's split, in which all labels are 0. `mean` and `std` are
        those of each channel of images. Raises DataError if inputs are not finite, or invalid.
        """
        labels = np.zeros(len(self.inputs), dtype=np.int64)
        return ExampleSplit(
            name, self.inputs, labels, np.arange(len(self.inputs)), 0, mean, std, classes
        )


def as_samples(given: Any, shape: Shape) -> Samples:
    """Return any supported input as samples: the path of a file or folder, or several, see `read`
    (for images a `str` is a path too); images in memory, see `of_array`; or texts, see `of_texts`.
    Raises DataError for other inputs.
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
    """Read the samples of files, and of folders with their subfolders; names that begin with a dot
    are skipped. Files are PNG or JPEG images of the network's input size, in colour or grey; or
    texts, one in each .txt file, and one in each line of a .jsonl file as its "text". Raises
    DataError, which names all such files: there are none, or files of another kind, unreadable
    images or ones of another size, or empty texts.
    """
    texts = isinstance(shape, TextShape)
    samples: list[tuple[str, Any]] = []
    with Refusals() as refusals:
        for file in (file for path in paths for file in _files(path, TEXTS if texts else IMAGES)):
            with refusals.gather():
                samples += (
                    _texts(file)
                    if texts
                    else [(str(file), _image(str(file), partial(opened, file), shape))]
                )
    names, values = zip(*samples, strict=True)
    if isinstance(shape, TextShape):
        return of_texts(values, shape, names)
    return Samples(names, np.stack(values))


def of_texts(texts: Sequence[str], shape: TextShape, names: Sequence[str] | None = None) -> Samples:
    """Return texts as token ids, cut at the network's length. Raises DataError for empty texts."""
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
    """Return images in memory as samples: (N, C, H, W), or (C, H, W) of a single one, integers from
    0 to 255 or floats from 0 to 1. Raises DataError for another size or range.
    """
    if not isinstance(shape, NetworkShape):
        remedy = "Give a text or several, or the paths of files."
        raise DataError(f"{type(images).__name__} for a classifier of texts", remedy)
    array = np.asarray(images)
    array = array[None] if array.ndim == 3 else array
    most = 1 if array.dtype.kind == "f" else 255
    if array.ndim != 4 or array.shape[1:] != shape.inputs or not len(array):
        expected = ", ".join(map(str, shape.inputs))
        remedy = f"Expected [images, {expected}], or [{expected}] of one."
        raise DataError(f"images are {array.dtype}{list(array.shape)}", remedy)
    if array.dtype.kind not in "fiu" or not (array.min() >= 0 and array.max() <= most):
        problem = f"images of {array.dtype} from {array.min()} to {array.max()}"
        raise DataError(problem, "Expected integers from 0 to 255, or floats from 0 to 1.")
    return Samples(
        tuple(f"image {k}" for k in range(1, len(array) + 1)),
        array.astype(np.float32 if most == 1 else np.uint8),
    )


def _files(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """Return the path of a file, or of all files of a folder. Raises DataError."""
    kinds = f"{', '.join(endings[:-1])} or {endings[-1]}"
    if not path.exists():
        problem = f"{path}: there is no such file or folder"
        raise DataError(problem, f"Name a file that ends in {kinds}, or a folder of such.")
    files = [
        file
        for file in (files_of(path) if path.is_dir() else [path])
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        problem = f"{path}: the folder is empty"
        raise DataError(problem, f"Put files in it whose names end in {kinds}.")
    if foreign := [file for file in files if file.suffix.lower() not in endings]:
        problem = f"{foreign[0]} does not end in {kinds} ({len(foreign)} such files)"
        raise DataError(problem, "Convert it, or move it elsewhere.")
    return files


def of_image(content: bytes, shape: NetworkShape) -> Samples:
    """Return a PNG or JPEG file's content as a sample. Raises DataError: another kind or size."""
    if not content.startswith(_SIGNATURES):
        raise DataError("the file is no PNG or JPEG image", "Choose one that is.")
    return Samples(("image",), _image("the file", partial(io.BytesIO, content), shape)[None])


def _image(name: str, open_file: Callable[[], BinaryIO], shape: Shape) -> npt.NDArray[np.uint8]:
    """Read an image as (C, H, W). Raises DataError."""
    assert isinstance(shape, NetworkShape)
    _, height, width = shape.inputs
    try:
        with open_file() as file:
            return pixels(file, shape.inputs)
    # PIL's readers raise errors of many types
    except Exception as error:
        problem = f"{name} is no image of {height} x {width} pixels: {error}"
        raise DataError(problem, f"Give images of height {height} and width {width}.") from None


def _texts(path: Path) -> list[tuple[str, str]]:
    if path.suffix.lower() == ".txt":
        return [(str(path), read_text(path))]
    return [
        (f"{path}, text {number}", row["text"])
        for number, row in enumerate(read_rows(path, {"text": str}), start=1)
    ]
