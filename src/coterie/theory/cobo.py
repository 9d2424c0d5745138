"""CoBo on quadratics in clusters, run: Theorem I, Corollary II and Example 2 of "CoBo: Collaborative Learning via Bilevel Optimization".

The constants are those that the proofs in appendix A give. Theorem I has rho c >= sqrt 3 L, M_ij < 1/5 and a step size of
min(2 sqrt(F_0 / (L sigma^2 T)), 1 / (2 rho c)). With root = sqrt(L sigma^2 F_0 / T) it bounds the consensus distance by
6 M^2 / (rho c)^2 root (9), squared gradient norms at midpoints by 3 root and, in Corollary II, those at the clients' models by 4 root.
F_0 is the mean over a cluster's pairs of f_ij(z_0) - f_ij*, where f_ij = (f_i + f_j) / 2.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from coterie.theory.experiment import Claim, Curve, Experiment, Panel, Table

Array = npt.NDArray[np.float64]
PAPER = "Hashemi, He and Jaggi, CoBo: Collaborative Learning via Bilevel Optimization"
ROUNDING = 1e-12
HORIZONS = tuple(125 * 2**k for k in range(6))  # T
SIZE = 3  # c of the runs with noise
SEEDS = 12  # runs that an expectation is a mean of
SIGMA = 1.0  # sigma of (A2)


@dataclass(frozen=True)
class Clusters:
    """Example 2: f_i(x) = a_i / 2 ||x - mu_i||^2, where clients of one cluster have the same mu_i. Leading axes are separate federations.

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
        """<grad f_i(z_ij), grad f_j(z_ij)>, which the inner problem maximises over w_ij, [..., n, n]."""
        return _agreement(self.midpoint_gradients(X))

    def sharpness(self, rho: float) -> float:
        """The largest eigenvalue of the outer problem's Hessian under W*: without noise, X converges for eta below 2 over it."""
        penalty = np.diag(self.oracle.sum(-1)) - self.oracle
        return float(np.linalg.eigvalsh(np.diag(self.a) + rho * penalty)[-1])


@dataclass(frozen=True)
class CoBo:
    """The iteration of Algorithm 1 with all pairs in every round. Parameters may be arrays that broadcast over leading axes.

    Args:
        eta: Step size of the models.
        rho: Penalty on distances.
        gamma: Step size of the weights.
        sigma: Of (A2): E ||g_i - grad f_i||^2 = sigma^2.
        batch: Size b of a mini-batch for the weights, whose gradients have a variance of sigma^2 / b. Infinite: exact gradients.
    """

    eta: float | Array
    rho: float | Array
    gamma: float
    sigma: float = 0.0
    batch: float | Array = np.inf

    def round(self, f: Clusters, X: Array, W: Array, rng: np.random.Generator | None = None) -> tuple[Array, Array]:
        """X and W after a round: the weights first, then the models, from gradients at X.

        Args:
            f: The clients.
            X: [..., n, d].
            W: [..., n, n], symmetric, 0 on the diagonal.
            rng: Of the noise; without it there is none.
        """
        n, d = X.shape[-2:]
        at_midpoints, own = f.midpoint_gradients(X), f.gradients(X)
        if rng is not None:
            spread = self.sigma / np.sqrt(np.asarray(self.batch) * d)
            at_midpoints = at_midpoints + spread[..., None, None, None] * rng.standard_normal(at_midpoints.shape)
            own = own + self.sigma / np.sqrt(d) * rng.standard_normal(own.shape)
        W = np.clip(W + self.gamma * _agreement(at_midpoints), 0, 1) * (1 - np.eye(n))
        pull = X * W.sum(-1, keepdims=True) - W @ X
        eta, rho = (np.asarray(value)[..., None, None] for value in (self.eta, self.rho))
        return X - eta * (own + rho * pull), W

    def run(
        self, f: Clusters, start: Array, rounds: int, rng: np.random.Generator | None = None, weights: Array | None = None
    ) -> Iterator[tuple[Array, Array]]:
        """(X, W) at the start and after every round. Without `weights` all pairs start with w = 1, as in Algorithm 1."""
        X, n = start, start.shape[-2]
        W = np.broadcast_to(1 - np.eye(n), (*start.shape[:-2], n, n)) if weights is None else weights
        yield X, W
        for _ in range(rounds):
            X, W = self.round(f, X, W, rng)
            yield X, W


def _agreement(at_midpoints: Array) -> Array:
    return np.asarray((at_midpoints * np.swapaxes(at_midpoints, -2, -3)).sum(-1))


def polygon(clusters: int, size: int) -> Clusters:
    """Centres at the corners of a regular polygon with radius 1, a_i = 1."""
    angles = 2 * np.pi * np.arange(clusters) / clusters
    return Clusters(np.ones(clusters * size), np.repeat(np.column_stack([np.cos(angles), np.sin(angles)]), size, 0))


def surrounding(rng: np.random.Generator, clusters: int, size: int) -> Clusters:
    """Centres that see the origin under obtuse angles, pair by pair: <mu_k, mu_l> < 0. a_i between 0.7 and 1."""
    simplex = np.eye(clusters) - 1 / clusters
    while True:
        mu = simplex * rng.uniform(0.5, 2, (clusters, 1)) + 0.1 * rng.standard_normal((clusters, clusters))
        if ((mu @ mu.T)[~np.eye(clusters, dtype=bool)] < 0).all():
            return Clusters(rng.uniform(0.7, 1, clusters * size), np.repeat(mu, size, 0))


def safe_step(f: Clusters, rho: float) -> float:
    """1 / (L + rho n): every new model is a mean of models and centres, whatever the weights."""
    return float(1 / (f.a.max() + rho * len(f.a)))


def convergence(seed: int) -> Experiment:
    """Theorem I with Example 2: its assumptions, the recovery of W*, its bounds and the limits of its step size."""
    rng = np.random.default_rng(seed)
    found, recovery_panel = _recovery(rng)
    runs = [run for horizon in HORIZONS for run in measure(SETTINGS, horizon, rng)]
    exact, noisy = ([run for run in runs if np.isinf(run.setting.batch) == kind] for kind in (True, False))
    return Experiment(
        title="Clients find their cluster and agree within it",
        source=f"{PAPER}, Theorem I and Corollary II with the constants of their proofs, and Example 2",
        claims=(*_assumption_claims(rng), *found, *_theorem_claims(exact), *_noise_claims(exact, noisy), *_step_claims(rng)),
        table=Table(
            (f"$M$, $T = {HORIZONS[-1]}$", "distance", "(9)", "amended", "pairs / root", "clients / root", "$|w - w*|$"),
            tuple(
                (
                    run.setting.name,
                    run.consensus,
                    run.printed,
                    run.amended[0] if run in exact else "-",
                    run.midpoints / run.root,
                    run.clients / run.root,
                    run.wrong,
                )
                for run in runs
                if run.horizon == HORIZONS[-1]
            ),
        ),
        panels=(recovery_panel, *_bound_panels(runs)),
    )


def _assumption_claims(rng: np.random.Generator) -> Iterator[Claim]:
    """(A4) in Example 2 for random pairs, at random points."""
    count, d = 2000, 4
    a, centre = 10 ** rng.uniform(-1, 1, (count, 2)), rng.standard_normal((count, 1, d))
    pair = Clusters(a, np.repeat(centre, 2, 1))
    x = centre + 10 ** rng.uniform(-2, 2, (count, 1, 1)) * rng.standard_normal((count, 1, d))
    M = np.abs(a[:, 0] - a[:, 1]) / a.sum(1)
    one, two, agreement = _at(pair, x)
    gap = float(np.abs(_square(one - two) / _square(one + two) / M**2 - 1).max())
    yield Claim(
        "Within a cluster (5) holds with $M_ij = |a_i - a_j| / (a_i + a_j)$, exactly", gap <= 1e-9, f"largest relative deviation {gap:.0e}"
    )
    least = (1 - M**2) / (2 * (1 + M**2)) * (_square(one) + _square(two))
    worst = float((least / agreement).max())
    yield Claim(
        "Case 1 of the proof: $<g_i, g_j> >= (1 - M^2) / (2 (1 + M^2)) (||g_i||^2 + ||g_j||^2)$ within a cluster, so that $w$ stays 1",
        worst <= 1 + 1e-9 and bool((agreement > 0).all()),
        f"attained in Example 2: largest right / left side {worst:.6f}",
    )
    centres = rng.standard_normal((count, 2, d))
    yield from _separation_claims(Clusters(a, centres), rng)


def _separation_claims(pair: Clusters, rng: np.random.Generator) -> Iterator[Claim]:
    """(6) and Theorem I's condition for pairs of clients of two clusters, a [count, 2] and mu [count, 2, d]."""
    a, count = pair.a, len(pair.a)
    middle, reach = pair.mu.mean(1, keepdims=True), np.linalg.norm(pair.mu[:, 0] - pair.mu[:, 1], axis=-1) / 2
    direction = rng.standard_normal(middle.shape)
    away = 10 ** rng.uniform(-1, 1, count) * reach
    x = middle + away[:, None, None] * direction / np.linalg.norm(direction, axis=-1, keepdims=True)
    lowest = (a**2).prod(1) / (a**2).sum(1) * 4 * reach**2
    printed = lowest / (a**2).sum(1)
    best = ((a**2)[:, :, None] * pair.mu).sum(1, keepdims=True) / (a**2).sum(1)[:, None, None]
    one, two, agreement = _at(pair, x)
    elsewhere = float(((_square(one) + _square(two)) / lowest).min())
    least = sum(_square(gradient) for gradient in _at(pair, best)[:2])
    attained = float(np.abs(least / lowest - 1).max())
    yield Claim(
        "Between clusters $||grad f_i||^2 + ||grad f_j||^2$ has a positive lower bound (6)",
        elsewhere >= 1 and attained <= 1e-9,
        f"$a_i^2 a_j^2 / (a_i^2 + a_j^2) ||mu_k - mu_l||^2$, attained; at random points at least {elsewhere:.3f} of it",
    )
    below = least < printed
    yield Claim(
        "Example 2 prints that bound with $(a_i^2 + a_j^2)^2$ below the line, which is too high where $a_i^2 + a_j^2 < 1$",
        bool(below.any() and (below == ((a**2).sum(1) < 1)).all()),
        f"$a_i = a_j = 1/2$: $1/4 ||mu_k - mu_l||^2$, the minimum is 1/8; too high for {below.sum()} of {count} random pairs",
        beside=True,
    )
    inside, disagree = away < reach, agreement < 0
    condition = _square(one + two) <= lowest
    yield Claim(
        "Theorem I wants $zeta^2 >= ||grad f_i + grad f_k||^2$ at every $x$; Example 2 has no such clusters. Two of "
        "them disagree just inside "
        "the ball whose diameter joins their centres",
        bool((disagree == inside).all() and disagree[condition].all() and condition.any() and not condition.all()),
        f"{count} random points: {inside.sum()} inside, the same {disagree.sum()} disagree, {condition.sum()} meet the condition",
        beside=True,
    )


def _at(pair: Clusters, x: Array) -> tuple[Array, Array, Array]:
    """Both gradients, [count, d], and their inner product, at points x, [count, 1, d], that both clients share."""
    X = np.repeat(x, 2, 1)
    gradients = pair.gradients(X)
    return gradients[:, 0], gradients[:, 1], pair.agreement(X)[:, 0, 1]


def _square(v: Array) -> Array:
    """Squared norms along the last axis."""
    return np.asarray((v**2).sum(-1))


@dataclass(frozen=True)
class Search:
    """The weights of a noise-free run from a start common to all clients, rho c = sqrt 3 L and a step size that is safe for any weights."""

    f: Clusters
    method: CoBo
    X: Array  # at the end
    W: Array
    wrong: list[float]  # mean |w_ij - w*_ij| over pairs, at the start and after every round

    @property
    def found(self) -> int | None:
        """The first round from which on W = W*; None: it is not at the end."""
        last = max((k for k, error in enumerate(self.wrong) if error > 0), default=-1)
        return None if self.wrong[-1] > 0 else last + 1

    @property
    def held(self) -> int:
        """Rounds before the first weight changes."""
        return next((k for k, error in enumerate(self.wrong) if error != self.wrong[0]), len(self.wrong)) - 1


def search(f: Clusters, size: int, gamma: float, start: Array, rounds: int = 400) -> Search:
    """From x_i = start, [d], for clusters of `size` clients."""
    rho = np.sqrt(3) * f.a.max() / size
    method, n = CoBo(safe_step(f, rho), rho, gamma), len(f.a)
    states = list(method.run(f, np.tile(start, (n, 1)), rounds))
    return Search(f, method, *states[-1], [float(np.abs(W - f.oracle).sum() / (n * (n - 1))) for _, W in states])


def _recovery(rng: np.random.Generator) -> tuple[list[Claim], Panel]:
    """Whether and when W* is found without noise."""
    near, at_once, far = [], [], []
    for k in range(16):
        clusters, size = 2 + k % 4, 2 + k % 2
        f, origin = surrounding(rng, clusters, size), np.zeros(clusters)
        near.append(search(f, size, 0.1, origin))
        agreement = f.agreement(np.tile(origin, (len(f.a), 1)))
        at_once.append(search(f, size, -(1 + ROUNDING) / agreement[agreement < 0].max(), origin))
        direction = rng.standard_normal(2)
        far.append(search(surrounding(rng, 2, size), size, 0.1, 100 * direction / np.linalg.norm(direction)))
    stuck = [search(polygon(6, 2), 2, 0.1, start * rng.standard_normal(2)) for start in (0.1, 10.0)]
    claims = [
        Claim(
            "Without noise, $W*$ is found exactly after finitely many rounds, and stays",
            all(run.found for run in near),
            f"{len(near)} federations, 2 to 5 clusters around the start, $gamma = 0.1$: in "
            f"{_span(run.found for run in near)} of 400 rounds",
        ),
        Claim(
            "It must be if all start at an $x_0$ with $<x_0 - mu_k, x_0 - mu_l> < 0$ for any two centres, $gamma$ "
            "takes those $w$ to 0 at once, "
            "and $eta (a_i + rho c) <= 1$: models stay between $x_0$ and their centre, and their midpoints stay inside the ball",
            all(run.found == 1 for run in at_once),
            f"{len(at_once)} federations with the smallest such $gamma$: $W*$ from round {_span(run.found for run in at_once)} on",
            beside=True,
        ),
        Claim(
            "Point A of figure 1: from far away all clients collaborate at first; two clusters still find $W*$",
            all(run.found and run.held > 1 for run in far),
            f"{len(far)} starts at a distance of 100: every $w = 1$ for {_span(run.held for run in far)} rounds, $W*$ after "
            f"{_span(run.found for run in far)}",
            beside=True,
        ),
        _hexagon_claim(stuck),
    ]
    curves = (
        Curve("start amid 5 clusters", near[3].wrong[:100], 0),
        Curve("2 clusters, start 100 away (point A)", far[0].wrong[:100], 1),
        Curve("6 clusters on a hexagon", stuck[1].wrong[:100], 2),
    )
    return claims, Panel("Weights, without noise", "round $t$", "mean $|w_ij - w*_ij|$", curves, log=False)


def _hexagon_claim(runs: list[Search]) -> Claim:
    """Neighbours at an angle of 60 degrees stay connected: at x_i = mu_i / (1 + rho c) their midpoints are outside of their ball."""
    rho_c = np.sqrt(3)
    linked = [(run.W > 0) & (run.f.oracle == 0) for run in runs]
    agreement = [run.f.agreement(run.X)[links] for run, links in zip(runs, linked, strict=True)]
    moved = max(float(np.abs(run.method.round(run.f, run.X, run.W)[0] - run.X).max()) for run in runs)
    away = max(float(np.abs(run.X - run.f.mu / (1 + rho_c)).max()) for run in runs)
    least = min(float(products.min(initial=np.inf)) for products in agreement)
    return Claim(
        "With more clusters $W*$ may never be found: on a regular hexagon neighbours hold each other outside of their ball for good",
        all(links.sum() == 12 * 4 and (run.W[links] == 1).all() for run, links in zip(runs, linked, strict=True))
        and max(moved, away) <= 1e-9
        and least > 0.01,
        "$rho c = sqrt 3 L$ as the theorem asks for, 6 x 2 clients, $a_i = 1$: from near and far to the fixed point "
        "$x_i = mu_i / (1 + rho c)$, "
        f"where neighbours' $<g_i, g_k> = {least:.3f} > 0$ and $||grad f_i(x_i)|| = {rho_c / (1 + rho_c):.3f} ||mu_i||$",
        beside=True,
    )


def _span(values: Iterable[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    return " to ".join(str(value) for value in dict.fromkeys((known[0], known[-1]))) if known else "none"


@dataclass(frozen=True)
class Setting:
    """Two clusters of three clients, centres (1, 0) and (-1, 0), common start 0, L = 1; a_i evenly between (1 - M) / (1 + M) and 1.

    Args:
        M: The largest M_ij.
        penalty: rho c / (sqrt 3 L), at least 1.
        batch: b.
    """

    M: float
    penalty: float = 1.0
    batch: float = np.inf

    @property
    def name(self) -> str:
        penalty = "" if self.penalty == 1 else f", {self.penalty:g} $rho$"
        return f"{self.M:g}{penalty}" + ("" if np.isinf(self.batch) else f", $b = {self.batch:g}$")

    @property
    def a(self) -> Array:
        return np.tile(np.linspace(1, (1 - self.M) / (1 + self.M), SIZE), 2)

    @property
    def rho_c(self) -> float:
        return float(self.penalty * np.sqrt(3))

    @property
    def start_gap(self) -> float:
        """F_0, with f_ij* = 0."""
        return float(self.a.mean() / 2)

    def eta(self, horizon: int) -> float:
        """The step size of Theorem I for T = horizon."""
        return float(min(2 / SIGMA * np.sqrt(self.start_gap / horizon), 1 / (2 * self.rho_c)))


SETTINGS = (
    Setting(0.0),
    Setting(0.1),
    Setting(0.19),
    Setting(0.1, penalty=2),
    Setting(0.1, batch=1),
    Setting(0.1, batch=16),
    Setting(0.1, batch=256),
)


@dataclass(frozen=True)
class Run:
    """What was measured of a setting over T rounds: means over t, clients or their pairs, clusters and seeds."""

    setting: Setting
    horizon: int
    consensus: float  # of ||x_i - x_j||^2 after the rounds, the left side of (9)
    midpoints: float  # of ||grad f_ij(z_ij)||^2 before them
    clients: float  # of ||grad f_i(x_i)||^2
    wrong: float  # of |w_ij - w*_ij|

    @property
    def root(self) -> float:
        return float(np.sqrt(SIGMA**2 * self.setting.start_gap / self.horizon))

    @property
    def printed(self) -> float:
        """The right side of (9)."""
        return 6 * self.setting.M**2 / self.setting.rho_c**2 * self.root

    @property
    def amended(self) -> tuple[float, float]:
        """Bounds for W = W* and M < 1/4 on the consensus distance and on the gradient norms at midpoints that keep the noise of g_i - g_j.

        Let D_t, G_t and F_t be the means over the cluster's pairs of E ||x_i - x_j||^2, E ||grad f_ij(z_ij)||^2 and E f_ij(z_ij) - f_ij* at
        round t, rho c >= sqrt 3 L and eta rho c <= 1/2. As in Lemma 4, and then as in Lemma 3,
            D_t+1 <= (1 - eta rho c / 2) D_t + 12 M^2 eta / (rho c) G_t + 2 eta^2 sigma^2 (1 - 1/c),
            G_t <= 2 / eta (F_t - F_t+1) + 2/3 (rho c)^2 D_t + L eta sigma^2 (1 + 1/c) / 2.
        The bounds are the means of both over t, from D_0 = 0.
        """
        M, rho_c, c, noise = self.setting.M, self.setting.rho_c, SIZE, self.setting.eta(self.horizon) * SIGMA**2
        descent = 2 * self.setting.start_gap / (self.setting.eta(self.horizon) * self.horizon) + noise * (1 + 1 / c) / 2
        midpoints = (descent + 8 / 3 * rho_c * noise * (1 - 1 / c)) / (1 - 16 * M**2)
        return 24 * M**2 / rho_c**2 * midpoints + 4 * noise / rho_c * (1 - 1 / c), midpoints


def measure(settings: tuple[Setting, ...], horizon: int, rng: np.random.Generator, sigma: float = SIGMA, seeds: int = SEEDS) -> list[Run]:
    """Each setting over `horizon` rounds, with the step size that Theorem I gives for sigma = SIGMA."""

    def each(value: Callable[[Setting], float]) -> Array:
        return np.repeat([value(setting) for setting in settings], seeds)

    a = np.repeat([setting.a for setting in settings], seeds, 0)  # [settings x seeds, n]
    f = Clusters(a, np.repeat([[1.0, 0.0], [-1.0, 0.0]], SIZE, 0))
    # This gamma takes the weights between the clusters to 0 at once: their gradients' product at the start is at most -a_min^2.
    gamma = (1 + ROUNDING) / float(a.min()) ** 2
    method = CoBo(each(lambda s: s.eta(horizon)), each(lambda s: s.rho_c / SIZE), gamma, sigma, each(lambda s: s.batch))
    totals = np.zeros((4, len(a)))
    states = method.run(f, np.zeros((*a.shape, 2)), horizon, rng)
    X, _ = next(states)
    n = a.shape[-1]
    pairs, others = (f.oracle + np.eye(n)) / (n * SIZE), n * (n - 1)
    for following, W in states:
        joint = f.midpoint_gradients(X)
        joint = (joint + np.swapaxes(joint, -2, -3)) / 2
        distance = _square(following[..., :, None, :] - following[..., None, :, :])
        totals += [
            (distance * pairs).sum((-1, -2)),
            (_square(joint) * pairs).sum((-1, -2)),
            _square(f.gradients(X)).mean(-1),
            np.abs(W - f.oracle).sum((-1, -2)) / others,
        ]
        X = following
    means = totals.reshape(4, len(settings), seeds).mean(-1) / horizon
    return [Run(setting, horizon, *map(float, means[:, k])) for k, setting in enumerate(settings)]


def _slope(runs: list[Run], value: Callable[[Run], float]) -> float:
    """Of log value against log T, by least squares."""
    return float(np.polyfit(np.log([run.horizon for run in runs]), np.log([value(run) for run in runs]), 1)[0])


def _theorem_claims(runs: list[Run]) -> Iterator[Claim]:
    """What Theorem I and Corollary II say about expectations, with exact gradients in the selection."""
    kinds = [[run for run in runs if run.setting == setting] for setting in dict.fromkeys(run.setting for run in runs)]
    falls = [_slope(kind, lambda run: run.midpoints) for kind in kinds]
    midpoints, clients = max(run.midpoints / run.root for run in runs), max(run.clients / run.root for run in runs)
    yield Claim(
        "The mean of $||grad f_ij(z_ij)||^2$ over rounds and a cluster's pairs is at most $3 sqrt(L sigma^2 F_0 / T)$",
        midpoints <= 3 and max(falls) <= -0.45 and all(run.wrong == 0 for run in runs),
        f"{len(kinds)} settings, $T$ = {HORIZONS[0]} to {HORIZONS[-1]}, {SEEDS} seeds: at most {midpoints:.2f} roots; it falls like "
        f"$T^{min(falls):.2f}$ to $T^{max(falls):.2f}$",
    )
    yield Claim(
        "Corollary II: that of $||grad f_i(x_i)||^2$ is at most $4 sqrt(L sigma^2 F_0 / T)$", clients <= 4, f"at most {clients:.2f} roots"
    )
    falls = [_slope(kind, lambda run: run.consensus) for kind in kinds]
    yield Claim(
        "The consensus distance converges to 0 like $T^-1/2$", max(falls) <= -0.45, f"like $T^{min(falls):.2f}$ to $T^{max(falls):.2f}$"
    )
    compared = (Setting(0.1), Setting(0.01), Setting(0.1, penalty=4))
    base, smaller, larger = (run.consensus for run in measure(compared, 1000, np.random.default_rng(0), sigma=0.0, seeds=1))
    yield Claim(
        "A larger $rho$ and a smaller $M$ lead to less consensus distance, where there is no noise",
        smaller / base <= 0.02 and larger / base <= 0.25,
        f"$M / 10$: a factor of {smaller / base:.2g}; $4 rho$: {larger / base:.2g}",
    )


def _noise_claims(exact: list[Run], noisy: list[Run]) -> Iterator[Claim]:
    """What noise does to (9) and to the weights."""
    last = {run.setting: run for run in exact + noisy if run.horizon == HORIZONS[-1]}
    equal, base, spread, high = (last[setting] for setting in SETTINGS[:4])
    yield Claim(
        "(9) fails with noise: it loses the variance of $g_i - g_j$, which has no $M$ in it. Equal $a_i$ do not make models equal",
        equal.printed == 0 < equal.consensus and min(run.consensus / run.printed for run in (base, spread)) > 4,
        f"$T = {HORIZONS[-1]}$: "
        + ", ".join(f"$M = {run.setting.M:g}$: {run.consensus:.2g} against {run.printed:.2g}" for run in (equal, base, spread))
        + f"; twice the $rho$ divides it by {base.consensus / high.consensus:.2f}, not by 4",
        beside=True,
    )
    closest = max(max(run.consensus / run.amended[0], run.midpoints / run.amended[1]) for run in exact)
    yield Claim(
        "With $4 eta sigma^2 (1 - 1/c) / (rho c)$ for that noise the proof's bounds hold, and the rate stays $T^-1/2$",
        closest <= 1,
        f"largest measured / bound {closest:.2f} in {len(exact)} cases",
        beside=True,
    )
    single = [run for run in noisy if run.setting.batch == 1]
    wrong = [last[setting].wrong for setting in dict.fromkeys(run.setting for run in noisy)]
    yield Claim(
        "With $b$ fixed in the selection weights do not settle and gradients need not vanish: $b$ must grow, while "
        "the theorem's condition on "
        "it, $b$ of order $L eta sigma^2$, weakens with $T$",
        single[-1].midpoints > 3 * single[-1].root
        and _slope(single, lambda run: run.midpoints) > -0.2
        and wrong == sorted(wrong, reverse=True)
        and wrong[-1] > 0,
        f"$T = {HORIZONS[-1]}$: "
        + "; ".join(
            f"$b = {run.setting.batch:g}$: mean $|w - w*|$ {run.wrong:.2g}, {run.midpoints / run.root:.2g} roots"
            for run in last.values()
            if run.setting.batch < np.inf
        ),
        beside=True,
    )


def _bound_panels(runs: list[Run]) -> tuple[Panel, Panel, Panel]:
    axis = f"$k$, with $T = {HORIZONS[0]} · 2^k$ rounds"
    equal, base, _, high, single, several, _ = ([run for run in runs if run.setting == setting] for setting in SETTINGS)
    consensus = (
        Curve("$M = 0.1$", [run.consensus for run in base], 0),
        Curve("$M = 0.1$, twice the $rho$", [run.consensus for run in high], 1),
        Curve("$M = 0$", [run.consensus for run in equal], 2),
        Curve("(9), $M = 0.1$", [run.printed for run in base], 3, dashed=True),
        Curve("amended, $M = 0.1$", [run.amended[0] for run in base], 0, dashed=True),
    )
    gradients = (
        Curve("$||grad f_ij(z_ij)||^2$", [run.midpoints for run in base], 0),
        Curve("$||grad f_i(x_i)||^2$", [run.clients for run in base], 1),
        Curve("bound, $3 sqrt(L sigma^2 F_0 / T)$", [3 * run.root for run in base], 0, dashed=True),
        Curve("bound, $4 sqrt(L sigma^2 F_0 / T)$", [4 * run.root for run in base], 1, dashed=True),
    )
    noisy = (
        Curve("exact", [run.midpoints for run in base], 0),
        Curve("$b = 16$", [run.midpoints for run in several], 1),
        Curve("$b = 1$", [run.midpoints for run in single], 2),
        Curve("bound, $3 sqrt(L sigma^2 F_0 / T)$", [3 * run.root for run in base], 0, dashed=True),
    )
    return (
        Panel("Consensus distance", axis, "mean $||x_i - x_j||^2$", consensus),
        Panel("Gradients, $M = 0.1$", axis, "mean squared norm", gradients),
        Panel("Noise in the selection", axis, "mean $||grad f_ij(z_ij)||^2$", noisy),
    )


def _growth(f: Clusters, method: CoBo, start: Array, rounds: int, weights: Array | None = None) -> float:
    """The factor by which the distance from all clients' optima changes, without noise."""
    *_, (X, _) = method.run(f, start, rounds, weights=weights)
    return float(np.linalg.norm(X - f.mu) / np.linalg.norm(start - f.mu))


def _step_claims(rng: np.random.Generator) -> Iterator[Claim]:
    """How large eta may be."""
    rho = np.sqrt(3) / 4
    one, start = Clusters(np.linspace(1, 0.7, 4), np.zeros((4, 3))), rng.standard_normal((4, 3))
    limit = 2 / one.sharpness(rho)
    below, above = (_growth(one, CoBo(share * limit, rho, 1.0), start, 2000) for share in (0.99, 1.01))
    penalty_only = _growth(one, CoBo(0.99 * 2 / (rho * 4), rho, 1.0), start, 50)
    yield Claim(
        "The models converge for $eta lambda_max(diag(a) + rho (diag(W 1) - W)) < 2$, and diverge just above",
        below < 1e-6 and min(above, penalty_only) > 1e6,
        f"a cluster of four: the error changes by {below:.0e} in 2000 rounds at 0.99 of it, by {above:.0e} at 1.01. Without $diag(a)$, "
        f"0.99 is too much where $rho c = sqrt 3 L$: {penalty_only:.0e} in 50 rounds",
        beside=True,
    )
    f, rho, start = Clusters(np.tile([1, 0.8], 6), np.repeat(np.eye(6), 2, 0)), np.sqrt(3) / 2, np.full((12, 6), 1 / 6)
    allowed = CoBo(1 / (2 * rho * 2), rho, 0.05)
    ones, oracle = _growth(f, allowed, start, 200), _growth(f, allowed, start, 200, weights=f.oracle)
    safe = _growth(f, replace(allowed, eta=safe_step(f, rho)), start, 1000)
    yield Claim(
        "The proof's largest $eta$, $1 / (2 rho c)$, suits $W*$; but with $w = 1$, as at the start, $eta rho n = K / "
        "2 > 2$ for $K > 4$ equal clusters",
        ones > 1e6 and max(oracle, safe) < 1e-6,
        f"six clusters of two, $gamma = 0.05$: the error changes by {ones:.0e} in 200 rounds, from $W*$ by {oracle:.0e}; with "
        f"$eta = 1 / (L + rho n)$, from $w = 1$, by {safe:.0e} in 1000",
        beside=True,
    )
