"""Searches for starts from which CoBo finds the clusters, and for some from which it does not."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from theorems.cobo_problem import (
    Array,
    Clusters,
    CoBo,
    polygon,
    safe_step,
    surrounding,
)
from theorems.experiment import Claim, Curve, Panel

ROUNDING = 1e-12


@dataclass(frozen=True)
class Search:
    """The weights of a noise-free run from a start common to all clients, rho c = sqrt 3 L and a
    step size that is safe for any weights.
    """

    f: Clusters
    method: CoBo
    X: Array  # at the end
    W: Array
    wrong: list[float]  # mean |w_ij - w*_ij| over pairs, at the start and after every round

    @property
    def first_correct(self) -> int | None:
        """The first round from which on W = W*; None: it is not at the end."""
        last = max((k for k, error in enumerate(self.wrong) if error > 0), default=-1)
        return None if self.wrong[-1] > 0 else last + 1

    @property
    def held(self) -> int:
        """Rounds before the first weight changes."""
        return (
            next(
                (k for k, error in enumerate(self.wrong) if error != self.wrong[0]), len(self.wrong)
            )
            - 1
        )


def search(f: Clusters, size: int, gamma: float, start: Array, rounds: int = 400) -> Search:
    """From x_i = start, [d], for clusters of `size` clients."""
    rho = np.sqrt(3) * f.a.max() / size
    method, n = CoBo(safe_step(f, rho), rho, gamma), len(f.a)
    states = list(method.run(f, np.tile(start, (n, 1)), rounds))
    return Search(
        f,
        method,
        *states[-1],
        [float(np.abs(W - f.oracle).sum() / (n * (n - 1))) for _, W in states],
    )


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
        far.append(
            search(
                surrounding(rng, 2, size), size, 0.1, 100 * direction / np.linalg.norm(direction)
            )
        )
    stuck = [search(polygon(6, 2), 2, 0.1, start * rng.standard_normal(2)) for start in (0.1, 10.0)]
    claims = [
        Claim(
            "Without noise, $W*$ is found exactly after finitely many rounds, and stays",
            all(run.first_correct for run in near),
            f"{len(near)} federations, 2 to 5 clusters around the start, $gamma = 0.1$: in "
            f"{_span(run.first_correct for run in near)} of 400 rounds",
        ),
        Claim(
            "It must be if all start at an $x_0$ with $<x_0 - mu_k, x_0 - mu_l> < 0$ for any two "
            "centres, $gamma$ "
            "takes those $w$ to 0 at once, "
            "and $eta (a_i + rho c) <= 1$: models stay between $x_0$ and their centre, and their "
            "midpoints stay inside the ball",
            all(run.first_correct == 1 for run in at_once),
            f"{len(at_once)} federations with the smallest such $gamma$: $W*$ from round "
            f"{_span(run.first_correct for run in at_once)} on",
            beside=True,
        ),
        Claim(
            "Point A of figure 1: from far away all clients collaborate at first; two clusters "
            "still find $W*$",
            all(run.first_correct and run.held > 1 for run in far),
            f"{len(far)} starts at a distance of 100: every $w = 1$ for "
            f"{_span(run.held for run in far)} rounds, $W*$ after "
            f"{_span(run.first_correct for run in far)}",
            beside=True,
        ),
        _hexagon_claim(stuck),
    ]
    curves = (
        Curve("start amid 5 clusters", near[3].wrong[:100], 0),
        Curve("2 clusters, start 100 away (point A)", far[0].wrong[:100], 1),
        Curve("6 clusters on a hexagon", stuck[1].wrong[:100], 2),
    )
    return claims, Panel(
        "Weights, without noise", "round $t$", "mean $|w_ij - w*_ij|$", curves, log=False
    )


def _hexagon_claim(runs: list[Search]) -> Claim:
    """Neighbours at an angle of 60 degrees stay connected: at x_i = mu_i / (1 + rho c) their
    midpoints are outside of their ball.
    """
    rho_c = np.sqrt(3)
    linked = [(run.W > 0) & (run.f.oracle == 0) for run in runs]
    agreement = [run.f.agreement(run.X)[links] for run, links in zip(runs, linked, strict=True)]
    moved = max(
        float(np.abs(run.method.round(run.f, run.X, run.W)[0] - run.X).max()) for run in runs
    )
    away = max(float(np.abs(run.X - run.f.mu / (1 + rho_c)).max()) for run in runs)
    least = min(float(products.min(initial=np.inf)) for products in agreement)
    return Claim(
        "With more clusters $W*$ may never be found: on a regular hexagon neighbours hold each "
        "other outside of their ball for good",
        all(
            links.sum() == 12 * 4 and (run.W[links] == 1).all()
            for run, links in zip(runs, linked, strict=True)
        )
        and max(moved, away) <= 1e-9
        and least > 0.01,
        "$rho c = sqrt 3 L$ as the theorem asks for, 6 x 2 clients, $a_i = 1$: from near and far "
        "to the fixed point "
        "$x_i = mu_i / (1 + rho c)$, "
        f"where neighbours' $<g_i, g_k> = {least:.3f} > 0$ and $||grad f_i(x_i)|| = "
        f"{rho_c / (1 + rho_c):.3f} ||mu_i||$",
        beside=True,
    )


def _span(values: Iterable[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    return (
        " to ".join(str(value) for value in dict.fromkeys((known[0], known[-1])))
        if known
        else "none"
    )
