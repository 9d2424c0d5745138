"""A network's tensors: files of weights, whether they fit, and which are trained; and gradients of
many networks of one architecture at once, each with its own batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.core.errors import ModelError, TensorError
from coterie.core.files import load as load_tensors
from coterie.core.roles import GENERALIST, SPECIALIST, tag
from coterie.core.tensors import Named, Tensors, all_finite, check_alike
from coterie.models.layout import LocalPart
from coterie.models.networks import MLP, Network, Shape

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
    modules = network.named_modules()
    norms = tuple(f"{name}." for name, module in modules if isinstance(module, nn.BatchNorm2d))
    return {name: buffer for name, buffer in network.named_buffers() if name.startswith(norms)}


def make_local(network: nn.Module, part: LocalPart) -> None:
    """Make one part's GENERALIST tensors a SPECIALIST's. Raises ModelError: no such part."""
    if part == "norms":
        kinds = nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm
        norms = [module for module in network.modules() if isinstance(module, kinds)]
        if not norms:
            remedy = "Choose a network with model.norm batch or group, or another method."
            raise ModelError("the network has no normalisation that could stay local", remedy)
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
        problem = f"{source}: {held:,} values, {shape.title} has {needed:,}"
        raise ModelError(problem, "The file belongs to another network.")


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
        problem = f"{source}: {broken[0]!r} holds values that are not finite"
        raise ModelError(problem, "Take an earlier copy, or train it again.")


def check_trained(parameters: Iterable[nn.Parameter], wrt: Sequence[nn.Parameter]) -> None:
    """Refuse to train no parameters, or others than a model's own. Raises ModelError."""
    trained = set(map(id, wrt))
    if not trained or not trained <= set(map(id, parameters)):
        problem = "gradient: `wrt` is empty or holds a parameter of another model"
        raise ModelError(problem, "Give parameters of this model.")


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


class Bounds(NamedTuple):
    """Memory bounds of a device for many networks at once, in bytes."""

    map: int  # mean output of a network's layers for one batch, above which stacking does not pay
    # parameters and layer outputs of the networks computed at once; others follow in turn
    at_once: int


# On a CPU as measured with benchmarks/cobo.py. Elsewhere an estimate: a layer that puts out 4 MiB
# takes a GPU a few times as long as the kernel launches, which are all that can be saved.
# `speed --device cuda` of that benchmark measures it.
_ON_CPU, _ELSEWHERE = Bounds(1 << 17, 1 << 28), Bounds(1 << 22, 1 << 32)


class Stacked:
    """Many networks of one shape, computed at once by the modules of one of them."""

    def __init__(self, shape: Shape, network: nn.Module, device: torch.device) -> None:
        self.shape, self.network, self.device = shape, network, device
        self._bounds = _ON_CPU if device.type == "cpu" else _ELSEWHERE
        self._parameters = dict(network.named_parameters())
        self._buffers = statistics(network)

    def gains(self, examples: int) -> bool:
        """Whether many networks are faster together than one by one, with batches of `examples`.

        Perceptrons are: one layer of all networks is one batched product. Convolutions become one
        grouped convolution, which saves calls but no arithmetic, so it depends on the size of a
        layer's output.
        """
        return isinstance(self.network, MLP) or examples * mean(self._maps) <= self._bounds.map

    @cached_property
    def _maps(self) -> list[int]:
        """The bytes of each layer's output for one example."""
        sizes: list[int] = []
        network = self.shape.build("meta").eval()
        for layer in network.modules():
            if not list(layer.children()):
                layer.register_forward_hook(lambda _, inputs, output: sizes.append(output.nbytes))
        network(self.shape.example().to("meta"))
        return sizes

    def gradients(
        self, points: Tensor, x: Tensor, y: Tensor, running: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return `Classifier.vectorised` of inputs and labels on the device."""
        gradients, stats = torch.empty(points.shape, device=self.device), []
        size = self.at_once(y.shape[1])
        for start in range(0, len(points), size):
            part = slice(start, start + size)
            statistics = None if running is None else running[part]
            stats.append(self._at(points[part], x[part], y[part], statistics, gradients[part]))
        return gradients, {name: torch.cat([values[name] for values in stats]) for name in stats[0]}

    def at_once(self, examples: int) -> int:
        """Return how many points fit: parameters twice, gradients, and layer outputs twice."""
        parameters = 3 * sum(p.nbytes for p in self._parameters.values())
        return max(1, self._bounds.at_once // (parameters + 2 * examples * sum(self._maps)))

    def _at(
        self, points: Tensor, x: Tensor, y: Tensor, running: Tensor | None, into: Tensor
    ) -> dict[str, Tensor]:
        """Compute `gradients` of points that fit into memory, into `into`, (m, d)."""
        by_name = unflatten(points.detach().to(self.device), self._parameters)
        stacks = {name: stack.requires_grad_() for name, stack in by_name.items()}
        parts = {} if running is None else unflatten(running, self._buffers)
        buffers = {
            name: t.clone(memory_format=torch.contiguous_format) for name, t in parts.items()
        }  # PyTorch changes no others in place
        logits = self._stacked(stacks, buffers, x)
        each = cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        losses = each.view(y.shape).mean(dim=1)
        # each loss depends only on its own point
        gradients = torch.autograd.grad(losses.sum(), list(stacks.values()))
        torch.cat([gradient.flatten(1) for gradient in gradients], dim=1, out=into)
        if running is not None and buffers:
            torch.cat([buffer.flatten(1) for buffer in buffers.values()], dim=1, out=running)
        return {
            "loss": losses.detach(),
            "accuracy": (logits.argmax(dim=2) == y).float().mean(dim=1),
        }

    def _stacked(self, stacks: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        """Return (m, B, classes) of (m, B, C, H, W) at m points; buffers are updated in place."""
        if isinstance(self.network, MLP):
            return self.network.stacked(list(stacks.values()), x)

        def at(point: Tensors, batch: Tensor) -> Tensor:
            return cast(Tensor, torch.func.functional_call(self.network, point, (batch,)))

        return torch.vmap(at)(stacks | buffers, x)


def unflatten(rows: Tensor, named: Named) -> Tensors:
    """Split rows (m, d) into views (m, ...) of the values of each tensor, by name."""
    pieces = torch.split(rows, [tensor.numel() for tensor in named.values()], dim=1)
    return {
        name: piece.view(-1, *t.shape)
        for (name, t), piece in zip(named.items(), pieces, strict=True)
    }
