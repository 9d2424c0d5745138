"""Linear experts with a router, whose alternating minimisation Theorem G.2 bounds."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coterie.core.errors import CoterieError
from theorems.comigs import Array


@dataclass(frozen=True)
class Point:
    """Theta and Phi, [d, N + 1], and Lambda, [n, N + 1] with rows on the simplex."""

    theta: Array
    phi: Array
    lam: Array

    def towards(self, other: "Point", lam: float, rest: float) -> "Point":
        """Return the point that is `lam` of the way to `other` in Lambda and `rest` of it in Theta
        and Phi.
        """
        return Point(
            (1 - rest) * self.theta + rest * other.theta,
            (1 - rest) * self.phi + rest * other.phi,
            (1 - lam) * self.lam + lam * other.lam,
        )


@dataclass(frozen=True)
class LinearExperts:
    """F_mu of (19) with the logistic loss l_i(t) = ln(1 + exp(-y_i t)): convex, |l'| <= rho = 1,
    l'' <= 1/4, as Proposition 1 wants.

    Curvatures are in the norm ||Theta||^2 + ||Phi||^2 + ||Lambda||^2 / n, along directions that
    keep the rows of Lambda on the simplex: Theorem G.2 holds in any such norm, and in this one its
    constants do not depend on n.

    Args:
        x: Inputs, [n, d].
        y: Labels -1 and 1, [n].
        experts: N + 1.
        mu: Weight of the divergence between Lambda and the router.
        alpha: Ridge on Theta and Phi.
    """

    x: Array
    y: Array
    experts: int
    mu: float
    alpha: float

    @property
    def radius(self) -> float:
        """max_i ||x_i||."""
        return float(np.linalg.norm(self.x, axis=1).max())

    @property
    def sufficient_alpha(self) -> float:
        """The right side of (21) with rho = 1."""
        return 2 * self.radius**2 * max(self.mu, 1 / self.mu)

    def loss(self, t: Array) -> tuple[Array, Array, Array]:
        """l_i, l_i' and l_i'' at t_i, each [n]."""
        chance = 1 / (1 + np.exp(np.clip(self.y * t, -700, 700)))  # of the other label
        return np.logaddexp(0, -self.y * t), -self.y * chance, chance * (1 - chance)

    def value(self, z: Point) -> float:
        """F_mu, to be minimised."""
        scores, logits = self.x @ z.theta, self.x @ z.phi
        entropy = (z.lam * np.log(z.lam)).sum(1)
        divergence = entropy + np.logaddexp.reduce(logits, axis=1) - (z.lam * logits).sum(1)
        fit = self.loss((z.lam * scores).sum(1))[0]
        return float(
            (fit + self.mu * divergence).mean()
            + self.alpha / 2 * ((z.theta**2).sum() + (z.phi**2).sum())
        )

    def stationarity(self, z: Point) -> float:
        """Return the norm of F_mu's gradient; in Lambda, of its part along the simplex (Lambda > 0
        here).
        """
        scores, logits = self.x @ z.theta, self.x @ z.phi
        slope = self.loss((z.lam * scores).sum(1))[1][:, None]
        theta = self.x.T @ (slope * z.lam) / len(self.x) + self.alpha * z.theta
        phi = self.mu * self.x.T @ (softmax(logits) - z.lam) / len(self.x) + self.alpha * z.phi
        lam = slope * scores + self.mu * (np.log(z.lam) - logits)
        lam = (lam - lam.mean(1, keepdims=True)) / np.sqrt(len(self.x))
        return float(np.sqrt((theta**2).sum() + (phi**2).sum() + (lam**2).sum()))

    def hessian(self, z: Point) -> Array:
        """Over (Theta, Phi, Lambda) in the norm above, [2 d (N + 1) + n N] squared.

        The mixed block has l'' and l' terms: (l'' (a + b)^2 + 2 l' <h, H^T x>) in a direction (H,
        h). The paper's proof of Proposition 1 has a b and <h, H^T x> once each, and l'' where l'
        belongs; (21) is large enough all the same.
        """
        n, d = self.x.shape
        m = self.experts
        size, free = d * m, m - 1
        scores = self.x @ z.theta
        _, first, second = self.loss((z.lam * scores).sum(1))
        tangent = np.linalg.qr(np.column_stack([np.ones(m), np.eye(m)[:, 1:]]))[0][
            :, 1:
        ]  # [m, N]: orthonormal, columns sum to 0
        u = self.features(z.lam)
        per_sample = np.einsum("na,jk->najk", self.x, np.eye(m)).reshape(
            n, size, m
        )  # d u_i / d lambda^i
        theta_lam = np.einsum("n,np,nk->npk", second, u, scores) + first[:, None, None] * per_sample
        mixed = (
            np.concatenate([theta_lam, -self.mu * per_sample], axis=1) @ tangent / np.sqrt(n)
        )  # [n, 2 d m, N]
        lam = np.einsum("n,nj,nk->njk", second, scores, scores) + self.mu * np.einsum(
            "nj,jk->njk", 1 / z.lam, np.eye(m)
        )
        whole = np.zeros((2 * size + n * free,) * 2)
        whole[:size, :size] = self.theta_curvature(u, second)
        whole[size : 2 * size, size : 2 * size] = self.phi_curvature(softmax(self.x @ z.phi))
        for i in range(n):
            at = slice(2 * size + i * free, 2 * size + (i + 1) * free)
            whole[: 2 * size, at], whole[at, : 2 * size] = mixed[i], mixed[i].T
            whole[at, at] = tangent.T @ lam[i] @ tangent
        return whole

    def features(self, lam: Array) -> Array:
        """Return the gradients of <lambda^i, Theta^T x_i> in Theta, [n, d (N + 1)]."""
        return np.asarray(np.einsum("na,nj->naj", self.x, lam).reshape(len(self.x), -1))

    def theta_curvature(self, features: Array, second: Array) -> Array:
        """Return the Hessian in Theta from l'' at every sample, [d (N + 1)] squared."""
        return (features * second[:, None]).T @ features / len(features) + self.alpha * np.eye(
            features.shape[1]
        )

    def phi_curvature(self, share: Array) -> Array:
        """Return the Hessian in Phi from the router's probabilities, [d (N + 1)] squared."""
        n, size = len(self.x), self.x.shape[1] * self.experts
        spread = np.einsum("nj,jk->njk", share, np.eye(self.experts)) - np.einsum(
            "nj,nk->njk", share, share
        )
        curvature = np.einsum("na,nb,njk->ajbk", self.x, self.x, spread).reshape(size, size)
        return np.asarray(self.mu / n * curvature + self.alpha * np.eye(size))

    def blocks(self) -> tuple[slice, slice, slice]:
        """Where Theta, Phi and Lambda lie in the rows of `hessian`."""
        size = self.x.shape[1] * self.experts
        return slice(0, size), slice(size, 2 * size), slice(2 * size, None)

    def lambda_step(self, z: Point) -> Point:
        """Return the minimiser over Lambda, to machine precision: lambda^i = softmax(Phi^T x_i -
        s_i Theta^T x_i / mu) with s_i = l_i'(t(s_i)).

        s - l'(t(s)) increases in s with a slope of at least 1, so that bisection on [-rho, rho]
        finds its one root.
        """
        scores, logits = self.x @ z.theta, self.x @ z.phi

        def weights(s: Array) -> Array:
            return softmax(logits - s[:, None] * scores / self.mu)

        low, high = -np.ones(len(self.x)), np.ones(len(self.x))
        for _ in range(60):
            middle = (low + high) / 2
            above = middle > self.loss((weights(middle) * scores).sum(1))[1]
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return replace(z, lam=weights((low + high) / 2))

    def phi_step(self, z: Point) -> Point:
        """Return the minimiser over Phi: a multinomial logistic regression with soft targets Lambda
        and a ridge.
        """

        def oracle(flat: Array) -> tuple[float, Array, Array]:
            phi = flat.reshape(z.phi.shape)
            logits = self.x @ phi
            share = softmax(logits)
            value = (
                self.mu * (np.logaddexp.reduce(logits, axis=1) - (z.lam * logits).sum(1)).mean()
                + self.alpha / 2 * flat @ flat
            )
            gradient = self.mu * self.x.T @ (share - z.lam) / len(self.x) + self.alpha * phi
            return float(value), gradient.ravel(), self.phi_curvature(share)

        return replace(z, phi=newton(oracle, z.phi.ravel(), self.alpha).reshape(z.phi.shape))

    def theta_step(self, z: Point) -> Point:
        """Return the minimiser over Theta: a logistic regression on the features lambda^i x_i with
        a ridge.
        """
        u = self.features(z.lam)

        def oracle(flat: Array) -> tuple[float, Array, Array]:
            loss, first, second = self.loss(u @ flat)
            gradient = u.T @ first / len(u) + self.alpha * flat
            return (
                float(loss.mean() + self.alpha / 2 * flat @ flat),
                gradient,
                self.theta_curvature(u, second),
            )

        return replace(z, theta=newton(oracle, z.theta.ravel(), self.alpha).reshape(z.theta.shape))

    def constants(self, level: float) -> tuple[float, float]:
        """Certified strong convexity mu and smoothness L on a convex region that holds the run and
        the optimum.

        Entropy is not smooth at the simplex's boundary, so that no L serves everywhere. But F_mu >=
        alpha / 2 (||Theta||^2 + ||Phi||^2), so that points with F_mu <= `level` have ||(Theta,
        Phi)|| <= R, and a Lambda-step from there gives weights of at least delta: both blocks of
        Theorem G.2 stay where Lambda >= delta and ||(Theta, Phi)|| <= R. The bounds are quadratic
        forms in the lengths of a direction's parts. The lower one holds everywhere and takes (18)
        as it stands, with ||h||_1 >= sqrt 2 ||h||_2 and <h, v> <= ||h||_1 ||v|| / sqrt 2 where h
        sums to 0; it is positive for alpha > ||x||^2 (mu + rho^2 / mu) / 2, a sharper (21).

        Args:
            level: F_mu at the start.

        Returns:
            mu, not positive where nothing is certified, and L.
        """
        X, R = self.radius, np.sqrt(2 * level / self.alpha)
        rho, a, m = 1.0, self.alpha, self.mu
        delta = 1 / (1 + (self.experts - 1) * np.exp(np.sqrt(2) * X * R * np.hypot(1, rho / m)))
        lower = np.array([[a, -X * np.hypot(rho, m)], [-X * np.hypot(rho, m), 2 * m]])
        upper = np.array(
            [
                [a + X**2 / 4, 0, X**2 * R / 4 + rho * X],
                [0, a + m * X**2 / 2, m * X],
                [X**2 * R / 4 + rho * X, m * X, m / delta + X**2 * R**2 / 4],
            ]
        )
        return float(np.linalg.eigvalsh(lower)[0]), float(np.linalg.eigvalsh(upper)[-1])


def softmax(logits: Array) -> Array:
    """Along the last axis."""
    return np.asarray(np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)))


def newton(
    oracle: Callable[[Array], tuple[float, Array, Array]],
    start: Array,
    strong: float,
    gap: float = 1e-24,
) -> Array:
    """Return the minimiser of a strongly convex function, up to a certified functional gap
    ||gradient||^2 / (2 strong) <= `gap`.

    Args:
        oracle: Value, gradient [p] and Hessian [p, p] at a point [p].
        start: [p].
        strong: A constant of strong convexity.
        gap: Largest difference from the minimum.

    Raises:
        CoterieError: The gap was not reached in 100 steps.
    """
    point = start
    value, gradient, hessian = oracle(point)
    for _ in range(100):
        if gradient @ gradient <= 2 * strong * gap:
            return point
        direction = np.linalg.solve(hessian, gradient)
        length = 1.0
        while (
            oracle(point - length * direction)[0]
            > value - length / 4 * (gradient @ direction) + 1e-15 * (1 + abs(value))
            and length > 1e-6
        ):
            length /= 2
        point = point - length * direction
        value, gradient, hessian = oracle(point)
    raise CoterieError(
        f"Newton's method stopped at a gap of {gradient @ gradient / (2 * strong):.1e}, above "
        f"{gap:.0e}",
        "Use a larger ridge alpha.",
    )


def exclusive_or(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Return inputs on the unit circle, [n, 2], labelled by the sign of x_1 x_2: beyond one linear
    expert, within reach of two with a router.
    """
    angle = rng.uniform(0, 2 * np.pi, n)
    x = np.column_stack([np.cos(angle), np.sin(angle)])
    return x, np.sign(x[:, 0] * x[:, 1])
