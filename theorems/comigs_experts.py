"""The global convergence of CoMiGS with linear experts, run: Theorem G.2, with its routers
decoupled by latent weights (eq. 19-22).

The setting of the paper: one client, f_valid = f_train, no constraints on Theta and Phi.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from theorems.comigs import PAPER, SLACK
from theorems.experiment import Claim, Curve, Experiment, Panel, Table, excess
from theorems.linear_experts import LinearExperts, Point, exclusive_or

ROUNDING = 1e-14  # of F_mu, whose values are about 1
SEGMENT = (0.0, 0.5, 1.0)
STEPS = 300  # at most


@dataclass(frozen=True)
class _ExpertsRun:
    """One setting of (19), trained by (22) until it is stationary."""

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
        """Whether alpha is large enough for joint strong convexity: a weaker condition than
        (21), see `LinearExperts.constants`.
        """
        p = self.problem
        return p.alpha > p.radius**2 * (p.mu + 1 / p.mu) / 2

    @property
    def gaps(self) -> list[float]:
        """f(X_k, Y_k) - f* for k = 0, 1, ...

        X_0 is the best one for Y_0, so that the first gap is as small as it can be. From such a
        start the proof gives an exponent of 2k - 1 only, as its first half step wants a Y_0 that is
        best for X_0; what is checked is 2k, as the theorem says.
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
        """The minimum of F_mu over identical experts under a uniform router: one logistic
        regression with a ridge of (N + 1) alpha.
        """
        p = self.problem
        one = replace(p, experts=1, alpha=p.experts * p.alpha)
        zero = np.zeros((p.x.shape[1], 1))
        return one.value(one.theta_step(Point(zero, zero, np.ones((len(p.x), 1)))))


def factor(constants: tuple[float, float]) -> float:
    """(1 - mu / L)^2 of Theorem G.2, the bound on the gap's factor in one step."""
    return (1 - constants[0] / constants[1]) ** 2


def linear_experts(seed: int) -> Experiment:
    """Theorem G.2 on a mixture of three linear classifiers: with (21), near and far starts, and
    without it.
    """
    rng = np.random.default_rng(seed)
    x, y = exclusive_or(rng, 24)
    base = LinearExperts(x, y, experts=3, mu=1.0, alpha=1.0)
    settings = [
        (1.0, 1.0, 0.7),
        (0.5, 1.0, 0.7),
        (2.0, 1.0, 0.7),
        (1.0, 0.6, 0.7),
        (1.0, 1.0, 7.0),
        (1.0, 0.1, 0.7),
        (1.0, 0.01, 0.7),
    ]
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


def _run_experts(
    problem: LinearExperts, ratio: float, start: float, rng: np.random.Generator
) -> _ExpertsRun:
    problem = replace(problem, alpha=ratio * problem.sufficient_alpha)
    initial = rng.standard_normal((2, problem.x.shape[1], problem.experts))
    theta, phi = initial * start / np.linalg.norm(initial)
    z = problem.lambda_step(
        Point(theta, phi, np.full((len(problem.x), problem.experts), 1 / problem.experts))
    )
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
    ways = product(trace[:24], SEGMENT, SEGMENT) if certified[0] > 0 else ()
    between = (point.towards(end, s, t) for point, s, t in ways)
    spectra = [np.linalg.eigvalsh(problem.hessian(point)) for point in between]
    return _ExpertsRun(
        problem,
        start,
        values,
        end,
        problem.stationarity(end),
        least=float(min(np.linalg.eigvalsh(hessian)[0] for hessian in samples)),
        least_block=float(
            min(
                np.linalg.eigvalsh(hessian[block, block])[0]
                for hessian in samples
                for block in problem.blocks()
            )
        ),
        certified=certified,
        measured=(
            min((float(e[0]) for e in spectra), default=0.0),
            max((float(e[-1]) for e in spectra), default=np.inf),
        ),
    )


def _samples(problem: LinearExperts, rng: np.random.Generator) -> Iterator[Point]:
    """Points where joint convexity is likely to break: large Theta and Phi, and weights split
    evenly between two experts.
    """
    shape = (problem.x.shape[1], problem.experts)
    yield Point(
        np.zeros(shape),
        np.zeros(shape),
        np.full((len(problem.x), problem.experts), 1 / problem.experts),
    )
    for k in range(40):
        theta, phi = 10 ** rng.uniform(-1, 1.5, (2, 1, 1)) * rng.standard_normal((2, *shape))
        lam = rng.dirichlet(np.ones(problem.experts), len(problem.x))
        if k % 2:
            lam = 0.5 * (
                1 - np.eye(problem.experts)[rng.integers(0, problem.experts, len(problem.x))]
            )
        lam = np.maximum(lam, 1e-4)
        yield Point(theta, phi, lam / lam.sum(1, keepdims=True))


def _experts_claims(runs: list[_ExpertsRun]) -> Iterator[Claim]:
    convex, premise = [run for run in runs if run.convex], [run for run in runs if run.ratio >= 1]
    other = [run for run in runs if run.ratio < 0.05]
    block = min(run.least_block for run in runs)
    yield Claim(
        "Every block update of (22) is a convex problem, whatever $alpha$",
        block >= 0,
        f"least eigenvalue of a sampled block {block:.2g}",
    )
    margin = min(run.least - run.certified[0] for run in premise)
    yield Claim(
        "With (21) the objective (19) is jointly strongly convex (Proposition 1)",
        margin >= 0 and all(run.certified[0] > 0 for run in premise),
        "; ".join(
            f"$mu = {r.problem.mu:g}$: sampled Hessians at least {r.least:.3f}, certified "
            f"{r.certified[0]:.3f}"
            for r in premise
            if r.start < 1
        ),
    )
    rise = max(after - before for run in runs for before, after in pairwise(run.values))
    yield Claim(
        "No block update increases $F_mu$",
        rise <= 10 * ROUNDING,
        f"largest increase {rise:.0e} (rounding) in {sum(len(run.values) - 1 for run in runs)} "
        f"updates",
    )
    still = max(run.stationarity for run in convex)
    inexact = max(run.stationarity**2 / (2 * run.certified[0]) for run in convex)
    yield Claim(
        "Where (19) is strongly convex the process reaches the global minimum",
        still <= 1e-10,
        f"at most {max(len(run.gaps) - 1 for run in convex)} steps; gradient at most "
        f"{still:.0e}, hence $F_mu - f* <= {inexact:.0e}$",
    )
    worst = max(excess(run.gaps, factor(run.certified), ROUNDING) for run in convex)
    yield Claim(
        "The gap obeys $(1 - mu / L)^(2k)$, $mu$ and $L$ certified on a region that holds the "
        "run and the optimum",
        worst <= SLACK,
        f"largest gap / bound {worst:.2g}; per step, bound and slowest: "
        + ", ".join(f"1 - {1 - factor(run.certified):.1g} and {run.slowest:.3f}" for run in convex),
    )
    worst = max(excess(run.gaps, factor(run.measured), ROUNDING) for run in convex)
    yield Claim(
        "So it does with $mu$ and $L$ from the Hessians between iterates and optimum (sampled, "
        "not certified)",
        worst <= SLACK,
        f"largest gap / bound {worst:.2g}; bounds per step "
        + ", ".join(f"{factor(run.measured):.3f}" for run in convex),
        beside=True,
    )
    yield Claim(
        "Far below (21) joint convexity fails",
        all(run.least < 0 for run in other),
        "; ".join(
            f"$alpha = {r.ratio:g}$ of (21): least sampled eigenvalue {r.least:.2g}"
            for r in runs
            if r.ratio < 1
        ),
        beside=True,
    )
    spread = max(run.spread for run in premise)
    same = max(abs(run.values[-1] - run.one_expert) for run in premise)
    yield Claim(
        "The price of (21): strongly convex and, unless constraints tell experts apart, "
        "symmetric in them, (19) makes them all equal",
        spread <= 1e-9 and same <= 10 * ROUNDING,
        f"with (21), experts differ by {spread:.0e} and $F_mu$ from one logistic regression's by "
        f"{same:.0e}; "
        + "; ".join(
            f"at {r.ratio:g} of (21), by {r.spread:.2g} and {r.values[-1] - r.one_expert:.2g}"
            for r in other
        ),
        beside=True,
    )


def _bound_panel(near: _ExpertsRun, far: _ExpertsRun) -> Panel:
    def bound(run: _ExpertsRun, rate: float) -> list[float]:
        return [run.gaps[0] * rate**k for k in range(len(near.gaps))]

    certified, measured, remote = (
        factor(near.certified),
        factor(near.measured),
        factor(far.certified),
    )
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
        Curve(
            f"$alpha$ / (21) = {run.ratio:g}, eigenvalues from {run.least:.2g}",
            _visible(run)[:40],
            colour,
        )
        for colour, run in enumerate(runs)
    )
    return Panel("The same with less $alpha$", "step $k$", "$F_mu$ - its limit", curves)


def _visible(run: _ExpertsRun) -> list[float]:
    return [gap if gap > ROUNDING else 0.0 for gap in run.gaps]
