"""The contraction of CoMiGS, run: Theorem 2.1 with Example 1 (appendix G.1 and G.2 of "On-Device
Collaborative Language Modeling ...").

Theorem 2.1 leaves its norms open, and that matters: Example 1 bounds T in the norms of A and B, not
in the Euclidean one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from theorems.experiment import Claim, Curve, Experiment, Panel, Table, excess

Array = npt.NDArray[np.float64]
PAPER = (
    "Fan et al., On-Device Collaborative Language Modeling via a Mixture of Generalists and "
    "Specialists"
)
SLACK = (
    1 + 1e-6
)  # of rates and of errors below their bound: what rounding may add at condition number 1e6


@dataclass(frozen=True)
class Quadratic:
    """Example 1 around any optimum: f = 1/2 <A t, t> + 1/2 <B p, p> + <C t, p> with t = Theta -
    Theta*, p = Phi - Phi*.

    Args:
        A: [t, t], symmetric.
        B: [p, p], symmetric.
        C: [p, t].
        theta: Theta*, [t].
        phi: Phi*, [p].
    """

    A: Array
    B: Array
    C: Array
    theta: Array
    phi: Array

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """The constants mu and L: the smallest and the largest eigenvalue of H."""
        eigenvalues = np.linalg.eigvalsh(np.block([[self.A, self.C.T], [self.C, self.B]]))
        return float(eigenvalues[0]), float(eigenvalues[-1])

    def best_phi(self, theta: Array) -> Array:
        """Return the u_1 of this f: argmin over Phi, [p]."""
        return self.phi - np.linalg.solve(self.B, self.C @ (theta - self.theta))

    def best_theta(self, phi: Array) -> Array:
        """Return the u_2 of this f: argmin over Theta, [t]."""
        return self.theta - np.linalg.solve(self.A, self.C.T @ (phi - self.phi))

    def operator(self) -> Array:
        """T = A^-1 C^T B^-1 C (eq. 12), [t, t]."""
        return np.asarray(
            np.linalg.solve(self.A, self.C.T @ np.linalg.solve(self.B, self.C)), float
        )

    def rate(self) -> float:
        """||A^-1/2 (C^T B^-1 C) A^-1/2||: the norm of T where ||t||^2 = <A t, t>.

        It is lambda_1 lambda_2 with lambda_1 = lambda_2 = ||B^-1/2 C A^-1/2|| in the norms of A and
        B.
        """
        whitened = np.linalg.solve(
            np.linalg.cholesky(self.A), np.linalg.solve(np.linalg.cholesky(self.B), self.C).T
        )
        return float(np.linalg.norm(whitened, 2)) ** 2


def alternate(
    valid: Quadratic, train: Quadratic, theta: Array, steps: int
) -> tuple[list[Array], list[Array]]:
    """Process (8): Theta_0 .. Theta_steps and Phi_1 .. Phi_steps (it never uses a Phi_0, which
    eq. 11 mentions).
    """
    thetas, phis = [theta], []
    for _ in range(steps):
        phis.append(valid.best_phi(thetas[-1]))
        thetas.append(train.best_theta(phis[-1]))
    return thetas, phis


def random_quadratic(
    rng: np.random.Generator, sizes: tuple[int, int], condition: float
) -> Quadratic:
    """H with random eigenvectors and eigenvalues spread evenly on a log scale between 1 /
    condition and 1; the optimum is 0.
    """
    t, p = sizes
    vectors, _ = np.linalg.qr(rng.standard_normal((t + p, t + p)))
    H = vectors * np.geomspace(1 / condition, 1, t + p) @ vectors.T
    H = (H + H.T) / 2
    return Quadratic(H[:t, :t], H[t:, t:], H[t:, :t], np.zeros(t), np.zeros(p))


def euclidean_counterexample() -> Quadratic:
    """Return a = diag(1, e), B = 1, C = c (1, sqrt e), e = 0.01, c^2 = 0.4: ||T|| = c^2 (1 + e) /
    sqrt e > 4, while its spectral radius is 0.8.
    """
    return Quadratic(
        np.diag([1, 0.01]), np.eye(1), np.sqrt(0.4) * np.array([[1, 0.1]]), np.zeros(2), np.zeros(1)
    )


def contraction(seed: int) -> Experiment:
    """Theorem 2.1 with Example 1, and with f_valid != f_train of one optimum."""
    rng = np.random.default_rng(seed)
    uncoupled = random_quadratic(rng, (6, 4), 100)
    cases = {
        "well conditioned, 3 + 2": random_quadratic(rng, (3, 2), 10),
        "8 + 5": random_quadratic(rng, (8, 5), 100),
        "20 + 30": random_quadratic(rng, (20, 30), 1e4),
        "nearly singular, 10 + 10": random_quadratic(rng, (10, 10), 1e6),
        "$C = 0$, 6 + 4": replace(uncoupled, C=np.zeros_like(uncoupled.C)),
        "$A = B = 1$, $C = 0.8$": Quadratic(
            np.eye(1), np.eye(1), np.full((1, 1), 0.8), np.zeros(1), np.zeros(1)
        ),
        "counterexample, 2 + 1": euclidean_counterexample(),
    }
    runs = [_run_quadratic(name, f, rng) for name, f in cases.items()]
    shared, shared_panel = _shared_optimum(rng)
    return Experiment(
        title="Alternating minimisation contracts",
        source=f"{PAPER}, Theorem 2.1 (G.1) and Example 1",
        claims=(*_quadratic_claims(runs), _euclidean_claim(runs[-1], rng), *shared),
        table=Table(
            (
                "quadratic, $|Theta| + |Phi|$",
                "$mu / L$",
                "norm of $T$, $A$-norm",
                "$(L - mu) / L$",
                "norm of $T$, Euclidean",
                "error after 10 steps",
            ),
            tuple(
                (r.name, r.mu / r.L, r.rate, r.bound, r.euclidean, r.errors[10] / r.errors[0])
                for r in runs
            ),
        ),
        panels=(_rate_panel([runs[0], runs[1], runs[3]]), _euclidean_panel(runs[-1]), shared_panel),
    )


@dataclass(frozen=True)
class _QuadraticRun:
    """A quadratic, its constants, and an alternating run from the start that the Euclidean norm
    likes least.
    """

    name: str
    f: Quadratic
    mu: float
    L: float
    rate: float  # ||T|| in the A-norm
    euclidean: float  # ||T|| in the Euclidean norm
    errors: list[float]  # ||Theta_k - Theta*||_A
    errors_phi: list[float]  # ||Phi_k - Phi*||_B, k >= 1
    errors_euclidean: list[float]
    deviation: float  # of the iterates from T^k Theta_0, relative, in the A-norm

    @property
    def bound(self) -> float:
        return (self.L - self.mu) / self.L


def _run_quadratic(name: str, f: Quadratic, rng: np.random.Generator) -> _QuadraticRun:
    T = f.operator()
    _, singular, right = np.linalg.svd(T)
    start = right[0] if singular[0] > 0 else rng.standard_normal(len(f.theta))
    thetas, phis = alternate(f, f, start, 40)
    errors = [_norm(f.A, theta) for theta in thetas]
    powers = [np.linalg.matrix_power(T, k) @ start for k in range(len(thetas))]
    return _QuadraticRun(
        name,
        f,
        *f.spectrum,
        rate=f.rate(),
        euclidean=float(singular[0]),
        errors=errors,
        errors_phi=[_norm(f.B, phi) for phi in phis],
        errors_euclidean=[float(np.linalg.norm(theta)) for theta in thetas],
        deviation=max(
            _norm(f.A, theta - power) for theta, power in zip(thetas, powers, strict=True)
        )
        / errors[0],
    )


def _norm(M: Array, v: Array) -> float:
    return float(np.sqrt(v @ M @ v))


def _quadratic_claims(runs: list[_QuadraticRun]) -> Iterator[Claim]:
    deviation = max(run.deviation for run in runs)
    yield Claim(
        "The iterates obey $T = A^-1 C^T B^-1 C$ (eq. 12)",
        deviation <= 1e-8,
        f"largest relative deviation {deviation:.1e}",
    )
    closest = max(runs, key=lambda run: run.rate / run.bound)
    yield Claim(
        "$||A^-1/2 (C^T B^-1 C) A^-1/2|| <= (L - mu) / L$: $T$ contracts in the $A$-norm",
        all(run.rate <= run.bound + 1e-9 for run in runs),
        f"closest: ${closest.rate:.6f} <= {closest.bound:.6f}$ ({closest.name})",
    )
    worst = max(
        max(excess(run.errors, run.bound), excess(run.errors_phi, run.bound))
        for run in runs
        if run.f.C.any()
    )
    yield Claim(
        "$||Theta_k - Theta*||_A$ and $||Phi_k - Phi*||_B$ fall at least as fast as $((L - mu) / "
        "L)^k$",
        worst <= SLACK,
        f"largest error / bound over 40 steps: {worst:.6f}",
    )
    left = max(run.errors[1] for run in runs if not run.f.C.any())
    yield Claim(
        "With $C = 0$ one step reaches the optimum", left == 0, f"error after one step: {left:.1e}"
    )
    sharp = [(run, ((run.L - run.mu) / (run.L + run.mu)) ** 2) for run in runs]
    attained, value = max(sharp, key=lambda pair: pair[0].rate / pair[1])
    yield Claim(
        "Sharper, by Wielandt's inequality: $||T||_A <= ((L - mu) / (L + mu))^2$, which is "
        "attained",
        all(run.rate <= limit + 1e-9 for run, limit in sharp) and attained.rate >= value - 1e-9,
        f"attained: ${attained.rate:.6f} = {value:.6f}$ ({attained.name})",
        beside=True,
    )


def _euclidean_claim(example: _QuadraticRun, rng: np.random.Generator) -> Claim:
    """Whether the Euclidean norm may stand in ||A^-1 C^T B^-1 C|| = ||A^-1/2 (..) A^-1/2||, as
    the paper writes it.
    """
    draws = 200
    random = [random_quadratic(rng, (4, 4), 1e4) for _ in range(draws)]
    above = sum(
        float(np.linalg.norm(f.operator(), 2)) > 1 - f.spectrum[0] / f.spectrum[1] for f in random
    )
    growth = example.errors_euclidean[1] / example.errors_euclidean[0]
    return Claim(
        "Example 1's $||A^-1 C^T B^-1 C|| = ||A^-1/2 (C^T B^-1 C) A^-1/2||$ fails in the "
        "Euclidean norm, where $T$ may not even contract",
        example.euclidean > 1 > example.bound >= example.rate and growth > 1,
        f"$A = diag(1, 0.01)$, $B = 1$, $C = sqrt(0.4) (1, 0.1)$: ${example.euclidean:.3f} > "
        f"{example.bound:.4f}$, norm on the right "
        f"{example.rate:.2f}; the Euclidean error grows {growth:.2f}-fold in the first step; of "
        f"{draws} random quadratics with "
        f"$L / mu = 1e4$, {above} exceed the bound",
        beside=True,
    )


def _shared_optimum(rng: np.random.Generator) -> tuple[list[Claim], Panel]:
    """f_valid != f_train with one optimum (Assumption 1): Euclidean norms, lambda_1 lambda_2
    below and above 1.
    """
    theta, phi = rng.standard_normal(6), rng.standard_normal(6)
    valid, train = (
        replace(random_quadratic(rng, (6, 6), 10), theta=theta, phi=phi) for _ in range(2)
    )
    while (product := _lipschitz(valid, train)) > 0.8:
        valid, train = (
            replace(f, C=f.C / 2**0.25) for f in (valid, train)
        )  # H stays positive definite: smaller couplings
    coupling = np.linalg.qr(rng.standard_normal((6, 6)))[0] * np.sqrt(1.2)
    steep, flat = (
        2.2 * np.eye(6),
        np.eye(6),
    )  # Schur complement 2.2 - 1.2 = 1 > 0: both are strictly convex
    apart = (
        Quadratic(steep, flat, coupling, theta, phi),
        Quadratic(flat, steep, coupling, theta, phi),
    )

    start = theta + rng.standard_normal(6)
    thetas, phis = alternate(valid, train, start, 40)
    errors = [float(np.linalg.norm(point - theta)) for point in thetas]
    floor = 1e-14 * (errors[0] + float(np.linalg.norm(theta)))
    worst = max(
        excess(errors, product, floor),
        excess([float(np.linalg.norm(point - phi)) for point in phis], product, floor),
    )
    fixed = float(
        np.linalg.norm(train.best_theta(valid.best_phi(theta)) - theta)
        + np.linalg.norm(valid.best_phi(train.best_theta(phi)) - phi)
    )
    away = [float(np.linalg.norm(point - theta)) for point in alternate(*apart, start, 40)[0]]
    apart_product, growth = _lipschitz(*apart), (away[-1] / away[0]) ** (1 / 40)
    convex = min(f.spectrum[0] for f in (valid, train, *apart))
    claims = [
        Claim(
            "$f_valid != f_train$ with one optimum and $lambda_1 lambda_2 < 1$: both errors obey "
            "(11)",
            worst <= SLACK and product < 1 and fixed <= 1e-12 and convex > 0,
            f"$lambda_1 lambda_2 = {product:.3f}$; largest error / bound {worst:.6f}; Assumption "
            f"1 up to {fixed:.0e}",
        ),
        Claim(
            "Without $lambda_1 lambda_2 < 1$ it may diverge, although both are strictly convex "
            "with one optimum",
            apart_product > 1 and growth > 1.01 and convex > 0,
            f"$lambda_1 lambda_2 = {apart_product:.3f}$; the error grows {growth:.3f}-fold per "
            f"step; smallest eigenvalue {convex:.2g}",
            beside=True,
        ),
    ]
    curves = (
        Curve(
            f"$lambda_1 lambda_2 = {product:.2f}$",
            [error if error > floor else 0.0 for error in errors],
            0,
        ),
        Curve(f"$lambda_1 lambda_2 = {apart_product:.2f}$", away, 1),
        Curve(
            f"bound, ${product:.2f}^k$", [errors[0] * product**k for k in range(41)], 0, dashed=True
        ),
    )
    return claims, Panel(
        "$f_valid != f_train$ with one optimum",
        "step $k$",
        "$||Theta_k - Theta*||$, Euclidean",
        curves,
    )


def _lipschitz(valid: Quadratic, train: Quadratic) -> float:
    """lambda_1 lambda_2 of (10) in the Euclidean norms: u_1 from f_valid, u_2 from f_train."""
    return float(
        np.linalg.norm(np.linalg.solve(valid.B, valid.C), 2)
        * np.linalg.norm(np.linalg.solve(train.A, train.C.T), 2)
    )


def _rate_panel(runs: list[_QuadraticRun]) -> Panel:
    errors = (
        Curve(run.name, [error / run.errors[0] for error in run.errors], colour)
        for colour, run in enumerate(runs)
    )
    bounds = (
        Curve(
            f"bound, ${run.bound:.6g}^k$",
            [run.bound**k for k in range(len(run.errors))],
            colour,
            dashed=True,
        )
        for colour, run in enumerate(runs)
    )
    return Panel(
        "Example 1, $f_valid = f_train$",
        "step $k$",
        "$||Theta_k - Theta*||_A$ / start",
        (*errors, *bounds),
    )


def _euclidean_panel(run: _QuadraticRun) -> Panel:
    a, e = (
        [error / errors[0] for error in errors] for errors in (run.errors, run.errors_euclidean)
    )
    bound = [run.bound**k for k in range(len(a))]
    curves = (
        Curve("$A$-norm", a, 0),
        Curve("Euclidean norm", e, 1),
        Curve(f"bound, ${run.bound:.4f}^k$", bound, 0, dashed=True),
    )
    return Panel(
        "The norm matters: $A = diag(1, 0.01)$",
        "step $k$",
        "$||Theta_k - Theta*||$ / start",
        curves,
    )
