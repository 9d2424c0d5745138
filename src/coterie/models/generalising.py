"""Classifiers with more in their objective than the error: FedSR's has a random representation,
FedADG's aligns features to a distribution, FedProto's to prototypes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.core.roles import GENERALIST, Role
from coterie.core.tensors import Tensors
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.generalising_networks import Adversarial, Extended, Prototyped, Stochastic
from coterie.models.layout import Layout, NetworkLayout
from coterie.models.networks import Shape


@dataclass(frozen=True)
class StochasticLayout(NetworkLayout):
    """Weights in FedSR's objective."""

    l2: float = 0.01  # alpha_L2R
    cmi: float = 0.001  # alpha_CMI


@dataclass(frozen=True)
class AdversarialLayout(NetworkLayout):
    """The parts that FedADG trains besides the classifier."""

    align: float = 0.15  # share of the adversarial loss in the feature extractor's loss
    # width of the noise, the random projection and the hidden layers of generator and discriminator
    hidden: int = 128


@dataclass(frozen=True)
class PrototypeLayout(NetworkLayout):
    """The weight in FedProto's objective."""

    strength: float = 1.0  # lambda


Objective = tuple[Tensor, set[nn.Parameter]]  # a mean loss, and who follows its gradient


class ExtendedClassifier(Classifier, ABC):
    """A classifier with parts that only training uses and further terms in its objective; scores
    are those of the cross-entropy alone.

    `start` is of the plain network, by its own names; without it, that is drawn as alone. For other
    arguments see `Classifier`.
    """

    stacks = False
    output_bias = None  # what only training uses comes last
    network: Extended
    layout: Layout

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        device: torch.device | str = "cpu",
        start: Tensors | None = None,
        statistics: bool = False,
    ) -> None:
        super().__init__(shape, device, start, statistics)
        self.layout = layout
        self._start = (
            None if start is None else {f"base.{name}": tensor for name, tensor in start.items()}
        )
        with torch.no_grad():
            width = self.network.features(shape.example().to(self.device)).shape[1]
        with torch.device("meta"):
            self.network = self.extend(self.network, width).eval()
        if self.device.type != "meta":
            self.network.beside.to_empty(device=self.device)
            self.network.load_state_dict(self.network.initial(0), strict=False)

    @abstractmethod
    def extend(self, base: nn.Module, width: int) -> Extended:
        """Return the network around a plain one with features of this width."""

    @property
    def active_parameters(self) -> int:
        """The number of values that one example uses: of the plain network and the head."""
        return _size(_parameters(self.network.base, self.network.head))

    @abstractmethod
    def objectives(
        self, x: Tensor, y: Tensor, trained: set[nn.Parameter]
    ) -> tuple[Tensor, Sequence[Objective]]:
        """Return training logits, (B, classes), and losses; each parameter is in one at most."""

    def initial(self, role: Role, seed: int) -> Tensors:
        """Return initial values of one role, with running statistics if shared."""
        fresh = self.network.initial(seed)
        named = self.parameters_by_role[role]
        if any(name.startswith("base.") for name in named):
            fresh |= self._started(
                {f"base.{name}": tensor for name, tensor in self.shape.initial(seed).items()}
            )
        values = {name: fresh[name] for name in named}
        return values | (self.initial_buffers() if role is self.statistics else {})

    def plain(self) -> Classifier | None:
        """Return a plain classifier with equal predictions; None for texts, whose head differs."""
        if hasattr(self.network, "outer"):
            return None
        start = {name: tensor.detach() for name, tensor in self.network.plain().items()}
        return Classifier(self.shape, self.device, start)

    def _accumulate(
        self, xs: Sequence[Tensor], ys: Sequence[Tensor], wrt: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        totals = {parameter: torch.zeros_like(parameter).detach() for parameter in wrt}
        losses = correct = torch.zeros((), device=self.device)
        count = sum(map(len, ys))
        for x, y in zip(xs, ys, strict=True):
            logits, objectives = self.objectives(x, y, set(wrt))
            for objective, followers in objectives:
                followed = [parameter for parameter in wrt if parameter in followers]
                if not followed:
                    continue
                share = objective * (len(y) / count)
                gradients = torch.autograd.grad(
                    share, followed, retain_graph=True, materialize_grads=True
                )
                for parameter, gradient in zip(followed, gradients, strict=True):
                    totals[parameter] += gradient
            losses = losses + cross_entropy(logits.detach(), y, reduction="sum")
            correct = correct + (logits.argmax(dim=1) == y).sum()
        return list(totals.values()), losses, correct


class StochasticClassifier(ExtendedClassifier):
    """FedSR's model: it trains on one sample of z per example, and predicts with the mean.

    The objective is CE + alpha_L2R E|z|^2 + alpha_CMI KL(N(mu(x), sigma(x)^2) || N(mu_y,
    sigma_y^2)). The authors' code predicts with the mean probabilities of 20 samples, does not
    square the norm, and scales z by a learned number in the divergence.
    """

    network: Stochastic
    layout: StochasticLayout

    def extend(self, base: nn.Module, width: int) -> Stochastic:
        return Stochastic(base, width, self.shape.classes)

    @property
    def active_parameters(self) -> int:
        """The number of values that one example uses: plain network and mu."""
        return super().active_parameters + _size(_parameters(self.network.mean))

    def objectives(
        self, x: Tensor, y: Tensor, trained: set[nn.Parameter]
    ) -> tuple[Tensor, Sequence[Objective]]:
        mean, spread = self.network.represent(x)
        # drawn on the CPU, whose generator gives the same numbers whatever the device
        z = mean + spread * torch.randn(mean.shape, dtype=mean.dtype).to(mean.device)
        logits = self.network.head(z)
        divergence = normal_divergence(mean, spread, *self.network.reference(y)).mean()
        norm = self.layout.l2 * z.square().sum(dim=1).mean()
        objective = cross_entropy(logits, y) + norm + self.layout.cmi * divergence
        return logits, [(objective, trained)]


class AdversarialClassifier(ExtendedClassifier):
    """FedADG's model: feature extractor F, classifier C, generator G and discriminator D, trained
    at once, each on its own loss.

    With features h = F(x) and generated ones h' = G(noise, y), least squares: D minimises (1 -
    D(h', y))^2 + D(h, y)^2; F and C minimise (1 - align) CE + align (1 - D(h, y))^2, so that
    features become like generated ones; G minimises D(h', y)^2, so that it stays near the features.
    If D is not trained, F and C minimise the cross-entropy alone, and G is not trained either.
    """

    network: Adversarial
    layout: AdversarialLayout

    def extend(self, base: nn.Module, width: int) -> Adversarial:
        return Adversarial(base, width, self.shape.classes, self.layout.hidden)

    def objectives(
        self, x: Tensor, y: Tensor, trained: set[nn.Parameter]
    ) -> tuple[Tensor, Sequence[Objective]]:
        network, align = self.network, self.layout.align
        h = network.features(x)
        logits = network.head(h)
        error = cross_entropy(logits, y)
        classifier = trained & _parameters(network.base, network.head)
        generator = trained & _parameters(network.generator)
        discriminator = trained & _parameters(network.discriminator)
        if not discriminator:
            return logits, [(error, classifier)]
        seen, drawn = network.judge(h, y), network.judge(network.generate(y), y)
        return logits, [
            ((1 - drawn).square().mean() + seen.square().mean(), discriminator),
            ((1 - align) * error + align * (1 - seen).square().mean(), classifier),
            (drawn.square().mean(), generator),
        ]


class PrototypeClassifier(ExtendedClassifier):
    """FedProto's model: its own network minimises CE + lambda times the mean distance of features
    to the prototypes of their classes, which are received.
    """

    network: Prototyped
    layout: PrototypeLayout

    def extend(self, base: nn.Module, width: int) -> Prototyped:
        return Prototyped(base, width, self.shape.classes)

    def class_sums(self, batches: Iterable[Examples]) -> Tensors:
        """Return the prototypes of a client's examples alone, by name."""
        shared = self.parameters_by_role[GENERALIST]
        sums, counts = (torch.zeros_like(parameter).detach() for parameter in shared.values())
        with torch.no_grad():
            for x, y in map(self.checked, batches):
                sums.index_add_(0, y, self.network.features(x))
                counts.index_add_(0, y, torch.ones_like(y, dtype=counts.dtype))
        return dict(zip(shared, (sums, counts), strict=True))

    def objectives(
        self, x: Tensor, y: Tensor, trained: set[nn.Parameter]
    ) -> tuple[Tensor, Sequence[Objective]]:
        features = self.network.features(x)
        logits = self.network.head(features)
        pull = self.layout.strength * self.network.prototypes(features, y).mean()
        return logits, [(cross_entropy(logits, y) + pull, trained)]


def _parameters(*modules: nn.Module) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def _size(parameters: set[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def normal_divergence(
    mean: Tensor, spread: Tensor, other_mean: Tensor, other_spread: Tensor
) -> Tensor:
    """Return KL(N(mean, spread^2) || N(other_mean, other_spread^2)) of (B, e), (B,) in nats."""
    scaled = (spread.square() + (mean - other_mean).square()) / (2 * other_spread.square())
    return (other_spread.log() - spread.log() + scaled - 0.5).sum(dim=1)
