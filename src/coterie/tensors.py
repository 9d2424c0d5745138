"""Named tensors: the mathematics that methods compose, and the one codec for every wire and every file."""

import errno
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as _decode
from safetensors.torch import save as _encode
from safetensors.torch import save_file as _encode_file
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
    encoded: bytes = _encode(_dense(named), metadata=dict(metadata or {}) or None)
    return encoded


def _dense(named: Named) -> Tensors:
    """The tensors as they can be written down."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}


def from_bytes(data: bytes, what: str = "message") -> Tensors:
    """The inverse of `to_bytes`; the tensors own their memory, see `_owned`.

    Raises:
        TensorError: The bytes are truncated or not safetensors.
    """
    try:
        decoded = {name: _owned(tensor) for name, tensor in _decode(data).items()}
    except (SafetensorError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]  # some headers get as far as PyTorch, which refuses them in its own ways
        raise TensorError(
            f"{what}: not valid safetensors bytes ({reason})", "It was truncated or damaged on the way: send it again."
        ) from None
    return decoded


def _owned(tensor: Tensor) -> Tensor:
    """A copy, which begins where PyTorch's tensors begin: where values begin decides how products of them are rounded."""
    return tensor.clone()


def write_atomically(path: Path, data: bytes, lasting: bool = True) -> None:
    """Write a file so that after a crash or on a full disk either the old or the new content is there, never a part.

    Args:
        path: The file; the folders above it are made.
        data: Its content.
        lasting: Whether it must outlive a power cut: wait until it is on the disk. Otherwise it outlives the process.

    Raises:
        SaveError: It could not be written; a former file of that name is unchanged.
    """
    _replace(path, lambda new: new.write_bytes(data), lasting)


def _replace(path: Path, write: Callable[[Path], object], lasting: bool) -> None:
    """Have `write` make a file of another name, and put it in the place of this one. Raises SaveError, see `write_atomically`."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(new)
        if lasting:
            with open(new, "rb") as file:
                os.fsync(file.fileno())
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        new.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        full = isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space and resume." if full else "Check the folder's permissions."
        raise SaveError(f"cannot write {path}: {reason}; what was there before is unchanged", remedy) from error


def save(path: Path, named: Named, metadata: Mapping[str, str] | None = None, lasting: bool = True) -> None:
    """Write a safetensors file atomically, without a second copy in memory. Raises SaveError, see `write_atomically`."""
    _replace(path, lambda new: _encode_file(_dense(named), new, metadata=dict(metadata or {}) or None), lasting)


def load(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors, which own their memory, and metadata of a safetensors file.

    Raises:
        CheckpointError: The file is missing, truncated or not safetensors.
    """
    with _opened(path) as file:
        return {name: _owned(file.get_tensor(name)) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


_HASHING = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="sha256")  # beside the work: hashlib lets other threads run


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content, as `sha256sum` writes it. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_later(path: Path) -> "Future[str]":
    """`digest_of` a file, computed beside other work."""
    return _HASHING.submit(digest_of, path)


def nbytes_of_file(path: Path) -> int:
    """`nbytes` of the tensors in a safetensors file: what is behind the header and its length, 8 bytes."""
    with open(path, "rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def same_as_file(path: Path, named: Named) -> bool:
    """Whether a safetensors file holds just these tensors. The smallest are read first, and none behind one that differs.

    Raises:
        CheckpointError: As `load`.
    """
    with _opened(path) as file:
        if set(file.keys()) != named.keys():
            return False
        pairs = ((file.get_tensor(name), named[name]) for name in sorted(named, key=lambda name: named[name].numel()))
        return all(kept.dtype == tensor.dtype and torch.equal(kept, tensor.cpu()) for kept, tensor in pairs)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (FileNotFoundError, IsADirectoryError):
        raise CheckpointError(f"no tensors at {path}: the file does not exist", "Check the path.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error})", "Use an earlier copy, or make it again."
        ) from None
