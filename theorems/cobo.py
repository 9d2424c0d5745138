"""CoBo on quadratics in clusters, run: Theorem I, Corollary II and Example 2 of "CoBo:
Collaborative Learning via Bilevel Optimization".

The constants are those that the proofs in appendix A give. Theorem I has rho c >= sqrt 3 L, M_ij <
1/5 and a step size of min(2 sqrt(F_0 / (L sigma^2 T)), 1 / (2 rho c)). With root = sqrt(L sigma^2
F_0 / T) it bounds the consensus distance by 6 M^2 / (rho c)^2 root (9), squared gradient norms at
midpoints by 3 root and, in Corollary II, those at the clients' models by 4 root. F_0 is the mean
over a cluster's pairs of f_ij(z_0) - f_ij*, where f_ij = (f_i + f_j) / 2.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from theorems.cobo_problem import Array, Clusters, CoBo, _at, _square, safe_step
from theorems.cobo_runs import (
    HORIZONS,
    SEEDS,
    SETTINGS,
    Run,
    Setting,
    measure,
)
from theorems.cobo_search import _recovery
from theorems.experiment import Claim, Curve, Experiment, Panel, Table

PAPER = "Hashemi, He and Jaggi, CoBo: Collaborative Learning via Bilevel Optimization"


def convergence(seed: int) -> Experiment:
    """Theorem I with Example 2: its assumptions, the recovery of W*, its bounds and the limits
    of its step size.
    """
    rng = np.random.default_rng(seed)
    recovered, recovery_panel = _recovery(rng)
    runs = [run for horizon in HORIZONS for run in measure(SETTINGS, horizon, rng)]
    exact, noisy = (
        [run for run in runs if np.isinf(run.setting.batch) == kind] for kind in (True, False)
    )
    return Experiment(
        title="Clients find their cluster and agree within it",
        source=f"{PAPER}, Theorem I and Corollary II with the constants of their proofs, and "
        f"Example 2",
        claims=(
            *_assumption_claims(rng),
            *recovered,
            *_theorem_claims(exact),
            *_noise_claims(exact, noisy),
            *_step_claims(rng),
        ),
        table=Table(
            (
                f"$M$, $T = {HORIZONS[-1]}$",
                "distance",
                "(9)",
                "amended",
                "pairs / root",
                "clients / root",
                "$|w - w*|$",
            ),
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
        "Within a cluster (5) holds with $M_ij = |a_i - a_j| / (a_i + a_j)$, exactly",
        gap <= 1e-9,
        f"largest relative deviation {gap:.0e}",
    )
    least = (1 - M**2) / (2 * (1 + M**2)) * (_square(one) + _square(two))
    worst = float((least / agreement).max())
    yield Claim(
        "Case 1 of the proof: $<g_i, g_j> >= (1 - M^2) / (2 (1 + M^2)) (||g_i||^2 + ||g_j||^2)$ "
        "within a cluster, so that $w$ stays 1",
        worst <= 1 + 1e-9 and bool((agreement > 0).all()),
        f"attained in Example 2: largest right / left side {worst:.6f}",
    )
    centres = rng.standard_normal((count, 2, d))
    yield from _separation_claims(Clusters(a, centres), rng)


def _separation_claims(pair: Clusters, rng: np.random.Generator) -> Iterator[Claim]:
    """(6) and Theorem I's condition for pairs of clients of two clusters, a [count, 2] and mu
    [count, 2, d].
    """
    a, count = pair.a, len(pair.a)
    middle, reach = (
        pair.mu.mean(1, keepdims=True),
        np.linalg.norm(pair.mu[:, 0] - pair.mu[:, 1], axis=-1) / 2,
    )
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
        f"$a_i^2 a_j^2 / (a_i^2 + a_j^2) ||mu_k - mu_l||^2$, attained; at random points at least "
        f"{elsewhere:.3f} of it",
    )
    below = least < printed
    yield Claim(
        "Example 2 prints that bound with $(a_i^2 + a_j^2)^2$ below the line, which is too high "
        "where $a_i^2 + a_j^2 < 1$",
        bool(below.any() and (below == ((a**2).sum(1) < 1)).all()),
        f"$a_i = a_j = 1/2$: $1/4 ||mu_k - mu_l||^2$, the minimum is 1/8; too high for "
        f"{below.sum()} of {count} random pairs",
        beside=True,
    )
    inside, disagree = away < reach, agreement < 0
    condition = _square(one + two) <= lowest
    yield Claim(
        "Theorem I wants $zeta^2 >= ||grad f_i + grad f_k||^2$ at every $x$; Example 2 has no "
        "such clusters. Two of "
        "them disagree just inside "
        "the ball whose diameter joins their centres",
        bool(
            (disagree == inside).all()
            and disagree[condition].all()
            and condition.any()
            and not condition.all()
        ),
        f"{count} random points: {inside.sum()} inside, the same {disagree.sum()} disagree, "
        f"{condition.sum()} meet the condition",
        beside=True,
    )


def _slope(runs: list[Run], value: Callable[[Run], float]) -> float:
    """Of log value against log T, by least squares."""
    return float(
        np.polyfit(np.log([run.horizon for run in runs]), np.log([value(run) for run in runs]), 1)[
            0
        ]
    )


def _theorem_claims(runs: list[Run]) -> Iterator[Claim]:
    """Return what Theorem I and Corollary II say about expectations, with exact gradients in the
    selection.
    """
    kinds = [
        [run for run in runs if run.setting == setting]
        for setting in dict.fromkeys(run.setting for run in runs)
    ]
    falls = [_slope(kind, lambda run: run.midpoints) for kind in kinds]
    midpoints, clients = (
        max(run.midpoints / run.root for run in runs),
        max(run.clients / run.root for run in runs),
    )
    yield Claim(
        "The mean of $||grad f_ij(z_ij)||^2$ over rounds and a cluster's pairs is at most $3 "
        "sqrt(L sigma^2 F_0 / T)$",
        midpoints <= 3 and max(falls) <= -0.45 and all(run.wrong == 0 for run in runs),
        f"{len(kinds)} settings, $T$ = {HORIZONS[0]} to {HORIZONS[-1]}, {SEEDS} seeds: at most "
        f"{midpoints:.2f} roots; it falls like "
        f"$T^{min(falls):.2f}$ to $T^{max(falls):.2f}$",
    )
    yield Claim(
        "Corollary II: that of $||grad f_i(x_i)||^2$ is at most $4 sqrt(L sigma^2 F_0 / T)$",
        clients <= 4,
        f"at most {clients:.2f} roots",
    )
    falls = [_slope(kind, lambda run: run.consensus) for kind in kinds]
    yield Claim(
        "The consensus distance converges to 0 like $T^-1/2$",
        max(falls) <= -0.45,
        f"like $T^{min(falls):.2f}$ to $T^{max(falls):.2f}$",
    )
    compared = (Setting(0.1), Setting(0.01), Setting(0.1, penalty=4))
    base, smaller, larger = (
        run.consensus
        for run in measure(compared, 1000, np.random.default_rng(0), sigma=0.0, seeds=1)
    )
    yield Claim(
        "A larger $rho$ and a smaller $M$ lead to less consensus distance, where there is no noise",
        smaller / base <= 0.02 and larger / base <= 0.25,
        f"$M / 10$: a factor of {smaller / base:.2g}; $4 rho$: {larger / base:.2g}",
    )


def _noise_claims(exact: list[Run], noisy: list[Run]) -> Iterator[Claim]:
    """Return what noise does to (9) and to the weights."""
    last = {run.setting: run for run in exact + noisy if run.horizon == HORIZONS[-1]}
    equal, base, spread, high = (last[setting] for setting in SETTINGS[:4])
    yield Claim(
        "(9) fails with noise: it loses the variance of $g_i - g_j$, which has no $M$ in it. "
        "Equal $a_i$ do not make models equal",
        equal.printed == 0 < equal.consensus
        and min(run.consensus / run.printed for run in (base, spread)) > 4,
        f"$T = {HORIZONS[-1]}$: "
        + ", ".join(
            f"$M = {run.setting.M:g}$: {run.consensus:.2g} against {run.printed:.2g}"
            for run in (equal, base, spread)
        )
        + f"; twice the $rho$ divides it by {base.consensus / high.consensus:.2f}, not by 4",
        beside=True,
    )
    closest = max(
        max(run.consensus / run.amended[0], run.midpoints / run.amended[1]) for run in exact
    )
    yield Claim(
        "With $4 eta sigma^2 (1 - 1/c) / (rho c)$ for that noise the proof's bounds hold, and "
        "the rate stays $T^-1/2$",
        closest <= 1,
        f"largest measured / bound {closest:.2f} in {len(exact)} cases",
        beside=True,
    )
    single = [run for run in noisy if run.setting.batch == 1]
    wrong = [last[setting].wrong for setting in dict.fromkeys(run.setting for run in noisy)]
    yield Claim(
        "With $b$ fixed in the selection weights do not settle and gradients need not vanish: "
        "$b$ must grow, while "
        "the theorem's condition on "
        "it, $b$ of order $L eta sigma^2$, weakens with $T$",
        single[-1].midpoints > 3 * single[-1].root
        and _slope(single, lambda run: run.midpoints) > -0.2
        and wrong == sorted(wrong, reverse=True)
        and wrong[-1] > 0,
        f"$T = {HORIZONS[-1]}$: "
        + "; ".join(
            f"$b = {run.setting.batch:g}$: mean $|w - w*|$ {run.wrong:.2g}, "
            f"{run.midpoints / run.root:.2g} roots"
            for run in last.values()
            if run.setting.batch < np.inf
        ),
        beside=True,
    )


def _bound_panels(runs: list[Run]) -> tuple[Panel, Panel, Panel]:
    axis = f"$k$, with $T = {HORIZONS[0]} · 2^k$ rounds"
    equal, base, _, high, single, several, _ = (
        [run for run in runs if run.setting == setting] for setting in SETTINGS
    )
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


def _growth(
    f: Clusters, method: CoBo, start: Array, rounds: int, weights: Array | None = None
) -> float:
    """Return the factor by which the distance from all clients' optima changes, without noise."""
    *_, (X, _) = method.run(f, start, rounds, weights=weights)
    return float(np.linalg.norm(X - f.mu) / np.linalg.norm(start - f.mu))


def _step_claims(rng: np.random.Generator) -> Iterator[Claim]:
    """How large eta may be."""
    rho = np.sqrt(3) / 4
    one, start = Clusters(np.linspace(1, 0.7, 4), np.zeros((4, 3))), rng.standard_normal((4, 3))
    limit = 2 / one.sharpness(rho)
    below, above = (
        _growth(one, CoBo(share * limit, rho, 1.0), start, 2000) for share in (0.99, 1.01)
    )
    penalty_only = _growth(one, CoBo(0.99 * 2 / (rho * 4), rho, 1.0), start, 50)
    yield Claim(
        "The models converge for $eta lambda_max(diag(a) + rho (diag(W 1) - W)) < 2$, and "
        "diverge just above",
        below < 1e-6 and min(above, penalty_only) > 1e6,
        f"a cluster of four: the error changes by {below:.0e} in 2000 rounds at 0.99 of it, by "
        f"{above:.0e} at 1.01. Without $diag(a)$, "
        f"0.99 is too much where $rho c = sqrt 3 L$: {penalty_only:.0e} in 50 rounds",
        beside=True,
    )
    f, rho, start = (
        Clusters(np.tile([1, 0.8], 6), np.repeat(np.eye(6), 2, 0)),
        np.sqrt(3) / 2,
        np.full((12, 6), 1 / 6),
    )
    allowed = CoBo(1 / (2 * rho * 2), rho, 0.05)
    ones, oracle = (
        _growth(f, allowed, start, 200),
        _growth(f, allowed, start, 200, weights=f.oracle),
    )
    safe = _growth(f, replace(allowed, eta=safe_step(f, rho)), start, 1000)
    yield Claim(
        "The proof's largest $eta$, $1 / (2 rho c)$, suits $W*$; but with $w = 1$, as at the "
        "start, $eta rho n = K / "
        "2 > 2$ for $K > 4$ equal clusters",
        ones > 1e6 and max(oracle, safe) < 1e-6,
        f"six clusters of two, $gamma = 0.05$: the error changes by {ones:.0e} in 200 rounds, "
        f"from $W*$ by {oracle:.0e}; with "
        f"$eta = 1 / (L + rho n)$, from $w = 1$, by {safe:.0e} in 1000",
        beside=True,
    )
