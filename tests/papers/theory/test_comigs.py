"""CoMiGS's theorems hold where they are run, against naive computations, and their checks can
fail.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import CoterieError
from theorems import THEOREMS, Experiment
from theorems.comigs import (
    Quadratic,
    alternate,
    euclidean_counterexample,
    random_quadratic,
)
from theorems.experiment import excess
from theorems.linear_experts import LinearExperts, Point, exclusive_or, newton, softmax
from theorems.mathematics import plain
from theory.typeset import check_page

CONTRACTION, EXPERTS = "comigs/theorem-2.1", "comigs/theorem-g.2"


def failed(experiment: Experiment) -> str:
    return "\n".join(plain(claim.text) for claim in experiment.claims if not claim.holds)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [CONTRACTION, EXPERTS])
def test_claims_hold_and_come_with_a_table_and_a_figure(name: str, seed: int) -> None:
    experiment = THEOREMS[name](seed)
    assert experiment.holds, failed(experiment)
    assert all(claim.detail for claim in experiment.claims)
    assert {len(row) for row in experiment.table.rows} == {len(experiment.table.columns)}
    assert {claim.beside for claim in experiment.claims} == {True, False}
    assert all(panel.log for panel in experiment.panels)
    check_page(experiment)


def test_an_experiment_is_a_function_of_its_seed() -> None:
    assert THEOREMS[CONTRACTION](4) == THEOREMS[CONTRACTION](4) != THEOREMS[CONTRACTION](5)


def test_errors_at_the_bound_and_above_it() -> None:
    assert excess([4, 2, 1], 0.5) == 1
    assert excess([4, 2, 1.5], 0.5) == 1.5
    assert excess([4, 2, 1.5], 0.5, floor=1.5) == 1  # rounding
    assert excess([1, 0, 0], 0) == 0
    assert excess([1, 1e-9], 0) == np.inf


def naive_iterates(
    valid: Quadratic, train: Quadratic, theta: np.ndarray, steps: int
) -> list[np.ndarray]:
    """Each argmin as one linear system over both blocks: the free block is stationary, the other
    one stays where it is.
    """
    A, B, C = (torch.from_numpy(m) for m in (train.A, valid.B, valid.C))
    iterates, (p, t) = [theta], valid.C.shape
    centre_t, centre_p = torch.from_numpy(valid.theta), torch.from_numpy(valid.phi)
    for _ in range(steps):
        point = torch.from_numpy(iterates[-1])
        keep_theta = torch.cat(
            [
                torch.cat([torch.eye(t).double(), torch.zeros(t, p).double()], 1),
                torch.cat([C, B], 1),
            ]
        )
        phi = torch.linalg.solve(keep_theta, torch.cat([point, C @ centre_t + B @ centre_p]))[t:]
        Ct = torch.from_numpy(train.C).T
        keep_phi = torch.cat(
            [
                torch.cat([A, Ct], 1),
                torch.cat([torch.zeros(p, t).double(), torch.eye(p).double()], 1),
            ]
        )
        iterates.append(
            torch.linalg.solve(keep_phi, torch.cat([A @ centre_t + Ct @ centre_p, phi]))[:t].numpy()
        )
    return iterates


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6), st.floats(1, 1e4))
@settings(max_examples=30)
def test_alternating_minimisation_is_the_operator_and_the_block_solver(
    seed: int, t: int, p: int, condition: float
) -> None:
    rng = np.random.default_rng(seed)
    valid, train = (random_quadratic(rng, (t, p), condition) for _ in range(2))
    theta, phi, start = rng.standard_normal(t), rng.standard_normal(p), rng.standard_normal(t)
    valid, train = (replace(f, theta=theta, phi=phi) for f in (valid, train))
    found, _ = alternate(valid, train, start, 4)
    for mine, naive in zip(found, naive_iterates(valid, train, start, 4), strict=True):
        np.testing.assert_allclose(mine, naive, rtol=1e-6, atol=1e-6 * max(1, np.abs(naive).max()))
    one, _ = alternate(valid, valid, start, 3)
    power = np.linalg.matrix_power(valid.operator(), 3) @ (start - theta)
    np.testing.assert_allclose(one[-1] - theta, power, atol=1e-8)


def test_the_rate_is_the_norm_of_the_operator_where_the_theorem_needs_it() -> None:
    for seed in range(5):
        f = random_quadratic(np.random.default_rng(seed), (5, 4), 1e3)
        eigenvalues, vectors = np.linalg.eigh(f.A)
        root = vectors * np.sqrt(eigenvalues) @ vectors.T
        assert np.linalg.norm(root @ f.operator() @ np.linalg.inv(root), 2) == pytest.approx(
            f.rate(), rel=1e-9
        )
        assert np.abs(np.linalg.eigvals(f.operator())).max() == pytest.approx(f.rate(), rel=1e-9)


def test_the_counterexample_is_strictly_convex_and_not_a_euclidean_contraction() -> None:
    f = euclidean_counterexample()
    assert f.spectrum[0] > 0
    assert np.linalg.norm(f.operator(), 2) == pytest.approx(0.4 * 1.01 / 0.1)
    assert f.rate() == pytest.approx(0.8)


def small(
    ratio: float = 1.0, mu: float = 1.0, seed: int = 0, n: int = 5, count: int = 3
) -> tuple[LinearExperts, Point]:
    """A problem with alpha at `ratio` of (21), and a random point of it."""
    rng = np.random.default_rng(seed)
    x, y = exclusive_or(rng, n)
    problem = LinearExperts(x, y, count, mu, 1.0)
    point = Point(*rng.standard_normal((2, 2, count)), rng.dirichlet(np.ones(count), n))
    return replace(problem, alpha=ratio * problem.sufficient_alpha), point


def objective(
    p: LinearExperts, theta: torch.Tensor, phi: torch.Tensor, lam: torch.Tensor
) -> torch.Tensor:
    """(19), term by term, with the divergence of (17) from the router's probabilities."""
    x, y = torch.from_numpy(p.x), torch.from_numpy(p.y)
    total = p.alpha / 2 * (theta.square().sum() + phi.square().sum())
    for i in range(len(x)):
        router = torch.softmax(phi.T @ x[i], 0)
        divergence = (lam[i] * (lam[i].log() - router.log())).sum()
        total = total + (
            torch.log1p(torch.exp(-y[i] * (lam[i] @ theta.T @ x[i]))) + p.mu * divergence
        ) / len(x)
    return total


def test_value_gradient_and_hessian_are_those_of_the_objective() -> None:
    problem, z = small(mu=0.7)
    tensors = tuple(torch.from_numpy(part).requires_grad_() for part in (z.theta, z.phi, z.lam))
    assert problem.value(z) == pytest.approx(objective(problem, *tensors).item(), rel=1e-12)

    n, m = z.lam.shape
    basis = torch.linalg.svd(torch.ones(1, m).double())[2][
        1:
    ]  # [N, m], of the directions along the simplex
    root = torch.tensor(float(n)).double().sqrt()

    def along(flat: torch.Tensor) -> torch.Tensor:
        theta, phi, lam = flat.split([6, 6, n * (m - 1)])
        lam = tensors[2].detach() + root * lam.reshape(n, m - 1) @ basis
        return objective(
            problem,
            tensors[0].detach() + theta.reshape(2, m),
            tensors[1].detach() + phi.reshape(2, m),
            lam,
        )

    zero = torch.zeros(12 + n * (m - 1)).double()
    hessian = torch.autograd.functional.hessian(along, zero)
    assert problem.hessian(z).shape == hessian.shape
    np.testing.assert_allclose(
        np.linalg.eigvalsh(problem.hessian(z)), torch.linalg.eigvalsh(hessian).numpy(), atol=1e-9
    )
    np.testing.assert_allclose(problem.hessian(z)[:12, :12], hessian[:12, :12].numpy(), atol=1e-12)
    gradient = torch.autograd.functional.jacobian(along, zero)
    assert problem.stationarity(z) == pytest.approx(gradient.norm().item(), rel=1e-10)


@pytest.mark.parametrize("ratio", [1.0, 0.01])
@pytest.mark.parametrize("name", ["theta", "phi", "lambda"])
def test_block_updates_are_minimisers_of_their_block(name: str, ratio: float) -> None:
    problem, z = small(ratio, mu=0.7)
    z = Point(5 * z.theta, 5 * z.phi, z.lam)
    best = getattr(problem, f"{name}_step")(z)
    parts = {"theta": best.theta, "phi": best.phi, "lambda": best.lam}
    fields = {"theta": "theta", "phi": "phi", "lambda": "lam"}
    for other in parts.keys() - {name}:
        assert getattr(best, fields[other]) is getattr(z, fields[other])
    rng, mine = np.random.default_rng(1), parts[name]
    for size in (1e-3, 0.1, 1):
        for _ in range(20):
            step = size * rng.standard_normal(mine.shape)
            rival = softmax(np.log(mine) + step) if name == "lambda" else mine + step
            assert (
                problem.value(best) <= problem.value(replace(best, **{fields[name]: rival})) + 1e-14
            )
    tensors = {
        key: torch.from_numpy(value).requires_grad_(key == name) for key, value in parts.items()
    }
    (gradient,) = torch.autograd.grad(objective(problem, *tensors.values()), tensors[name])
    if name == "lambda":
        gradient = gradient - gradient.mean(1, keepdim=True)
    assert gradient.abs().max() < 1e-11


@given(
    st.integers(0, 10**6),
    st.floats(0.2, 5),
    st.floats(1, 3),
    st.integers(1, 6),
    st.integers(2, 4),
    st.floats(-1, 1.5),
)
@settings(max_examples=60)
def test_under_21_no_hessian_has_an_eigenvalue_below_the_certified_one(
    seed: int, mu: float, ratio: float, n: int, count: int, scale: float
) -> None:
    problem, z = small(ratio, mu, seed, n, count)
    z = Point(10**scale * z.theta, 10**scale * z.phi, np.maximum(z.lam, 1e-6))
    strong, _ = problem.constants(problem.value(z))
    assert 0 < strong <= np.linalg.eigvalsh(problem.hessian(z))[0] + 1e-9


@given(st.integers(0, 10**6), st.floats(0.3, 3), st.floats(-1, 0.5))
@settings(max_examples=30)
def test_the_certified_region_holds_the_run_and_its_curvature(
    seed: int, mu: float, scale: float
) -> None:
    problem, z = small(1.0, mu, seed)
    z = problem.lambda_step(Point(10**scale * z.theta, 10**scale * z.phi, z.lam))
    strong, smooth = problem.constants(problem.value(z))
    for _ in range(3):
        following = problem.theta_step(problem.phi_step(problem.lambda_step(z)))
        for t in (0, 0.3, 1):
            eigenvalues = np.linalg.eigvalsh(problem.hessian(z.towards(following, t, 1 - t)))
            assert strong - 1e-9 <= eigenvalues[0] <= eigenvalues[-1] <= smooth * (1 + 1e-9)
        z = following


def test_newton_says_when_it_did_not_arrive() -> None:
    with pytest.raises(CoterieError, match="gap"):
        newton(
            lambda x: (float(x @ x), 2 * x, 1e3 * np.eye(1)), np.ones(1), 2.0
        )  # a Hessian that is far too large


def relaxed(step: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda self, at: 0.9 * step(self, at)


def disturbed(step: Callable[..., Point]) -> Callable[..., Point]:
    """A step that lands beside its minimiser, on the simplex still."""

    def wrong(self: LinearExperts, z: Point) -> Point:
        found = step(self, z)
        shift = 1e-4 * np.sin(np.arange(found.theta.size)).reshape(found.theta.shape)
        return Point(found.theta + shift, found.phi + shift, softmax(np.log(found.lam) + shift[:1]))

    return wrong


def test_a_wrong_block_update_of_the_quadratic_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quadratic, "best_phi", relaxed(Quadratic.best_phi))
    assert "iterates obey" in failed(THEOREMS[CONTRACTION](0))


def test_a_wrong_rate_of_the_quadratic_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    spectrum = Quadratic.spectrum.func
    monkeypatch.setattr(
        Quadratic, "spectrum", property(lambda self: (0.7 * spectrum(self)[1], spectrum(self)[1]))
    )
    found = failed(THEOREMS[CONTRACTION](0))
    assert "T contracts in the A-norm" in found
    assert "fall at least as fast" in found


def test_a_wrong_lipschitz_constant_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("theorems.comigs._lipschitz", lambda valid, train: 0.05)
    found = failed(THEOREMS[CONTRACTION](0))
    assert "obey (11)" in found
    assert "diverge" in found


@pytest.mark.parametrize("step", ["lambda_step", "phi_step", "theta_step"])
def test_a_disturbed_block_update_of_the_experts_is_caught(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(LinearExperts, step, disturbed(getattr(LinearExperts, step)))
    monkeypatch.setattr("theorems.comigs_experts.STEPS", 30)
    found = failed(THEOREMS[EXPERTS](0))
    assert "increases F_mu" in found
    assert "global minimum" in found


def test_wrong_constants_of_the_experts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearExperts, "constants", lambda self, level: (0.99, 1.0))
    assert "certified on a region" in failed(THEOREMS[EXPERTS](0))


def test_too_little_ridge_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = LinearExperts.sufficient_alpha.fget
    monkeypatch.setattr(
        LinearExperts, "sufficient_alpha", property(lambda self: 0.1 * enough(self))
    )
    monkeypatch.setattr("theorems.comigs_experts._ExpertsRun.convex", True)
    assert "jointly strongly convex" in failed(THEOREMS[EXPERTS](0))
