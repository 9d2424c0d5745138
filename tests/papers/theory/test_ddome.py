"""DDOME's theorem holds where it is run, against naive computations and closed forms, and its
checks can fail.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Generator, Tensor

from theorems import THEOREMS, Experiment, ddome, ddome_model, ddome_training
from theorems.ddome_model import (
    DRAWS,
    Mixture,
    Sample,
    alternate,
    blended,
    compressed,
    descend,
    draw_truth,
    expected,
    fit_experts,
    fit_gate,
    likelihood,
)
from theorems.ddome_training import Size, train_disjointly
from theorems.mathematics import plain
from theory.typeset import check_page

NAME = "ddome/theorem-1"


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def axes(d: int, first: int, m: int) -> Tensor:
    """Unit vectors `first` to `first` + m, [1, m, d]."""
    return torch.eye(d)[None, first : first + m]


@pytest.fixture(scope="module")
def small() -> tuple[Experiment, list[Size]]:
    """The experiment on fewer inputs and draws, and smaller sizes, with what was measured."""
    sizes: list[Size] = []
    with pytest.MonkeyPatch.context() as patch:
        honest = Size.run
        for name, value in {
            "SIZES": ((16, 4), (25, 5)),
            "WIDE": (16, 4096),
            "FITTED": 60_000,
            "INPUTS": 8000,
            "DRAWS": 2,
            "STEPS": 500,
        }.items():
            for part in (ddome, ddome_model):
                if hasattr(part, name):
                    patch.setattr(part, name, value)
        patch.setattr(
            Size, "run", staticmethod(lambda *args: sizes.append(honest(*args)) or sizes[-1])
        )
        return THEOREMS[NAME](1), sizes


def failed(claims: object) -> str:
    return "\n".join(plain(claim.text) for claim in claims if not claim.holds)


def test_claims_hold_and_come_with_a_table_and_a_figure(
    small: tuple[Experiment, list[Size]],
) -> None:
    experiment, _ = small
    assert experiment.holds, failed(experiment.claims)
    assert all(claim.detail for claim in experiment.claims)
    assert {type(claim.holds) for claim in experiment.claims} == {bool}  # written as JSON
    assert {len(row) for row in experiment.table.rows} == {len(experiment.table.columns)}
    assert {claim.beside for claim in experiment.claims} == {True, False}
    check_page(experiment)


def test_claims_fail_where_training_is_not_what_they_say(
    small: tuple[Experiment, list[Size]],
) -> None:
    _, sizes = small
    frozen = [
        replace(size, joint=size.joint | {"likelihood": size.disjoint.gated}) for size in sizes
    ]
    assert "Trained jointly" in failed(ddome._theorem_claims(frozen, rng()))
    assert "zero function" in failed(ddome._joint_claims(frozen))
    found = [
        replace(
            size,
            disjoint=replace(
                size.disjoint, gated=size.joint["likelihood"], distances=1 - size.nearness
            ),
        )
        for size in sizes
    ]
    text = failed(ddome._theorem_claims(found, rng()))
    assert "stays above a constant" in text
    assert "once the gate is trained" in text
    stuck = [replace(size, passes=size.disjoint.gated.expand(2, -1)) for size in sizes]
    assert "One pass" in failed(ddome._joint_claims(stuck))


def test_a_run_is_a_function_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddome_training, "FITTED", 2000)
    monkeypatch.setattr(ddome, "DRAWS", 1)
    monkeypatch.setattr(ddome_model, "DRAWS", 1)
    first, second, other = (train_disjointly(9, 3, rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.gated, second.gated)
    assert torch.equal(first.distances, second.distances)
    assert not torch.equal(first.gated, other.gated)


def naive(model: Mixture, b: int, x: np.ndarray) -> float:
    """f(theta, x) of the paper, term by term: every expert whose score is the largest."""
    gate, experts = model.gate[b].numpy(), model.experts[b].numpy()
    scores = [float(np.dot(v, x)) for v in gate]
    return sum(
        float(np.dot(w, x))
        for score, w in zip(scores, experts, strict=True)
        if score >= max(scores)
    )


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_loss_and_oracle_are_those_of_the_formulas(seed: int, m: int, d: int) -> None:
    g = rng(seed)
    truth, model = (Mixture(*torch.randn(2, 2, m, d, generator=g)) for _ in range(2))
    sample = Sample.draw(truth, g, 30)
    for b in range(2):
        labels = [naive(truth, b, x) for x in sample.x.numpy()]
        errors = [
            (naive(model, b, x) - y) ** 2 for x, y in zip(sample.x.numpy(), labels, strict=True)
        ]
        least = [
            min((float(np.dot(w, x)) - y) ** 2 for w in model.experts[b].numpy())
            for x, y in zip(sample.x.numpy(), labels, strict=True)
        ]
        assert float(sample.loss(model)[b]) == pytest.approx(
            sum(errors) / sum(y**2 for y in labels), rel=1e-4
        )
        assert float(sample.oracle_loss(model.experts)[b]) == pytest.approx(
            sum(least) / sum(y**2 for y in labels), rel=1e-3, abs=1e-6
        )
    order = torch.randperm(m, generator=g)
    permuted = Mixture(2 * model.gate[:, order], model.experts[:, order])
    torch.testing.assert_close(sample.loss(permuted), sample.loss(model))
    assert bool((sample.oracle_loss(model.experts) <= sample.loss(model) + 1e-6).all())


def test_experts_are_the_least_squares_solutions_of_their_regions() -> None:
    truth, start = draw_truth(8, 3, rng())
    sample = Sample.draw(truth, rng(1), 2000)
    start[0, 2] = -(start[0, 0] + start[0, 1])
    start[0, 1] = start[0, 0]  # of a tie the first is taken: the second expert has no inputs
    experts = fit_experts(sample, start)
    assert not experts[0, 1].any()
    for b in range(DRAWS):
        scores = sample.x.numpy() @ start[b].numpy().T
        for j in range(3):
            inside = scores.argmax(1) == j
            if inside.any():
                solution = np.linalg.lstsq(
                    sample.x.numpy()[inside], sample.y[b].numpy()[inside], rcond=None
                )[0]
                np.testing.assert_allclose(experts[b, j].numpy(), solution, atol=1e-3)


@pytest.mark.parametrize(
    ("m", "first", "second_moment"),
    [
        (3, 3, 1.0),  # experts across the gates' span: their output is independent of the route
        (
            3,
            0,
            1 + math.sqrt(3) / (2 * math.pi),
        ),  # w*_j = v*_j: the squared maximum of three normal numbers
        (2, 1, 1.0),  # a half-space has half of the covariance, whatever w* is
        (2, 0, 1.0),
    ],
)
def test_the_second_moment_of_labels_in_closed_form(
    m: int, first: int, second_moment: float
) -> None:
    sample = Sample.draw(Mixture(axes(6, 0, m), axes(6, first, m)), rng(), 400_000)
    assert float(sample.y.square().mean()) == pytest.approx(second_moment, rel=0.015)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_experts_of_a_gate_that_knows_nothing_are_the_mean_of_the_truths(m: int) -> None:
    truth = Mixture(axes(3 * m, 0, m), axes(3 * m, m, m))
    sample, test = (Sample.draw(truth, rng(seed), 200_000) for seed in (0, 1))
    start = axes(3 * m, 2 * m, m)
    experts = fit_experts(sample, start)
    torch.testing.assert_close(
        experts, truth.experts.mean(1, keepdim=True).expand_as(experts), atol=0.03, rtol=0
    )
    assert float(test.loss(Mixture(start, experts))) == pytest.approx(1 - 1 / m, abs=0.01)
    assert float(sample.linear_loss(test)) == pytest.approx(1 - 1 / m, abs=0.01)
    torch.testing.assert_close(fit_experts(sample, truth.gate), truth.experts, atol=1e-4, rtol=0)


def test_the_compressed_problem_is_the_same_one() -> None:
    original = draw_truth(40, 3, rng())
    truth, start = compressed(*original)
    before, after = (torch.cat([t.gate, t.experts, s], 1) for t, s in (original, (truth, start)))
    assert after.shape == (DRAWS, 9, 9)
    torch.testing.assert_close(after @ after.mT, before @ before.mT, atol=1e-4, rtol=0)
    sample = Sample.draw(original[0], rng(1), 200_000)
    across = fit_experts(sample, original[1])
    small = fit_experts(Sample.draw(truth, rng(2), 200_000), start)
    torch.testing.assert_close(
        across @ original[0].experts.mT, small @ truth.experts.mT, atol=0.03, rtol=0
    )


def test_objectives_are_their_formulas() -> None:
    g = rng()
    gate, outputs, y = (
        torch.randn(2, 5, 3, generator=g).log_softmax(-1),
        torch.randn(2, 5, 3, generator=g),
        torch.randn(2, 5, 1, generator=g),
    )
    p, e = gate.exp().numpy(), (outputs - y).numpy()
    np.testing.assert_allclose(expected(gate, outputs, y, 0.5), (p * e**2).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(blended(gate, outputs, y, 0.5), (p * e).sum(-1) ** 2, rtol=1e-4)
    for done, sigma in ((0.0, 1.0), (0.5, math.sqrt(0.05)), (1.0, 0.05)):
        density = (p * np.exp(-(e.astype(float) ** 2) / (2 * sigma**2))).sum(-1)
        seen = density > 1e-30
        np.testing.assert_allclose(
            likelihood(gate, outputs, y, done).numpy()[seen], -np.log(density[seen]), rtol=1e-4
        )


def test_descent_keeps_frozen_experts_and_finds_the_gate_of_two_known_experts() -> None:
    truth = Mixture(axes(4, 0, 2), axes(4, 2, 2))
    sample = Sample.draw(truth, rng(), 8000)
    model = fit_gate(sample, [0.1 * torch.randn(1, 2, 4, generator=rng(1))], truth.experts)
    assert torch.equal(model.experts, truth.experts)
    assert float(sample.loss(model)) < 0.01
    trained = descend(sample, Mixture(torch.zeros(1, 2, 4), truth.experts), expected, 3)
    assert not torch.equal(trained.experts, truth.experts)


def test_passes_start_with_least_squares_and_go_on_from_the_gate_before() -> None:
    truth, start = draw_truth(9, 3, rng())
    sample = Sample.draw(truth, rng(1), 4000)
    first, second = alternate(sample, start, 2)
    assert torch.equal(first.experts, fit_experts(sample, start))
    assert torch.equal(second.experts, fit_experts(sample, first.gate))
    assert bool((sample.loss(second) < sample.loss(first)).all())


@pytest.mark.parametrize("k", [2, 4, 16, 64])
def test_the_tail_of_chi_square(k: int) -> None:
    assert ddome._tail(k) == pytest.approx(chi2.sf(2 * k, k), rel=1e-9)
