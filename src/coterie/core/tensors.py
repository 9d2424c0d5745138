"""Named tensors: the mathematics that methods compose, and the codec for messages and files."""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as _decode
from safetensors.torch import save as _encode
from torch import Tensor

from coterie.core import devices, foreign
from coterie.core.errors import TensorError

Named = Mapping[str, Tensor]
Tensors = dict[str, Tensor]
T = TypeVar("T")

MOST_HEADER = 16 << 20  # bytes of a safetensors header: of some 200,000 tensors
MOST_OF_ONE = 2 << 20  # of what one client sends or has: some 20,000 tensors, read in a second


def check_alike(expected: Named, tensors: Named, what: str = "tensors") -> None:
    """Raise TensorError for the first tensor that is missing, or unlike that of `expected`."""
    if foreign := sorted(tensors.keys() - expected.keys()):
        problem = f"{what}: unexpected tensor {foreign[0]!r} ({len(foreign)} in all)"
        raise TensorError(problem, "Expected only: " + _few(expected))
    if missing := sorted(expected.keys() - tensors.keys()):
        problem = f"{what}: tensor {missing[0]!r} is missing ({len(missing)} in all)"
        raise TensorError(problem, "Found: " + _few(tensors))
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
            problem = f"{what}: {name!r} is {_form(tensors[name])}, expected {_form(tensor)}"
            remedy = "Both sides must come from the same recipe (rank, experts, base model)."
            raise TensorError(problem, remedy)


def _few(named: Named) -> str:
    names = sorted(named)
    if names:
        return ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
    return "nothing"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def weighted_sum(terms: Iterable[tuple[float, Named]]) -> Tensors:
    """Return sum_i w_i x_i by name, in the given order, on the devices of the first term (clients
    on an accelerator may have sent others); {} without terms. Raises TensorError: the terms differ
    in names, shapes or dtypes.
    """
    total: Tensors = {}
    first: Named | None = None
    for weight, named in terms:
        if first is None:
            first, total = named, {name: tensor * weight for name, tensor in named.items()}
            continue
        check_alike(first, named, "terms of a sum")
        for name, tensor in named.items():
            total[name].add_(tensor.to(total[name].device), alpha=weight)
    return total


def axpy(alpha: float, x: Named, y: Named) -> Tensors:
    """Return alpha x + y, name by name."""
    return weighted_sum([(1.0, y), (alpha, x)])


def dot(x: Named, y: Named) -> float:
    """Return the inner product over all names, accumulated in float64."""
    check_alike(x, y, "inner product")
    return float(sum(torch.sum(devices.exact(x[name]) * devices.exact(y[name])) for name in x))


def norm(x: Named) -> float:
    """Return the Euclidean norm over all names."""
    return math.sqrt(dot(x, x))


def all_finite(named: Named) -> bool:
    """Return whether all values are finite, usually in one pass: a finite sum has finite terms."""
    return all(
        bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
        for tensor in named.values()
        if tensor.is_floating_point()
    )


def copy(named: Named) -> Tensors:
    """Return detached copies that share no memory with the originals."""
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def prefixed(prefix: str, named: Named) -> Tensors:
    """Return the tensors named `<prefix>/<name>`, for several sets in one message or state."""
    return {f"{prefix}/{name}": tensor for name, tensor in named.items()}


def under(prefix: str, named: Named) -> Tensors:
    """Return the tensors with a prefix, without it: the inverse of `prefixed`."""
    start = f"{prefix}/"
    return {name.removeprefix(start): t for name, t in named.items() if name.startswith(start)}


def nbytes(named: Named) -> int:
    """Return the size of the values in bytes, without names and shapes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in named.values())


def parts_within(megabytes: float, items: Sequence[T], bytes_each: int) -> Iterator[Sequence[T]]:
    """Yield the items in as few parts as fit into memory, each with at least one item."""
    size = max(1, math.floor(megabytes * 1e6 / bytes_each))
    for start in range(0, len(items), size):
        yield items[start : start + size]


def to_bytes(named: Named, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return safetensors bytes: a manifest of names, shapes and dtypes, then one flat array."""
    encoded: bytes = _encode(_dense(named), metadata=dict(metadata or {}) or None)
    return encoded


def _dense(named: Named) -> Tensors:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}


def from_bytes(data: bytes, what: str = "message", most_header: int = MOST_HEADER) -> Tensors:
    """Return the inverse of `to_bytes`; the tensors own their memory, see `_owned`. Raises
    TensorError, naming `what`: the bytes are damaged, or the header is longer than `most_header`
    bytes.
    """
    try:
        check_header(io.BytesIO(data), most_header)
        decoded = {name: _owned(tensor) for name, tensor in _decode(data).items()}
    except (
        SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # PyTorch, too, refuses some headers, with errors of its own
        reason = str(error).partition("\n")[0]
        remedy = "It was truncated or damaged on the way: send it again."
        raise TensorError(f"{what}: not valid safetensors bytes ({reason})", remedy) from None
    return decoded


def check_header(file: BinaryIO, most: int) -> None:
    """Raise ValueError if a safetensors header is longer than `most` bytes, or has a name twice."""
    length = int.from_bytes(file.read(8), "little")
    if length > most:
        raise ValueError(f"a header of {length:,} bytes, at most {most:,} are read")
    foreign.json_of(file.read(length))


def _owned(tensor: Tensor) -> Tensor:
    """Return a copy, aligned as PyTorch aligns tensors: the rounding of products depends on it."""
    return tensor.clone()
