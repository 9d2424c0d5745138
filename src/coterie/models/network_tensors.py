"""A network's tensors: files of weights, whether they fit, and which are trained."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from coterie.core.errors import ModelError, TensorError
from coterie.core.files import load as load_tensors
from coterie.core.roles import GENERALIST, SPECIALIST, tag
from coterie.core.tensors import Named, Tensors, all_finite, check_alike
from coterie.models.layout import LocalPart
from coterie.models.networks import Network, Shape

_SMALL = 1_000_000  # values that cost nothing, see `check_size`


def load(path: Path, shape: Shape) -> Tensors:
    """Return a network's parameters and running statistics from a safetensors file, without the
    batch counts of normalisation.

    Raises CheckpointError if it is missing or damaged, ModelError if it is of another network.
    """
    named, _ = load_tensors(path)
    tensors = {
        name: tensor for name, tensor in named.items() if not name.endswith(".num_batches_tracked")
    }
    check(shape, tensors, str(path))
    return tensors


def statistics(network: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of batch normalisation, by name, and no other buffers."""
    norms = {
        prefix: module
        for prefix, module in network.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    }
    return {
        f"{prefix}.{name}": buffer
        for prefix, norm in norms.items()
        for name, buffer in norm.named_buffers()
    }


def make_local(network: nn.Module, part: LocalPart) -> None:
    """Make one part of a network, every parameter a GENERALIST, a SPECIALIST's. Raises ModelError
    if there is no such part.
    """
    if part == "norms":
        kinds = nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm
        norms = [module for module in network.modules() if isinstance(module, kinds)]
        if not norms:
            raise ModelError(
                "the network has no normalisation that could stay local",
                "Choose a network with model.norm batch or group, or another method.",
            )
        for norm in norms:
            tag(norm, SPECIALIST)
    elif part != "none":
        inner, outer = (GENERALIST, SPECIALIST) if part == "head" else (SPECIALIST, GENERALIST)
        tag(network, inner)
        for module in head(network):
            tag(module, outer)


def head(network: nn.Module) -> list[nn.Module]:
    """Return the modules of a network that classify its features."""
    if isinstance(network, Network):
        return [cast(nn.Module, network.head)]
    model: Any = network.get_submodule("model")  # of transformers
    return [part for part in model.children() if part is not model.base_model]


def check_size(shape: Shape, tensors: Named, source: str) -> None:
    """Refuse a shape that is far larger than its tensors before anything of its size is allocated:
    a file may claim billions of units. Raises ModelError.
    """
    held = sum(tensor.numel() for tensor in tensors.values())
    try:
        needed = sum(parameter.numel() for parameter in shape.build("meta").parameters())
    except (RuntimeError, TypeError) as error:  # sizes that no tensor can have
        raise ModelError(f"{source}: {shape.title}: {error}", "It was changed by hand.") from None
    if needed > 2 * held + _SMALL:
        raise ModelError(
            f"{source}: {held:,} values, {shape.title} has {needed:,}",
            "The file belongs to another network.",
        )


def check(shape: Shape, tensors: Named, source: str) -> None:
    """Refuse tensors that are not all the parameters and running statistics of a network of this
    shape, fp32 and finite. Raises ModelError that names the source and the first wrong tensor.
    """
    try:
        network = shape.build("meta")
        check_alike(dict(network.named_parameters()) | statistics(network), tensors, source)
    except TensorError as error:
        raise ModelError(error.problem, f"Name the tensors of {shape.title}.") from None
    if broken := [name for name, tensor in tensors.items() if not all_finite({name: tensor})]:
        raise ModelError(
            f"{source}: {broken[0]!r} holds values that are not finite",
            "Take an earlier copy, or train it again.",
        )


def check_trained(parameters: Iterable[nn.Parameter], wrt: Sequence[nn.Parameter]) -> None:
    """Refuse to train no parameters, or others than a model's own. Raises ModelError."""
    trained = set(map(id, wrt))
    if not trained or not trained <= set(map(id, parameters)):
        raise ModelError(
            "gradient: `wrt` is empty or holds a parameter of another model",
            "Give parameters of this model.",
        )


@contextmanager
def training(module: nn.Module, wrt: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let only `wrt` of a module's parameters require gradients, see `check_trained`."""
    parameters, trained = list(module.parameters()), set(map(id, wrt))
    check_trained(parameters, wrt)
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(id(parameter) in trained)
        yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)
