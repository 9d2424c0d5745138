"""A mixture of linear experts with a gate, trained jointly or one part after the other."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Generator, Tensor

DRAWS = 5  # of the truths and of the gate's start
BATCH = 1024
STEPS = 1500  # of joint training
Objective = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Mixture:
    """f(theta, .): linear experts, of which a linear gate chooses one per input. The leading axis
    holds separate mixtures.

    Args:
        gate: v_j, [b, m, d].
        experts: w_j, [b, m, d].
    """

    gate: Tensor
    experts: Tensor

    def routes(self, x: Tensor) -> Tensor:
        """Return the chosen expert of inputs [n, d], [b, n]."""
        return products(x, self.gate).argmax(-1)

    def __call__(self, x: Tensor) -> Tensor:
        """Return outputs for inputs [n, d], [b, n]."""
        return products(x, self.experts).gather(-1, self.routes(x)[..., None])[..., 0]


@dataclass(frozen=True)
class Sample:
    """Inputs that all mixtures share, [n, d], with the labels that each of them gives, [b, n]."""

    x: Tensor
    y: Tensor

    @staticmethod
    def draw(truth: Mixture, generator: Generator, n: int) -> "Sample":
        x = torch.randn(n, truth.gate.shape[-1], generator=generator)
        return Sample(x, truth(x))

    def share(self, squares: Tensor) -> Tensor:
        """Squared errors, [b, n], as a share of the squared labels, [b]."""
        return squares.mean(-1) / self.y.square().mean(-1)

    def loss(self, model: Mixture) -> Tensor:
        """2 L / E[y^2], [b]."""
        return self.share((model(self.x) - self.y).square())

    def oracle_loss(self, experts: Tensor) -> Tensor:
        """Return the same where each input goes to the expert that errs least on it, [b]: no gate
        whatever gets below.
        """
        return self.share((products(self.x, experts) - self.y[..., None]).square().amin(-1))

    def linear_loss(self, test: "Sample") -> Tensor:
        """Return the loss of the best single linear model of this sample, on another one, [b]."""
        fitted = torch.linalg.lstsq(self.x, self.y.mT).solution
        return test.share(((test.x @ fitted).mT - test.y).square())


def products(x: Tensor, vectors: Tensor) -> Tensor:
    """Inner products of inputs [n, d] with vectors [b, m, d], [b, n, m]."""
    return torch.einsum("nd,bmd->bnm", x, vectors)


def draw_truth(d: int, m: int, generator: Generator) -> tuple[Mixture, Tensor]:
    """Random orthonormal lists v*_j and w*_j, and the gate's Gaussian start v_j,0, [DRAWS, m,
    d].
    """
    gate, experts = (
        torch.linalg.qr(torch.randn(DRAWS, d, m, generator=generator))[0].mT for _ in range(2)
    )
    return Mixture(gate, experts), torch.randn(DRAWS, m, d, generator=generator)


def compressed(truth: Mixture, start: Tensor) -> tuple[Mixture, Tensor]:
    """Return the same problem in at most 3 m coordinates: those of the span of all v*_j, w*_j and
    v_j,0.

    Inputs across it are independent of labels and routes, so that the minimisers (1) have no part
    there.
    """
    basis = torch.linalg.qr(torch.cat([truth.gate, truth.experts, start], 1).mT)[0]
    return Mixture(truth.gate @ basis, truth.experts @ basis), start @ basis


def fit_experts(sample: Sample, gate: Tensor) -> Tensor:
    """(1): the least squares solution in each region of a gate, [b, m, d]; 0 where a region is
    empty.
    """
    routes, ridge = (
        products(sample.x, gate).argmax(-1),
        1e-6 * len(sample.x) * torch.eye(sample.x.shape[1]),
    )
    fits = []
    for b, j in product(range(gate.shape[0]), range(gate.shape[1])):
        inside = routes[b] == j
        x, y = sample.x[inside], sample.y[b, inside]
        fits.append(torch.linalg.solve(x.mT @ x + ridge, x.mT @ y))
    return torch.stack(fits).view_as(gate)


def expected(gate: Tensor, outputs: Tensor, y: Tensor, done: float) -> Tensor:
    """Return the mean loss where an expert is drawn from the gate's softmax: smooth, and L itself
    once the gate's scale is large.
    """
    return (gate.exp() * (outputs - y).square()).sum(-1)


def blended(gate: Tensor, outputs: Tensor, y: Tensor, done: float) -> Tensor:
    """Return the loss of the experts' mean output under the gate's softmax."""
    return ((gate.exp() * outputs).sum(-1) - y[..., 0]).square()


def likelihood(gate: Tensor, outputs: Tensor, y: Tensor, done: float) -> Tensor:
    """Of a mixture of Gaussians around the outputs, negative and in logarithms; sigma falls from
    1 to 0.05.
    """
    return -(gate - (outputs - y).square() / (2 * math.pow(0.05, 2 * done))).logsumexp(-1)


def descend(
    sample: Sample, start: Mixture, objective: Objective, steps: int, frozen: bool = False
) -> Mixture:
    """Adam on the gate and, unless they are frozen, on the experts.

    Args:
        sample: In batches, in its order.
        start: Where from.
        objective: From log probabilities of the gate and outputs, [b, n, m], labels, [b, n, 1], and
            the share of steps done, to [b, n].
        steps: Of 0.02 in Adam's units.
        frozen: Whether experts stay as they are.
    """
    gate, experts = (
        start.gate.clone().requires_grad_(),
        start.experts.clone().requires_grad_(not frozen),
    )
    trained = [gate] if frozen else [gate, experts]
    optimiser = torch.optim.Adam(trained, lr=0.02)
    for k in range(steps):
        at = torch.arange(k * BATCH, (k + 1) * BATCH) % len(sample.x)
        x, y = sample.x[at], sample.y[:, at, None]
        loss = objective(products(x, gate).log_softmax(-1), products(x, experts), y, k / steps)
        for vectors, gradient in zip(
            trained, torch.autograd.grad(loss.mean(1).sum(), trained), strict=True
        ):
            vectors.grad = gradient
        optimiser.step()
    return Mixture(gate.detach(), experts.detach())


def best(sample: Sample, models: list[Mixture]) -> Mixture:
    """On each of the leading axis, the model of least loss."""
    chosen = (
        torch.stack([sample.loss(model) for model in models]).argmin(0),
        torch.arange(len(sample.y)),
    )
    return Mixture(
        torch.stack([m.gate for m in models])[chosen],
        torch.stack([m.experts for m in models])[chosen],
    )


def fit_gate(sample: Sample, starts: list[Tensor], experts: Tensor, steps: int = 600) -> Mixture:
    """(2): the best gate found for frozen experts, from several starts, [b, m, d]."""
    return best(
        sample,
        [
            descend(sample, Mixture(start, experts), expected, steps, frozen=True)
            for start in starts
        ],
    )


def alternate(sample: Sample, gate: Tensor, passes: int) -> Iterator[Mixture]:
    """(1) and (2) over and over, each from where the other ended."""
    for _ in range(passes):
        model = fit_gate(sample, [gate], fit_experts(sample, gate), 200)
        gate = model.gate
        yield model


def train_jointly(
    sample: Sample, m: int, objective: Objective, generator: Generator, restarts: int = 1
) -> Mixture:
    """Gate and experts at once, from small random vectors; the best of `restarts`."""
    shape = 2, len(sample.y), m, sample.x.shape[1]
    starts = [Mixture(*(0.1 * torch.randn(shape, generator=generator))) for _ in range(restarts)]
    return best(sample, [descend(sample, start, objective, STEPS) for start in starts])


def nearness(experts: Tensor, truth: Tensor) -> Tensor:
    """cos(w_j, w*_j') of experts [b, m, d] and truths [b, m', d], [b, m, m']."""
    return torch.nn.functional.normalize(experts, dim=-1) @ truth.mT
