"""Quadratic clients in clusters, and CoBo on them: what the claims of Theorem I are checked
with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clusters:
    """Example 2: f_i(x) = a_i / 2 ||x - mu_i||^2, where clients of one cluster have the same mu_i.
    Leading axes are separate federations.

    Args:
        a: [..., n], positive.
        mu: The centre of each client's cluster, [..., n, d].
    """

    a: Array
    mu: Array

    @cached_property
    def oracle(self) -> Array:
        """W*: 1 between two clients of one cluster, else 0, [..., n, n]."""
        same = (self.mu[..., :, None, :] == self.mu[..., None, :, :]).all(-1)
        return np.asarray(same * (1.0 - np.eye(same.shape[-1])))

    def gradients(self, points: Array) -> Array:
        """Grad f_i at a point of its own for each client, [..., n, d]."""
        return self.a[..., None] * (points - self.mu)

    def midpoint_gradients(self, X: Array) -> Array:
        """Grad f_i at z_ij = (x_i + x_j) / 2, [..., i, j, d]."""
        z = (X[..., :, None, :] + X[..., None, :, :]) / 2
        return self.a[..., None, None] * (z - self.mu[..., :, None, :])

    def agreement(self, X: Array) -> Array:
        """<grad f_i(z_ij), grad f_j(z_ij)>, which the inner problem maximises over w_ij, [...,
        n, n].
        """
        return _agreement(self.midpoint_gradients(X))

    def sharpness(self, rho: float) -> float:
        """Return the largest eigenvalue of the outer problem's Hessian under W*: without noise, X
        converges for eta below 2 over it.
        """
        penalty = np.diag(self.oracle.sum(-1)) - self.oracle
        return float(np.linalg.eigvalsh(np.diag(self.a) + rho * penalty)[-1])


@dataclass(frozen=True)
class CoBo:
    """The iteration of Algorithm 1 with all pairs in every round. Parameters may be arrays that
    broadcast over leading axes.

    Args:
        eta: Step size of the models.
        rho: Penalty on distances.
        gamma: Step size of the weights.
        sigma: Of (A2): E ||g_i - grad f_i||^2 = sigma^2.
        batch: Size b of a mini-batch for the weights, whose gradients have a variance of sigma^2 /
            b. Infinite: exact gradients.
    """

    eta: float | Array
    rho: float | Array
    gamma: float
    sigma: float = 0.0
    batch: float | Array = np.inf

    def round(
        self, f: Clusters, X: Array, W: Array, rng: np.random.Generator | None = None
    ) -> tuple[Array, Array]:
        """X and W after a round: the weights first, then the models, from gradients at X.

        Args:
            f: The clients.
            X: [..., n, d].
            W: [..., n, n], symmetric, 0 on the diagonal.
            rng: Of the noise; without it there is none.
        """
        n, d = X.shape[-2:]
        at_midpoints, at_clients = f.midpoint_gradients(X), f.gradients(X)
        if rng is not None:
            spread = self.sigma / np.sqrt(np.asarray(self.batch) * d)
            at_midpoints = at_midpoints + spread[..., None, None, None] * rng.standard_normal(
                at_midpoints.shape
            )
            at_clients = at_clients + self.sigma / np.sqrt(d) * rng.standard_normal(
                at_clients.shape
            )
        W = np.clip(W + self.gamma * _agreement(at_midpoints), 0, 1) * (1 - np.eye(n))
        pull = X * W.sum(-1, keepdims=True) - W @ X
        eta, rho = (np.asarray(value)[..., None, None] for value in (self.eta, self.rho))
        return X - eta * (at_clients + rho * pull), W

    def run(
        self,
        f: Clusters,
        start: Array,
        rounds: int,
        rng: np.random.Generator | None = None,
        weights: Array | None = None,
    ) -> Iterator[tuple[Array, Array]]:
        """(X, W) at the start and after every round. Without `weights` all pairs start with w =
        1, as in Algorithm 1.
        """
        X, n = start, start.shape[-2]
        W = (
            np.broadcast_to(1 - np.eye(n), (*start.shape[:-2], n, n))
            if weights is None
            else weights
        )
        yield X, W
        for _ in range(rounds):
            X, W = self.round(f, X, W, rng)
            yield X, W


def _agreement(at_midpoints: Array) -> Array:
    return np.asarray((at_midpoints * np.swapaxes(at_midpoints, -2, -3)).sum(-1))


def polygon(clusters: int, size: int) -> Clusters:
    """Centres at the corners of a regular polygon with radius 1, a_i = 1."""
    angles = 2 * np.pi * np.arange(clusters) / clusters
    return Clusters(
        np.ones(clusters * size),
        np.repeat(np.column_stack([np.cos(angles), np.sin(angles)]), size, 0),
    )


def surrounding(rng: np.random.Generator, clusters: int, size: int) -> Clusters:
    """Centres that see the origin under obtuse angles, pair by pair: <mu_k, mu_l> < 0. a_i
    between 0.7 and 1.
    """
    simplex = np.eye(clusters) - 1 / clusters
    while True:
        mu = simplex * rng.uniform(0.5, 2, (clusters, 1)) + 0.1 * rng.standard_normal(
            (clusters, clusters)
        )
        if ((mu @ mu.T)[~np.eye(clusters, dtype=bool)] < 0).all():
            return Clusters(rng.uniform(0.7, 1, clusters * size), np.repeat(mu, size, 0))


def safe_step(f: Clusters, rho: float) -> float:
    """1 / (L + rho n): every new model is a mean of models and centres, whatever the weights."""
    return float(1 / (f.a.max() + rho * len(f.a)))


def _at(pair: Clusters, x: Array) -> tuple[Array, Array, Array]:
    """Both gradients, [count, d], and their inner product, at points x, [count, 1, d], that both
    clients share.
    """
    X = np.repeat(x, 2, 1)
    gradients = pair.gradients(X)
    return gradients[:, 0], gradients[:, 1], pair.agreement(X)[:, 0, 1]


def _square(v: Array) -> Array:
    """Squared norms along the last axis."""
    return np.asarray((v**2).sum(-1))
