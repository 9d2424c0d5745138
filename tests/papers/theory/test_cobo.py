"""CoBo's theorem holds where it is run, against a naive iteration and closed forms, and its
checks can fail.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theorems import THEOREMS, Experiment
from theorems import cobo as module
from theorems.cobo_problem import Clusters, CoBo, polygon, safe_step, surrounding
from theorems.cobo_runs import Run, Setting, measure
from theorems.cobo_search import search
from theorems.mathematics import plain
from theory.typeset import check_page

NAME = "cobo/theorem-1"
RNG = np.random.default_rng


def failed(experiment: Experiment) -> str:
    return "\n".join(plain(claim.text) for claim in experiment.claims if not claim.holds)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment with a shorter grid of T."""
    monkeypatch.setattr(module, "HORIZONS", (125, 500))


def test_claims_hold_and_come_with_a_table_and_a_figure() -> None:
    experiment = THEOREMS[NAME](0)
    assert experiment.holds, failed(experiment)
    assert all(claim.detail for claim in experiment.claims)
    assert {type(claim.holds) for claim in experiment.claims} == {bool}  # written as JSON
    assert {len(row) for row in experiment.table.rows} == {len(experiment.table.columns)}
    assert {claim.beside for claim in experiment.claims} == {True, False}
    check_page(experiment)


@pytest.mark.usefixtures("brief")
def test_an_experiment_is_a_function_of_its_seed() -> None:
    first, second, other = (THEOREMS[NAME](seed) for seed in (1, 1, 2))
    assert first == second != other
    assert failed(first) == failed(other) == ""


def naive_round(
    f: Clusters, method: CoBo, X: list[list[float]], W: list[list[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Algorithm 1 without noise, coordinate by coordinate."""
    n, d = len(X), len(X[0])

    def gradient(i: int, x: list[float]) -> list[float]:
        return [float(f.a[i]) * (x[k] - float(f.mu[i, k])) for k in range(d)]

    new_W = [row[:] for row in W]
    for i in range(n):
        for j in range(n):
            if i != j:
                z = [(X[i][k] + X[j][k]) / 2 for k in range(d)]
                inner = sum(p * q for p, q in zip(gradient(i, z), gradient(j, z), strict=True))
                new_W[i][j] = min(1.0, max(0.0, W[i][j] + method.gamma * inner))
    new_X = []
    for i in range(n):
        g = gradient(i, X[i])
        pull = [sum(new_W[i][k] * (X[i][c] - X[k][c]) for k in range(n)) for c in range(d)]
        new_X.append(
            [X[i][c] - float(method.eta) * (g[c] + float(method.rho) * pull[c]) for c in range(d)]
        )
    return new_X, new_W


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0.01, 2),
    st.floats(0, 3),
)
@settings(max_examples=25)
def test_a_round_is_algorithm_1(
    seed: int, clusters: int, size: int, d: int, gamma: float, rho: float
) -> None:
    rng = RNG(seed)
    n = clusters * size
    f = Clusters(rng.uniform(0.5, 2, n), np.repeat(rng.standard_normal((clusters, d)), size, 0))
    method, start = CoBo(0.1, rho, gamma), rng.standard_normal((n, d))
    X, W = start.tolist(), (1 - np.eye(n)).tolist()
    states = method.run(f, start, 5)
    for found, weights in states:
        np.testing.assert_allclose(found, X, atol=1e-12)
        np.testing.assert_allclose(weights, W, atol=1e-12)
        X, W = naive_round(f, method, X, W)


def test_federations_on_a_leading_axis_are_separate() -> None:
    rng = RNG(0)
    a, mu, start = (
        rng.uniform(0.5, 2, (3, 4)),
        rng.standard_normal((3, 4, 2)),
        rng.standard_normal((3, 4, 2)),
    )
    eta, rho = np.array([0.1, 0.05, 0.2]), np.array([0.0, 1.0, 0.5])
    together = list(CoBo(eta, rho, 0.3).run(Clusters(a, mu), start, 4))[-1]
    for k in range(3):
        alone = list(CoBo(eta[k], rho[k], 0.3).run(Clusters(a[k], mu[k]), start[k], 4))[-1]
        for mine, its in zip(together, alone, strict=True):
            np.testing.assert_allclose(mine[k], its, atol=1e-13)


def test_clients_of_one_cluster_meet_at_its_centre_and_of_two_between() -> None:
    a, mu, rho = np.array([1.0, 3.0]), np.array([[0.0], [1.0]]), 0.7
    one = Clusters(a, np.zeros((2, 1)))
    X, W = list(CoBo(0.1, rho, 1.0).run(one, np.array([[5.0], [-3.0]]), 500))[-1]
    assert np.abs(X).max() < 1e-12
    np.testing.assert_array_equal(W, one.oracle)
    # gamma = 0 keeps w = 1: a_i (x_i - mu_i) + rho (x_i - x_j) = 0 in closed form
    X, _ = list(CoBo(0.1, rho, 0.0).run(Clusters(a, mu), np.zeros((2, 1)), 2000))[-1]
    gap = a.prod() / (a.prod() + rho * a.sum())
    assert float(X[1, 0] - X[0, 0]) == pytest.approx(gap, rel=1e-10)
    assert float(X[0, 0]) == pytest.approx(rho * gap / a[0], rel=1e-10)


def test_gradients_have_the_variance_of_a2_and_weights_that_of_the_batch() -> None:
    f = Clusters(np.ones((20000, 2)), np.zeros((20000, 2, 3)))
    still = np.zeros((20000, 2, 3))
    X, W = CoBo(1.0, 0.0, 1.0, sigma=2.0, batch=16).round(
        f, still, np.full((20000, 2, 2), 0.5), RNG(0)
    )
    assert (X**2).sum(-1).mean() == pytest.approx(4, rel=0.03)
    np.testing.assert_array_equal(W, np.swapaxes(W, -1, -2))
    # <h_i, h_j> of independent noise: mean 0, variance d (sigma^2 / (b d))^2
    moved = W[:, 0, 1] - 0.5
    assert abs(moved.mean()) < 0.005
    assert moved.var() == pytest.approx(3 * (4 / 16 / 3) ** 2, rel=0.05)


def test_the_consensus_distance_of_equal_clients_is_known_in_closed_form() -> None:
    """The difference u = x_i - x_j obeys u <- (1 - eta (a + rho c)) u + eta (noise of two), so
    that E ||u||^2 is a geometric sum.
    """
    horizon, setting = 400, Setting(0.0)
    (run,) = measure((setting,), horizon, RNG(0), seeds=100)
    eta = setting.eta(horizon)
    shrink = (1 - eta * (1 + setting.rho_c)) ** 2
    expected = np.mean(
        [2 * eta**2 * (1 - shrink**t) / (1 - shrink) for t in range(1, horizon + 1)]
    ) * (1 - 1 / 3)
    assert run.consensus == pytest.approx(expected, rel=0.02)
    assert run.printed == 0 < run.consensus < run.amended[0]
    assert run.wrong == 0


def test_the_measured_norms_are_those_of_the_theorem() -> None:
    """Without noise equal clients of a cluster move as one: x_t - mu = (1 - eta)^t (x_0 - mu)."""
    (run,) = measure((Setting(0.0),), 200, RNG(0), sigma=0.0, seeds=1)
    expected = np.mean((1 - Setting(0.0).eta(200)) ** (2 * np.arange(200)))
    assert run.consensus < 1e-28
    assert run.midpoints == pytest.approx(expected, rel=1e-10)
    assert run.clients == pytest.approx(expected, rel=1e-10)


def test_the_amended_bounds_follow_from_their_two_recursions() -> None:
    """The largest D and G that the recursions of `Run.amended` allow, iterated, stay below its
    closed form.
    """
    for setting in (Setting(0.0), Setting(0.1), Setting(0.19), Setting(0.1, penalty=3)):
        for horizon in (50, 500, 5000):
            eta, rho_c, M, c = setting.eta(horizon), setting.rho_c, setting.M, 3
            fall = setting.start_gap / horizon  # the F_t may fall by this much a round
            D, Ds, Gs = 0.0, [], []
            for _ in range(horizon):
                Gs.append(2 / eta * fall + 2 / 3 * rho_c**2 * D + eta * (1 + 1 / c) / 2)
                D = (
                    (1 - eta * rho_c / 2) * D
                    + 12 * M**2 * eta / rho_c * Gs[-1]
                    + 2 * eta**2 * (1 - 1 / c)
                )
                Ds.append(D)
            consensus, midpoints = Run(setting, horizon, 0, 0, 0, 0).amended
            assert np.mean(Ds) <= consensus * (1 + 1e-12)
            assert np.mean(Gs) <= midpoints * (1 + 1e-12)
            assert (
                np.mean(Ds) >= 0.5 * consensus or horizon < 5000
            )  # and close to it in the long run


@pytest.mark.parametrize("seed", range(3))
def test_w_star_is_found_in_one_round_under_the_sufficient_condition(seed: int) -> None:
    f = surrounding(RNG(seed), 4, 2)
    pairs = [(i, j) for i in range(8) for j in range(8) if (f.mu[i] != f.mu[j]).any()]
    assert len(pairs) == 48
    products = [float(f.a[i] * f.a[j] * f.mu[i] @ f.mu[j]) for i, j in pairs]
    assert max(products) < 0
    enough = -1 / max(products)
    assert search(f, 2, enough * 1.001, np.zeros(4)).first_correct == 1
    late = search(f, 2, enough * 0.5, np.zeros(4)).first_correct
    assert late is not None
    assert late > 1


@pytest.mark.parametrize(
    ("corners", "found"), [(3, True), (4, True), (5, True), (6, False), (8, False)]
)
def test_a_polygon_of_clusters_holds_together_from_six_corners_on(
    corners: int, found: bool
) -> None:
    """Neighbours stay where (1 - 1 / (1 + lambda)) cos > sin at half their angle, lambda = rho c
    (2 - 2 cos): 0.571 and 0.588 at five.
    """
    angle = 2 * np.pi / corners
    pull = np.sqrt(3) * (2 - 2 * np.cos(angle))
    assert ((1 - 1 / (1 + pull)) * np.cos(angle / 2) > np.sin(angle / 2)) is np.bool_(not found)
    assert (
        search(polygon(corners, 2), 2, 0.1, np.array([0.3, 0.1]), 2000).first_correct is not None
    ) is found


def test_sharpness_is_the_curvature_along_the_worst_direction() -> None:
    f, rho = Clusters(np.full(6, 0.5), np.repeat(np.eye(2), 3, 0)), 0.8
    assert f.sharpness(rho) == pytest.approx(0.5 + 3 * rho)
    assert safe_step(f, rho) == pytest.approx(1 / (0.5 + 6 * rho))


@pytest.mark.usefixtures("brief")
def test_an_iteration_without_its_penalty_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CoBo.round
    monkeypatch.setattr(
        CoBo,
        "round",
        lambda self, f, X, W, rng=None: honest(replace(self, rho=0 * self.rho), f, X, W, rng),
    )
    found = failed(THEOREMS[NAME](0))
    assert "diverge just above" in found
    assert "A larger rho" in found
    assert "hexagon" in found


@pytest.mark.usefixtures("brief")
def test_weights_against_agreement_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CoBo.round
    monkeypatch.setattr(
        CoBo,
        "round",
        lambda self, f, X, W, rng=None: honest(replace(self, gamma=-self.gamma), f, X, W, rng),
    )
    assert "W* is found exactly" in failed(THEOREMS[NAME](0))


@pytest.mark.usefixtures("brief")
def test_bounds_without_the_amendment_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "amended", property(lambda self: (self.printed + 1e-9, self.root)))
    assert "proof's bounds hold" in failed(THEOREMS[NAME](0))


@pytest.mark.usefixtures("brief")
def test_a_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Clusters, "gradients", lambda self, points: self.a[..., None] ** 1.1 * (points - self.mu)
    )
    found = failed(THEOREMS[NAME](0))
    assert "(5) holds with M_ij" in found
    assert "positive lower bound (6)" in found
