"""Named tensors: the mathematics that methods compose, and the one codec for every wire and every file."""

import errno
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as _decode
from safetensors.torch import save as _encode
from torch import Tensor

from coterie.errors import CheckpointError, SaveError, TensorError

Named = Mapping[str, Tensor]
Tensors = dict[str, Tensor]


def check_alike(expected: Named, found: Named, what: str = "tensors") -> None:
    """Refuse `found` unless it has exactly the names, shapes and dtypes of `expected`.

    Raises:
        TensorError: Naming the first foreign, missing or misshapen tensor.
    """
    if foreign := sorted(found.keys() - expected.keys()):
        raise TensorError(f"{what}: foreign tensor {foreign[0]!r} ({len(foreign)} in all)", "Expected only: " + _few(expected))
    if missing := sorted(expected.keys() - found.keys()):
        raise TensorError(f"{what}: tensor {missing[0]!r} is missing ({len(missing)} in all)", "Found: " + _few(found))
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise TensorError(
                f"{what}: {name!r} is {_form(found[name])}, expected {_form(tensor)}",
                "Both sides must come from the same recipe (rank, experts, base model).",
            )


def _few(named: Named) -> str:
    names = sorted(named)
    return ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "") if names else "nothing"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def weighted_sum(terms: Iterable[tuple[float, Named]]) -> Tensors:
    """sum_i w_i x_i, name by name, in the order given. Of no terms: the empty dict.

    Raises:
        TensorError: The terms differ in names, shapes or dtypes.
    """
    total: Tensors = {}
    first: Named | None = None
    for weight, named in terms:
        if first is None:
            first, total = named, {name: tensor * weight for name, tensor in named.items()}
            continue
        check_alike(first, named, "terms of a sum")
        for name, tensor in named.items():
            total[name].add_(tensor, alpha=weight)
    return total


def axpy(alpha: float, x: Named, y: Named) -> Tensors:
    """Alpha x + y, name by name."""
    return weighted_sum([(1.0, y), (alpha, x)])


def dot(x: Named, y: Named) -> float:
    """The inner product over all names, accumulated in float64."""
    check_alike(x, y, "inner product")
    return float(sum(torch.sum(x[name].double() * y[name].double()) for name in x))


def norm(x: Named) -> float:
    """The Euclidean norm over all names."""
    return math.sqrt(dot(x, x))


def all_finite(named: Named) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in named.values() if tensor.is_floating_point())


def copy(named: Named) -> Tensors:
    """Detached copies that share no memory with the originals."""
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def prefixed(prefix: str, named: Named) -> Tensors:
    """The same tensors as `<prefix>/<name>`: several sets in one message or state."""
    return {f"{prefix}/{name}": tensor for name, tensor in named.items()}


def under(prefix: str, named: Named) -> Tensors:
    """The inverse of `prefixed`: the tensors of one set, by their own names."""
    return {name.removeprefix(f"{prefix}/"): tensor for name, tensor in named.items() if name.startswith(f"{prefix}/")}


def nbytes(named: Named) -> int:
    """The size of the values in bytes, without names and shapes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in named.values())


def to_bytes(named: Named, metadata: Mapping[str, str] | None = None) -> bytes:
    """Safetensors bytes: a manifest of names, shapes and dtypes, then one flat array."""
    values = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    encoded: bytes = _encode(values, metadata=dict(metadata or {}) or None)
    return encoded


def from_bytes(data: bytes, what: str = "message") -> Tensors:
    """The inverse of `to_bytes`; the tensors own their memory.

    Raises:
        TensorError: The bytes are truncated or not safetensors.
    """
    try:
        decoded: Tensors = _decode(data)
    except SafetensorError as error:
        raise TensorError(
            f"{what}: not valid safetensors bytes ({error})", "It was truncated or damaged on the way: send it again."
        ) from None
    return decoded


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that after a crash or on a full disk either the old or the new content is there, never a part.

    Raises:
        SaveError: It could not be written; a former file of that name is unchanged.
    """
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        remedy = "Free some space and resume." if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check the folder's permissions."
        raise SaveError(f"cannot write {path}: {error.strerror}; what was there before is unchanged", remedy) from error


def save(path: Path, named: Named, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Raises SaveError, see `write_atomically`."""
    write_atomically(path, to_bytes(named, metadata))


def load(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        CheckpointError: The file is missing, truncated or not safetensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (FileNotFoundError, IsADirectoryError):
        raise CheckpointError(f"no tensors at {path}: the file does not exist", "Check the path.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error})", "Use an earlier copy, or make it again."
        ) from None
