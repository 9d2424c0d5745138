"""Gradients of many networks of one architecture at once, each with its own batch."""

from functools import cached_property
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.core.tensors import Named, Tensors
from coterie.models.network_tensors import statistics
from coterie.models.networks import MLP, Shape


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
        """Whether many clients' networks are faster together than one by one, each with a batch of
        `examples`.

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
        losses = (
            cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            .view(y.shape)
            .mean(dim=1)
        )
        gradients = torch.autograd.grad(
            losses.sum(), list(stacks.values())
        )  # each loss depends only on its own point
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
            logits: Tensor = torch.func.functional_call(self.network, point, (batch,))
            return logits

        return torch.vmap(at)(stacks | buffers, x)


def unflatten(rows: Tensor, named: Named) -> Tensors:
    """Split rows (m, d) into views (m, ...) of the values of each tensor, by name."""
    pieces = torch.split(rows, [tensor.numel() for tensor in named.values()], dim=1)
    return {
        name: piece.view(-1, *t.shape)
        for (name, t), piece in zip(named.items(), pieces, strict=True)
    }
