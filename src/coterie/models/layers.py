"""The layers of convolutional and residual networks."""

import math
from typing import Literal, cast

from torch import Tensor, nn
from torch.nn.functional import pad

Norm = Literal["batch", "group", "none"]
_LARGEST_GROUPS = 32  # of group normalisation, as its authors propose


class Convolution(nn.Sequential):
    """3x3 convolution, normalisation and ReLU, optionally with max pooling by 2. Without
    normalisation the convolution has a bias.
    """

    def __init__(self, inputs: int, outputs: int, norm: Norm, pool: bool = False) -> None:
        layers = [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm == "none"),
            _norm(norm, outputs),
            nn.ReLU(),
        ]
        super().__init__(*layers, *[nn.MaxPool2d(2)] * pool)


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


class GlobalMax(nn.Module):
    """The largest value of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C)."""
        return x.amax(dim=(2, 3))


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
