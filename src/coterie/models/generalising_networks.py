"""The networks of `models.generalising`: a plain one, and modules trained alongside it."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

from coterie.core.roles import BACKBONE, GENERALIST, SPECIALIST, tag
from coterie.core.tensors import Tensors
from coterie.models.network_tensors import statistics
from coterie.models.networks import initial


class Extended(nn.Module):
    """A plain network, `base`, and modules trained alongside it. A linear `head` classifies
    features, (B, e): the plain network's own, or a new one if it sees other features, as for texts.
    """

    def __init__(self, base: Any, width: int, classes: int) -> None:
        super().__init__()
        self.base, self.width, self.classes = base, width, classes
        if not hasattr(base, "head"):
            self.outer = nn.Linear(width, classes)

    @property
    def head(self) -> nn.Linear:
        """(B, e) -> (B, classes)."""
        return cast(nn.Linear, self.outer if hasattr(self, "outer") else self.base.head)

    @property
    def beside(self) -> nn.ModuleDict:
        """All modules but the plain network."""
        return nn.ModuleDict(
            {name: module for name, module in self.named_children() if name != "base"}
        )

    def initial(self, seed: int) -> Tensors:
        """Return initial values of all but the plain network, see `networks.initial`."""
        return initial(self.beside, seed)

    def plain(self) -> Tensors:
        """Return the tensors of a plain network that predicts alike, if the head is its own."""
        return dict(self.base.named_parameters()) | statistics(self.base)

    def features(self, x: Tensor) -> Tensor:
        """Return (B, e) features of inputs."""
        return cast(Tensor, self.base.features(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes) logits of inputs."""
        return cast(Tensor, self.head(self.features(x)))


class Reference(nn.Module):
    """R(z|y) = N(mu_y, sigma_y^2) for each class, z being (e,): initially N(0, (log 2)^2)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(classes, width))
        self.spread = nn.Parameter(torch.empty(classes, width))  # before the softplus

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return mu_y and sigma_y, (B, e) each, of (B,) labels."""
        return self.mean[y], softplus(self.spread[y])


class Stochastic(Extended):
    """A network whose head sees z ~ N(mu(x), sigma(x)^2), as wide as its features, in which mu and
    softplus^-1(sigma) are linear. Initially mu(x) is the features, so that with z = mu(x) it
    predicts as the plain network does.
    """

    def __init__(self, base: Any, width: int, classes: int) -> None:
        super().__init__(base, width, classes)
        self.mean, self.spread = nn.Linear(width, width), nn.Linear(width, width)
        self.reference = Reference(classes, width)
        tag(self, GENERALIST)

    def initial(self, seed: int) -> Tensors:
        return super().initial(seed) | {
            "mean.weight": torch.eye(self.width),
            "mean.bias": torch.zeros(self.width),
        }

    def plain(self) -> Tensors:
        name = next(name for name, module in self.base.named_modules() if module is self.head)
        weight = self.head.weight @ self.mean.weight
        bias = self.head.weight @ self.mean.bias + self.head.bias
        return super().plain() | {f"{name}.weight": weight, f"{name}.bias": bias}

    def represent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mu(x) and sigma(x), (B, e) each, of inputs."""
        features = self.features(x)
        return self.mean(features), softplus(self.spread(features))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.mean(self.features(x))))


class Adversarial(Extended):
    """A network, a generator of a class's features, and a discriminator of both after a fixed
    random projection of the features.

    The discriminator is local; the projection is the same for all. `hidden` is the width of the
    noise, the projection, and both hidden layers.
    """

    def __init__(self, base: Any, width: int, classes: int, hidden: int) -> None:
        super().__init__(base, width, classes)
        self.noise = hidden
        self.generator = nn.Sequential(
            nn.Linear(hidden + classes, hidden), nn.LeakyReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        self.projection = nn.Linear(width, hidden, bias=False)
        self.discriminator = nn.Sequential(
            nn.Linear(hidden + classes, hidden), nn.LeakyReLU(), nn.Linear(hidden, 1), nn.Sigmoid()
        )
        tag(self, GENERALIST)
        tag(self.projection, BACKBONE)
        tag(self.discriminator, SPECIALIST)

    def generate(self, y: Tensor) -> Tensor:
        """Return (B, e) features of the classes of (B,) labels, generated from uniform noise."""
        # drawn on the CPU, whose generator gives the same numbers whatever the device
        noise = torch.rand(len(y), self.noise).to(y.device)
        return cast(Tensor, self.generator(torch.cat([noise, self._coded(y)], dim=1)))

    def judge(self, features: Tensor, y: Tensor) -> Tensor:
        """Return (B, 1) in [0, 1]: how generated (B, e) features of labels look."""
        seen = torch.cat([self.projection(features), self._coded(y)], dim=1)
        return cast(Tensor, self.discriminator(seen))

    def _coded(self, y: Tensor) -> Tensor:
        return one_hot(y, self.classes).float()


class Prototypes(nn.Module):
    """The sums of the features of each class, (classes, e), and its numbers of examples,
    (classes,), whose ratio is the class's prototype. Initially there is none.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.sums = nn.Parameter(torch.empty(classes, width))
        self.counts = nn.Parameter(torch.empty(classes))

    def forward(self, features: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared distance of each example's features, (B, e), to the prototype of
        its class, (B,); 0 where there is none.
        """
        counts = self.counts[y]
        prototypes = self.sums[y] / counts.clamp_min(1e-9)[:, None]
        return (features - prototypes).square().mean(dim=1) * (counts > 0)


class Prototyped(Extended):
    """A network of a client's own, beside it the prototypes that all share."""

    def __init__(self, base: Any, width: int, classes: int) -> None:
        super().__init__(base, width, classes)
        self.prototypes = Prototypes(classes, width)
        tag(self, SPECIALIST)
        tag(self.prototypes, GENERALIST)
