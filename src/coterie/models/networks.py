"""Networks that classify images, and their layers: a perceptron, a small convolutional one, and
residual ones.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from coterie.core.errors import ModelError
from coterie.core.protocol import derive_seed
from coterie.core.roles import GENERALIST, tag
from coterie.core.tensors import Tensors

Norm = Literal["batch", "group", "none"]
_LARGEST_GROUPS = 32  # of group normalisation, as its authors propose


class Convolution(nn.Sequential):
    """3x3 convolution, normalisation (or a bias), optionally max pooling by 2, and ReLU."""

    def __init__(self, inputs: int, outputs: int, norm: Norm, pool: bool = False) -> None:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm == "none")
        pooling = [nn.MaxPool2d(2)] * pool  # before ReLU: the same, of a quarter of the values
        super().__init__(convolution, _norm(norm, outputs), *pooling, nn.ReLU())


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "group":
        return nn.GroupNorm(math.gcd(_LARGEST_GROUPS, channels), channels)
    layer = nn.BatchNorm2d(channels)
    layer.num_batches_tracked = None  # momentum is constant, so that nothing reads it
    return layer


class Residual(nn.Module):
    """x + f(x), f being two convolutions."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Convolution(channels, channels, norm), Convolution(channels, channels, norm)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same."""
        return x + cast(Tensor, self.body(x))


class Subsampling(nn.Module):
    """Every second pixel of each row and column, and `extra` channels of zeros."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.before, self.behind = extra // 2, extra - extra // 2

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C + extra, ceil(H / 2), ceil(W / 2))."""
        return pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.behind))


class Block(nn.Module):
    """relu(s(x) + f(x)), f being two convolutions, and s the identity if f keeps the size. If f
    `halves` height and width, s is a 1x1 convolution if it `projects` (option B of He et al.), or
    else subsampling (option A).
    """

    def __init__(self, inputs: int, outputs: int, norm: Norm, halves: bool, projects: bool) -> None:
        super().__init__()
        stride, bias = 2 if halves else 1, norm == "none"
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.bn1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.bn2 = _norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if halves and projects:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=bias), _norm(norm, outputs)
            )
        elif halves:
            self.shortcut = Subsampling(outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H', W')."""
        inner = self.bn1(self.conv1(x)).relu()
        return cast(Tensor, self.shortcut(x) + self.bn2(self.conv2(inner))).relu()


class Shape(Protocol):
    """All that determines a network without data: a `NetworkShape` or a `TextShape`."""

    @property
    def classes(self) -> int: ...
    @property
    def title(self) -> str: ...
    def build(self, device: torch.device | str = "cpu") -> nn.Module: ...
    def initial(self, seed: int) -> Tensors: ...
    def check_inputs(self, x: Tensor) -> None: ...
    def example(self) -> Tensor: ...


@dataclass(frozen=True)
class NetworkShape:
    """All that determines a network of images without data. Raises ModelError if a size is not
    positive, or there is no such network or normalisation.
    """

    # the architecture
    network: Literal["mlp", "cnn", "resnet9", "resnet20", "resnet56", "resnet34"]
    inputs: tuple[int, int, int]  # channels, height and width of an image
    classes: int  # width of the output
    # widths of the MLP's hidden layers, its only setting; an MLP has no normalisation
    hidden: tuple[int, ...] = (64, 64)
    norm: Norm = "batch"  # the normalisation after each convolution
    # w, channels of the first convolution; the others are multiples of it. None: the network's
    # default, 16 for ResNet-20 and -56 and 64 for the others
    width: int | None = None

    def __post_init__(self) -> None:
        if (
            len(self.inputs) != 3
            or min(*self.inputs, *self.hidden, self.classes, self.channels) < 1
        ):
            raise ModelError(
                f"a network of inputs {self.inputs}, hidden {self.hidden}, width {self.channels} "
                f"and {self.classes} classes",
                "Inputs are (channels, height, width), and every size is at least 1.",
            )
        if self.network not in NETWORKS or self.norm not in get_args(Norm):
            remedy = f"Networks: {', '.join(NETWORKS)}; norms: batch, group, none."
            raise ModelError(f"no network {self.network!r} with norm {self.norm!r}", remedy)

    @property
    def channels(self) -> int:
        """w, given or the network's default."""
        if self.width is not None:
            return self.width
        return 16 if self.network in ("resnet20", "resnet56") else 64

    @property
    def title(self) -> str:
        """A short description of the network."""
        return f"a {self.network} for {self.inputs} and {self.classes} classes"

    def build(self, device: torch.device | str = "cpu") -> "Network":
        """Return the network with `initial` values of seed 0; every parameter is a GENERALIST."""
        with torch.device("meta"):
            network = NETWORKS[self.network](self)
        tag(network, GENERALIST)
        if torch.device(device).type != "meta":
            network.to_empty(device=device)
            network.load_state_dict(initial(network, 0), strict=False)
            for name, statistic in network.named_buffers():
                statistic.fill_(name.endswith("running_var"))
        return network

    def initial(self, seed: int) -> Tensors:
        """See `networks.initial`."""
        return initial(self.build("meta"), seed)

    def check_inputs(self, x: Tensor) -> None:
        """Refuse inputs that are not finite fp32 (B, C, H, W) of this size. Raises ModelError."""
        if x.dtype != torch.float32 or x.ndim != 4 or x.shape[1:] != self.inputs:
            expected = f"float32 [examples, {', '.join(map(str, self.inputs))}]"
            raise ModelError(f"a batch of {x.dtype}{list(x.shape)} images", f"Expected {expected}.")
        if not torch.isfinite(x).all():
            remedy = "Repair the data, or check the mean and std that normalise them."
            raise ModelError("a batch has inputs that are not finite", remedy)

    def example(self) -> Tensor:
        """Return a black image, (1, C, H, W)."""
        return torch.zeros(1, *self.inputs)


def channels_last(x: Tensor) -> Tensor:
    """Return images, (B, C, H, W), in the memory format in which a CPU convolves faster."""
    # also those of one channel, which `contiguous` leaves as they are
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


class Network(nn.Module):
    """A linear `head` on the `features` of an image, of width `head.in_features`."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        network: Any = self
        return cast(Tensor, network.head(network.features(x)))


class MLP(Network, nn.Sequential):
    """Linear layers with ReLU between them, on the flattened image."""

    def __init__(self, shape: NetworkShape) -> None:
        widths = [math.prod(shape.inputs), *shape.hidden, shape.classes]
        super().__init__(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)))

    @property
    def head(self) -> nn.Linear:
        """The last layer."""
        return cast(nn.Linear, self[-1])

    def features(self, x: Tensor) -> Tensor:
        """Return the last hidden layer, (B, e), of (B, C, H, W), or else the flattened image."""
        x = x.flatten(1)
        *hidden, _ = self.children()
        for layer in hidden:
            x = layer(x).relu()
        return x

    def stacked(self, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return (m, B, classes) logits at m points at once: one batched matrix product per layer.

        `parameters` are the layers' weights (m, out, in) and biases (m, out); x is (m, B, C, H, W).
        """
        x = x.flatten(2)
        for depth, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            x = torch.baddbmm(bias.unsqueeze(1), x.relu() if depth else x, weight.transpose(1, 2))
        return x


class CNN(Network):
    """Two convolutions of width w and 2w, pooled while above one pixel, and a linear layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        channels, *size = shape.inputs
        layers: list[nn.Module] = []
        for outputs in (shape.channels, 2 * shape.channels):
            pool = min(size) >= 2
            layers.append(Convolution(channels, outputs, shape.norm, pool))
            channels, size = outputs, [side // 2 for side in size] if pool else size
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(channels * math.prod(size), shape.classes)


class ResNet9(Network):
    """Convolutions of w, 2w, 4w and 8w channels, residual blocks after the second and the last,
    global max pooling and a linear layer: 6.57 million parameters with w = 64 and ten classes. The
    last three convolutions pool while the map is larger than one pixel.
    """

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        w, norm = shape.channels, shape.norm
        side = min(shape.inputs[1:])
        pools = [side >= 2**times for times in (1, 2, 3)]
        self.features = nn.Sequential(
            Convolution(shape.inputs[0], w, norm),
            Convolution(w, 2 * w, norm, pools[0]),
            Residual(2 * w, norm),
            Convolution(2 * w, 4 * w, norm, pools[1]),
            Convolution(4 * w, 8 * w, norm, pools[2]),
            Residual(8 * w, norm),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * w, shape.classes)


class ResNet(Network):
    """A convolution of w channels, stages of residual blocks of w, 2w, 4w, ... channels, global
    average pooling and a linear layer.

    Each stage but the first halves height and width. Modules are named as in
    akamaster/pytorch_resnet_cifar10 (subsampling) and kuangliu/pytorch-cifar (projections), so that
    their weights can be loaded.

    ResNet-20 for CIFAR (He et al., 2016, Section 4.2) has 0.27 million parameters with w = 16 and
    ten classes, ResNet-56 has 0.86 million. ResNet-34 for small images, without the first stride
    and pooling of ImageNet's, has 21.3 million.

    `blocks` are those of each stage; for `projects` see `Block`.
    """

    def __init__(
        self, shape: NetworkShape, blocks: tuple[int, ...], projects: bool = False
    ) -> None:
        super().__init__()
        inputs = shape.channels
        self.conv1 = nn.Conv2d(shape.inputs[0], inputs, 3, padding=1, bias=shape.norm == "none")
        self.bn1 = _norm(shape.norm, inputs)
        self.stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        for number, (stage, depth) in enumerate(zip(self.stages, blocks, strict=True)):
            outputs = shape.channels * 2**number
            layers = [Block(inputs, outputs, shape.norm, number > 0, projects)]
            layers += [Block(outputs, outputs, shape.norm, False, False) for _ in range(1, depth)]
            self.add_module(stage, nn.Sequential(*layers))
            inputs = outputs
        self.linear = nn.Linear(inputs, shape.classes)

    @property
    def head(self) -> nn.Linear:
        """The last layer."""
        return self.linear

    def features(self, x: Tensor) -> Tensor:
        """Return the mean of each channel after the last stage, (B, e), of (B, C, H, W)."""
        x = self.bn1(self.conv1(x)).relu()
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return x.mean(dim=(2, 3))


NETWORKS: Mapping[str, Callable[["NetworkShape"], Network]] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet9": ResNet9,
    "resnet20": partial(ResNet, blocks=(3, 3, 3)),
    "resnet56": partial(ResNet, blocks=(9, 9, 9)),
    "resnet34": partial(ResNet, blocks=(3, 4, 6, 3), projects=True),
}


def initial(network: nn.Module, seed: int) -> Tensors:
    """Return PyTorch's default initial values of every parameter, fp32 on the CPU.

    Weights and biases of linear layers and convolutions are U(-1/sqrt(fan in), 1/sqrt(fan in));
    normalisation starts as the identity. Each tensor is drawn from its own stream, named by (seed,
    "generalist", name).
    """
    values: Tensors = {}
    for prefix, owner in network.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}"
            if isinstance(owner, nn.Linear | nn.Conv2d):
                bound = 1 / math.sqrt(owner.weight[0].numel())
                generator = torch.Generator().manual_seed(derive_seed(seed, GENERALIST, name))
                values[name] = torch.empty(parameter.shape)
                values[name].uniform_(-bound, bound, generator=generator)
            else:
                values[name] = torch.full(parameter.shape, float(attribute == "weight"))
    return values
