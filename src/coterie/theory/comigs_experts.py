"""The global convergence of CoMiGS with linear experts, run: Theorem G.2, with its routers decoupled by latent weights (eq. 19-22).

The setting of the paper: one client, f_valid = f_train, no constraints on Theta and Phi.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from coterie.errors import CoterieError
from coterie.theory.comigs import PAPER, SLACK, Array
from coterie.theory.experiment import Claim, Curve, Experiment, Panel, Table, excess


@dataclass(frozen=True)
class Point:
    """Theta and Phi, [d, N + 1], and Lambda, [n, N + 1] with rows on the simplex."""

    theta: Array
    phi: Array
    lam: Array

    def towards(self, other: "Point", lam: float, rest: float) -> "Point":
        """The point that is `lam` of the way to `other` in Lambda and `rest` of it in Theta and Phi."""
        return Point(
            (1 - rest) * self.theta + rest * other.theta,
            (1 - rest) * self.phi + rest * other.phi,
            (1 - lam) * self.lam + lam * other.lam,
        )


@dataclass(frozen=True)
class LinearExperts:
    """F_mu of (19) with the logistic loss l_i(t) = ln(1 + exp(-y_i t)): convex, |l'| <= rho = 1, l'' <= 1/4, as Proposition 1 wants.

    Curvatures are in the norm ||Theta||^2 + ||Phi||^2 + ||Lambda||^2 / n, along directions that keep the rows of Lambda on the
    simplex: Theorem G.2 holds in any such norm, and in this one its constants do not depend on n.

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
        return float((fit + self.mu * divergence).mean() + self.alpha / 2 * ((z.theta**2).sum() + (z.phi**2).sum()))

    def stationarity(self, z: Point) -> float:
        """The norm of F_mu's gradient; in Lambda, of its part along the simplex (Lambda > 0 here)."""
        scores, logits = self.x @ z.theta, self.x @ z.phi
        slope = self.loss((z.lam * scores).sum(1))[1][:, None]
        theta = self.x.T @ (slope * z.lam) / len(self.x) + self.alpha * z.theta
        phi = self.mu * self.x.T @ (softmax(logits) - z.lam) / len(self.x) + self.alpha * z.phi
        lam = slope * scores + self.mu * (np.log(z.lam) - logits)
        lam = (lam - lam.mean(1, keepdims=True)) / np.sqrt(len(self.x))
        return float(np.sqrt((theta**2).sum() + (phi**2).sum() + (lam**2).sum()))

    def hessian(self, z: Point) -> Array:
        """Over (Theta, Phi, Lambda) in the norm above, [2 d (N + 1) + n N] squared.

        The mixed block has l'' and l' terms: (l'' (a + b)^2 + 2 l' <h, H^T x>) in a direction (H, h). The paper's proof of
        Proposition 1 has a b and <h, H^T x> once each, and l'' where l' belongs; (21) is large enough all the same.
        """
        n, d = self.x.shape
        m = self.experts
        size, free = d * m, m - 1
        scores = self.x @ z.theta
        _, first, second = self.loss((z.lam * scores).sum(1))
        tangent = np.linalg.qr(np.column_stack([np.ones(m), np.eye(m)[:, 1:]]))[0][:, 1:]  # [m, N]: orthonormal, columns sum to 0
        u = self.features(z.lam)
        per_sample = np.einsum("na,jk->najk", self.x, np.eye(m)).reshape(n, size, m)  # d u_i / d lambda^i
        theta_lam = np.einsum("n,np,nk->npk", second, u, scores) + first[:, None, None] * per_sample
        mixed = np.concatenate([theta_lam, -self.mu * per_sample], axis=1) @ tangent / np.sqrt(n)  # [n, 2 d m, N]
        lam = np.einsum("n,nj,nk->njk", second, scores, scores) + self.mu * np.einsum("nj,jk->njk", 1 / z.lam, np.eye(m))
        whole = np.zeros((2 * size + n * free,) * 2)
        whole[:size, :size] = self.theta_curvature(u, second)
        whole[size : 2 * size, size : 2 * size] = self.phi_curvature(softmax(self.x @ z.phi))
        for i in range(n):
            at = slice(2 * size + i * free, 2 * size + (i + 1) * free)
            whole[: 2 * size, at], whole[at, : 2 * size] = mixed[i], mixed[i].T
            whole[at, at] = tangent.T @ lam[i] @ tangent
        return whole

    def features(self, lam: Array) -> Array:
        """The gradients of <lambda^i, Theta^T x_i> in Theta, [n, d (N + 1)]."""
        return np.asarray(np.einsum("na,nj->naj", self.x, lam).reshape(len(self.x), -1))

    def theta_curvature(self, features: Array, second: Array) -> Array:
        """The Hessian in Theta from l'' at every sample, [d (N + 1)] squared."""
        return (features * second[:, None]).T @ features / len(features) + self.alpha * np.eye(features.shape[1])

    def phi_curvature(self, share: Array) -> Array:
        """The Hessian in Phi from the router's probabilities, [d (N + 1)] squared."""
        n, size = len(self.x), self.x.shape[1] * self.experts
        spread = np.einsum("nj,jk->njk", share, np.eye(self.experts)) - np.einsum("nj,nk->njk", share, share)
        curvature = np.einsum("na,nb,njk->ajbk", self.x, self.x, spread).reshape(size, size)
        return np.asarray(self.mu / n * curvature + self.alpha * np.eye(size))

    def blocks(self) -> tuple[slice, slice, slice]:
        """Where Theta, Phi and Lambda lie in the rows of `hessian`."""
        size = self.x.shape[1] * self.experts
        return slice(0, size), slice(size, 2 * size), slice(2 * size, None)

    def lambda_step(self, z: Point) -> Point:
        """The minimiser over Lambda, to machine precision: lambda^i = softmax(Phi^T x_i - s_i Theta^T x_i / mu) with s_i = l_i'(t(s_i)).

        s - l'(t(s)) increases in s with a slope of at least 1, so that bisection on [-rho, rho] finds its one root.
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
        """The minimiser over Phi: a multinomial logistic regression with soft targets Lambda and a ridge."""

        def oracle(flat: Array) -> tuple[float, Array, Array]:
            phi = flat.reshape(z.phi.shape)
            logits = self.x @ phi
            share = softmax(logits)
            value = self.mu * (np.logaddexp.reduce(logits, axis=1) - (z.lam * logits).sum(1)).mean() + self.alpha / 2 * flat @ flat
            gradient = self.mu * self.x.T @ (share - z.lam) / len(self.x) + self.alpha * phi
            return float(value), gradient.ravel(), self.phi_curvature(share)

        return replace(z, phi=newton(oracle, z.phi.ravel(), self.alpha).reshape(z.phi.shape))

    def theta_step(self, z: Point) -> Point:
        """The minimiser over Theta: a logistic regression on the features lambda^i x_i with a ridge."""
        u = self.features(z.lam)

        def oracle(flat: Array) -> tuple[float, Array, Array]:
            loss, first, second = self.loss(u @ flat)
            gradient = u.T @ first / len(u) + self.alpha * flat
            return float(loss.mean() + self.alpha / 2 * flat @ flat), gradient, self.theta_curvature(u, second)

        return replace(z, theta=newton(oracle, z.theta.ravel(), self.alpha).reshape(z.theta.shape))

    def constants(self, level: float) -> tuple[float, float]:
        """Certified strong convexity mu and smoothness L on a convex region that holds the run and the optimum.

        Entropy is not smooth at the simplex's boundary, so that no L serves everywhere. But F_mu >= alpha / 2 (||Theta||^2 + ||Phi||^2),
        so that points with F_mu <= `level` have ||(Theta, Phi)|| <= R, and a Lambda-step from there gives weights of at
        least delta: both blocks of Theorem G.2 stay where Lambda >= delta and ||(Theta, Phi)|| <= R. The bounds are quadratic forms in the
        lengths of a direction's parts. The lower one holds everywhere and takes (18) as it stands, with ||h||_1 >= sqrt 2 ||h||_2 and
        <h, v> <= ||h||_1 ||v|| / sqrt 2 where h sums to 0; it is positive for alpha > ||x||^2 (mu + rho^2 / mu) / 2, a sharper (21).

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


def newton(oracle: Callable[[Array], tuple[float, Array, Array]], start: Array, strong: float, gap: float = 1e-24) -> Array:
    """The minimiser of a strongly convex function, up to a certified functional gap ||gradient||^2 / (2 strong) <= `gap`.

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
            oracle(point - length * direction)[0] > value - length / 4 * (gradient @ direction) + 1e-15 * (1 + abs(value)) and length > 1e-6
        ):
            length /= 2
        point = point - length * direction
        value, gradient, hessian = oracle(point)
    raise CoterieError(
        f"Newton's method stopped at a gap of {gradient @ gradient / (2 * strong):.1e}, above {gap:.0e}", "Use a larger ridge alpha."
    )


def exclusive_or(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Inputs on the unit circle, [n, 2], labelled by the sign of x_1 x_2: beyond one linear expert, within reach of two with a router."""
    angle = rng.uniform(0, 2 * np.pi, n)
    x = np.column_stack([np.cos(angle), np.sin(angle)])
    return x, np.sign(x[:, 0] * x[:, 1])


ROUNDING = 1e-14  # of F_mu, whose values are about 1
SEGMENT = (0.0, 0.5, 1.0)
STEPS = 300  # at most


@dataclass(frozen=True)
class _ExpertsRun:
    """One setting of (19), run by (22) until it is stationary."""

    problem: LinearExperts
    start: float  # ||(Theta_0, Phi_0)||
    values: list[float]  # F_mu after every block update, from (Lambda_1, Phi_0, Theta_0) on
    end: Point
    stationarity: float  # norm of the gradient at the end
    least: float  # smallest eigenvalue among sampled Hessians
    least_block: float  # the same among their diagonal blocks
    certified: tuple[float, float]  # mu and L of the region of the run
    measured: tuple[float, float]  # the same from Hessians between the iterates and the optimum

    @property
    def ratio(self) -> float:
        """How large alpha is against the right side of (21)."""
        return self.problem.alpha / self.problem.sufficient_alpha

    @property
    def convex(self) -> bool:
        """Whether alpha is large enough for joint strong convexity: a weaker condition than (21), see `LinearExperts.constants`."""
        p = self.problem
        return p.alpha > p.radius**2 * (p.mu + 1 / p.mu) / 2

    @property
    def gaps(self) -> list[float]:
        """f(X_k, Y_k) - f* for k = 0, 1, ...

        X_0 is the best one for Y_0, so that the first gap is as small as it can be. From such a start the proof gives an exponent of
        2k - 1 only, as its first half step wants a Y_0 that is best for X_0; what is checked is 2k, as the theorem says.
        """
        return [max(value - self.values[-1], 0.0) for value in self.values[::3]]

    @property
    def slowest(self) -> float:
        """The largest factor of the gap in one step."""
        gaps = self.gaps
        return max(after / before for before, after in pairwise(gaps) if before > 100 * ROUNDING)

    @property
    def spread(self) -> float:
        """Largest difference between two experts in a coordinate."""
        return float(np.ptp(self.end.theta, axis=1).max())

    @property
    def one_expert(self) -> float:
        """The minimum of F_mu over identical experts under a uniform router: one logistic regression with a ridge of (N + 1) alpha."""
        p = self.problem
        one = replace(p, experts=1, alpha=p.experts * p.alpha)
        zero = np.zeros((p.x.shape[1], 1))
        return one.value(one.theta_step(Point(zero, zero, np.ones((len(p.x), 1)))))


def factor(constants: tuple[float, float]) -> float:
    """(1 - mu / L)^2 of Theorem G.2, the bound on the gap's factor in one step."""
    return (1 - constants[0] / constants[1]) ** 2


def linear_experts(seed: int) -> Experiment:
    """Theorem G.2 on a mixture of three linear classifiers: with (21), near and far starts, and without it."""
    rng = np.random.default_rng(seed)
    x, y = exclusive_or(rng, 24)
    base = LinearExperts(x, y, experts=3, mu=1.0, alpha=1.0)
    settings = [(1.0, 1.0, 0.7), (0.5, 1.0, 0.7), (2.0, 1.0, 0.7), (1.0, 0.6, 0.7), (1.0, 1.0, 7.0), (1.0, 0.1, 0.7), (1.0, 0.01, 0.7)]
    runs = [_run_experts(replace(base, mu=mu), ratio, start, rng) for mu, ratio, start in settings]
    return Experiment(
        title="Linear experts with decoupled latent weights",
        source=f"{PAPER}, Theorem G.2, Proposition 1 and eq. 19-22",
        claims=tuple(_experts_claims(runs)),
        table=Table(
            (
                "$mu$",
                "$alpha$ / (21)",
                "norm of start",
                "least eigenvalue",
                "$(1 - mu/L)^2$",
                "slowest step",
                "spread of experts",
                "$F$ - $F$ one expert",
            ),
            tuple(
                (
                    run.problem.mu,
                    run.ratio,
                    run.start,
                    run.least,
                    factor(run.certified) if run.convex else "none",
                    run.slowest,
                    run.spread,
                    run.values[-1] - run.one_expert,
                )
                for run in runs
            ),
        ),
        panels=(_bound_panel(runs[0], runs[4]), _ridge_panel([runs[k] for k in (0, 3, 5, 6)])),
    )


def _run_experts(problem: LinearExperts, ratio: float, start: float, rng: np.random.Generator) -> _ExpertsRun:
    problem = replace(problem, alpha=ratio * problem.sufficient_alpha)
    initial = rng.standard_normal((2, problem.x.shape[1], problem.experts))
    theta, phi = initial * start / np.linalg.norm(initial)
    z = problem.lambda_step(Point(theta, phi, np.full((len(problem.x), problem.experts), 1 / problem.experts)))
    trace = [z]
    for _ in range(STEPS):
        for step in (problem.lambda_step, problem.phi_step, problem.theta_step):
            trace.append(step(trace[-1]))
        if problem.stationarity(trace[-1]) <= 1e-11:
            break
    values = [problem.value(point) for point in trace]
    certified = problem.constants(values[0])
    samples = [problem.hessian(point) for point in _samples(problem, rng)]
    end = trace[-1]
    between = (point.towards(end, s, t) for point in trace[:24] for s in SEGMENT for t in SEGMENT) if certified[0] > 0 else ()
    spectra = [np.linalg.eigvalsh(problem.hessian(point)) for point in between]
    return _ExpertsRun(
        problem,
        start,
        values,
        end,
        problem.stationarity(end),
        least=float(min(np.linalg.eigvalsh(hessian)[0] for hessian in samples)),
        least_block=float(min(np.linalg.eigvalsh(hessian[block, block])[0] for hessian in samples for block in problem.blocks())),
        certified=certified,
        measured=(min((float(e[0]) for e in spectra), default=0.0), max((float(e[-1]) for e in spectra), default=np.inf)),
    )


def _samples(problem: LinearExperts, rng: np.random.Generator) -> Iterator[Point]:
    """Points where joint convexity is likely to break: large Theta and Phi, and weights split evenly between two experts."""
    shape = (problem.x.shape[1], problem.experts)
    yield Point(np.zeros(shape), np.zeros(shape), np.full((len(problem.x), problem.experts), 1 / problem.experts))
    for k in range(40):
        theta, phi = 10 ** rng.uniform(-1, 1.5, (2, 1, 1)) * rng.standard_normal((2, *shape))
        lam = rng.dirichlet(np.ones(problem.experts), len(problem.x))
        if k % 2:
            lam = 0.5 * (1 - np.eye(problem.experts)[rng.integers(0, problem.experts, len(problem.x))])
        lam = np.maximum(lam, 1e-4)
        yield Point(theta, phi, lam / lam.sum(1, keepdims=True))


def _experts_claims(runs: list[_ExpertsRun]) -> Iterator[Claim]:
    convex, premise = [run for run in runs if run.convex], [run for run in runs if run.ratio >= 1]
    other = [run for run in runs if run.ratio < 0.05]
    block = min(run.least_block for run in runs)
    yield Claim(
        "Every block update of (22) is a convex problem, whatever $alpha$", block >= 0, f"least eigenvalue of a sampled block {block:.2g}"
    )
    margin = min(run.least - run.certified[0] for run in premise)
    yield Claim(
        "With (21) the objective (19) is jointly strongly convex (Proposition 1)",
        margin >= 0 and all(run.certified[0] > 0 for run in premise),
        "; ".join(
            f"$mu = {r.problem.mu:g}$: sampled Hessians at least {r.least:.3f}, certified {r.certified[0]:.3f}"
            for r in premise
            if r.start < 1
        ),
    )
    rise = max(after - before for run in runs for before, after in pairwise(run.values))
    yield Claim(
        "No block update increases $F_mu$",
        rise <= 10 * ROUNDING,
        f"largest increase {rise:.0e} (rounding) in {sum(len(run.values) - 1 for run in runs)} updates",
    )
    still = max(run.stationarity for run in convex)
    inexact = max(run.stationarity**2 / (2 * run.certified[0]) for run in convex)
    yield Claim(
        "Where (19) is strongly convex the process reaches the global minimum",
        still <= 1e-10,
        f"at most {max(len(run.gaps) - 1 for run in convex)} steps; gradient at most {still:.0e}, hence $F_mu - f* <= {inexact:.0e}$",
    )
    worst = max(excess(run.gaps, factor(run.certified), ROUNDING) for run in convex)
    yield Claim(
        "The gap obeys $(1 - mu / L)^(2k)$, $mu$ and $L$ certified on a region that holds the run and the optimum",
        worst <= SLACK,
        f"largest gap / bound {worst:.2g}; per step, bound and slowest: "
        + ", ".join(f"1 - {1 - factor(run.certified):.1g} and {run.slowest:.3f}" for run in convex),
    )
    worst = max(excess(run.gaps, factor(run.measured), ROUNDING) for run in convex)
    yield Claim(
        "So it does with $mu$ and $L$ from the Hessians between iterates and optimum (sampled, not certified)",
        worst <= SLACK,
        f"largest gap / bound {worst:.2g}; bounds per step " + ", ".join(f"{factor(run.measured):.3f}" for run in convex),
        beside=True,
    )
    yield Claim(
        "Far below (21) joint convexity fails",
        all(run.least < 0 for run in other),
        "; ".join(f"$alpha = {r.ratio:g}$ of (21): least sampled eigenvalue {r.least:.2g}" for r in runs if r.ratio < 1),
        beside=True,
    )
    spread = max(run.spread for run in premise)
    same = max(abs(run.values[-1] - run.one_expert) for run in premise)
    yield Claim(
        "The price of (21): strongly convex and, unless constraints tell experts apart, symmetric in them, (19) makes them all equal",
        spread <= 1e-9 and same <= 10 * ROUNDING,
        f"with (21), experts differ by {spread:.0e} and $F_mu$ from one logistic regression's by {same:.0e}; "
        + "; ".join(f"at {r.ratio:g} of (21), by {r.spread:.2g} and {r.values[-1] - r.one_expert:.2g}" for r in other),
        beside=True,
    )


def _bound_panel(near: _ExpertsRun, far: _ExpertsRun) -> Panel:
    def bound(run: _ExpertsRun, rate: float) -> list[float]:
        return [run.gaps[0] * rate**k for k in range(len(near.gaps))]

    certified, measured, remote = factor(near.certified), factor(near.measured), factor(far.certified)
    curves = (
        Curve(f"near start, norm {near.start:g}", _visible(near), 0),
        Curve(f"far start, norm {far.start:g}", _visible(far), 1),
        Curve(f"near, certified, ${certified:.3f}^k$", bound(near, certified), 0, dashed=True),
        Curve(f"near, along the run, ${measured:.3f}^k$", bound(near, measured), 2, dashed=True),
        Curve(f"far, certified, $(1 - {1 - remote:.0e})^k$", bound(far, remote), 1, dashed=True),
    )
    return Panel("$alpha$ as (21) asks for, $mu = 1$", "step $k$", "$F_mu - f*$", curves)


def _ridge_panel(runs: list[_ExpertsRun]) -> Panel:
    curves = tuple(
        Curve(f"$alpha$ / (21) = {run.ratio:g}, eigenvalues from {run.least:.2g}", _visible(run)[:40], colour)
        for colour, run in enumerate(runs)
    )
    return Panel("The same with less $alpha$", "step $k$", "$F_mu$ - its limit", curves)


def _visible(run: _ExpertsRun) -> list[float]:
    return [gap if gap > ROUNDING else 0.0 for gap in run.gaps]
