"""The file of one client for a graph: its tensors as safetensors, named after the graph's inputs.

A safetensors file is a length of 8 bytes, a JSON of names, shapes and offsets, and the values. A
browser can read it in a few lines, as can any language.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from coterie.core.errors import ExportError
from coterie.core.files import load, save
from coterie.core.tensors import all_finite

PRECISIONS = ("f32", "f16", "int8")
ENDING, SCALE = ".safetensors", ".scale"


def write(path: Path, tensors: Mapping[str, Tensor], precision: str) -> None:
    """Write tensors in a precision. Raises SaveError, and ExportError for values beyond its range.

    `int8` rounds every matrix to 8 bits: NAME (..., width) has a scale NAME.scale (..., 1), and the
    value is their product. Integers, and vectors with `int8`, stay as they are.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and precision == "f16":
            stored[name] = tensor.half()
        elif tensor.is_floating_point() and precision == "int8" and tensor.ndim > 1:
            stored[name], stored[name + SCALE] = _rounded(tensor)
        else:
            stored[name] = tensor
    if broken := [name for name, tensor in stored.items() if not all_finite({name: tensor})]:
        raise ExportError(
            f"{path}: {broken[0]} has values that {precision} cannot hold",
            "Export it in f32, or train it again.",
        )
    save(path, stored, {"format": "pt", "precision": precision})


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits and the scale of each row."""
    # the smallest scale keeps rows of zeros from a division by 0
    scale = tensor.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (tensor / scale).round().to(torch.int8), scale


def read(path: Path) -> dict[str, Tensor]:
    """Read a client's tensors, named after the graph's inputs, fp32 or integers. Raises
    CheckpointError.
    """
    stored, _ = load(path)
    values: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name + SCALE in stored:
            values[name] = tensor.float() * stored[name + SCALE]
        elif not name.endswith(SCALE):
            values[name] = tensor.float() if tensor.is_floating_point() else tensor
    return values
