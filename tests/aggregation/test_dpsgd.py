"""DP-SGD: clipping and noise against their definitions, what is spent against a second
accountant and an integral.
"""

import json
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import integrate, stats

from coterie.aggregation.accountant import ORDERS, epsilon_of
from coterie.aggregation.dpsgd import (
    ExampleAccountant,
    Sanitizer,
    clipped_sum,
    rate_of,
    rdp_of_steps,
)
from coterie.aggregation.noise import Source, grid
from coterie.aggregation.privacy import Privacy
from coterie.core.errors import Refused, TensorError
from coterie.core.roles import GENERALIST

pytest.importorskip("opacus")


def privacy(noise: float = 1.0, clip: float = 1.0, **settings: float) -> Privacy:
    return Privacy(unit="example", clip=clip, noise=noise, **settings)


def sanitizer(noise: float = 1.0, clip: float = 1.0, seed: int = 0) -> Sanitizer:
    return Sanitizer(privacy(noise, clip), frozenset({GENERALIST}), Source.seeded(seed, "test"), 5)


def gradients(rows: int = 5, seed: int = 0) -> list[torch.Tensor]:
    """Of a matrix and a bias, some short, some long."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 2, rows)
    return [
        sizes[:, None, None] * torch.randn(rows, 3, 2, generator=random),
        sizes[:, None] * torch.randn(rows, 4, generator=random),
    ]


# Gradients


def test_each_example_is_clipped_as_one_vector_and_none_adds_more_than_the_norm() -> None:
    step = grid(0.5, 0.5)
    found = gradients()
    flat = torch.cat([g.flatten(1) for g in found], dim=1).double()
    wanted = flat * (0.5 / flat.norm(dim=1, keepdim=True)).clamp(max=1)
    assert (flat.norm(dim=1) < 0.5).any()
    assert (flat.norm(dim=1) > 0.5).any()
    np.testing.assert_allclose(
        clipped_sum(found, 0.5, step) * step, wanted.sum(dim=0).numpy(), atol=1e-5
    )
    for row in range(5):
        alone = clipped_sum([g[row : row + 1] for g in found], 0.5, step)
        assert sum(int(v) ** 2 for v in alone) * step**2 <= 0.25  # in whole numbers: exactly


def test_a_sum_is_the_same_to_the_bit_in_any_order_and_in_any_parts() -> None:
    whole, step = gradients(9), grid(1.0, 1.0)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    parts = [[g[order][:4] for g in whole], [g[order][4:] for g in whole]]
    assert np.array_equal(
        clipped_sum(whole, 1.0, step), sum(clipped_sum(part, 1.0, step) for part in parts)
    )
    one, other = (sanitizer().gradient(given, 10, 5) for given in ([whole], parts))
    assert torch.equal(one, other)


def test_no_gradient_is_so_long_that_it_adds_more_and_what_is_no_number_is_refused() -> None:
    step = grid(1.0, 1.0)
    assert (
        abs(clipped_sum([torch.tensor([[0.0, 0.0], [torch.inf, 1.0]])], 1.0, step)[0] * step - 1.0)
        < 1e-5
    )
    with pytest.raises(TensorError, match="not all values are numbers"):
        sanitizer().gradient([[torch.tensor([[1.0], [torch.nan]])]], 1, 2)


def test_noise_is_of_the_sum_whatever_the_batch_has() -> None:
    size = 20_000
    for parts in ([], [[torch.zeros(3, size)]]):  # a sample may be empty
        noise = sanitizer(noise=2.0, clip=3.0).gradient(parts, size, 8).double()
        assert float(noise.std()) == pytest.approx(2.0 * 3.0 / 8, rel=0.03)
        assert abs(float(noise.mean())) < 4 * 0.75 / math.sqrt(size)
        assert stats.kstest((noise / 0.75).numpy(), "norm").pvalue > 1e-3
    assert torch.equal(sanitizer(noise=0.0).gradient([], 3, 8), torch.zeros(3))


def test_another_seed_is_other_noise_and_secret_noise_is_never_the_same() -> None:
    one, again, other = (sanitizer(seed=seed).gradient([], 4, 1) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    secret = [
        Sanitizer(privacy(), frozenset(), Source.secret(), 1).gradient([], 4, 1) for _ in range(2)
    ]
    assert not torch.equal(*secret)


def test_no_step_is_taken_that_nobody_counted() -> None:
    made = sanitizer()
    for _ in range(5):
        made.gradient([], 2, 1)
    with pytest.raises(Refused, match="more steps than the privacy accounting counts"):
        made.gradient([], 2, 1)


# Sampling


def test_examples_are_drawn_one_by_one() -> None:
    made, windows, expected = sanitizer(), 50, 10
    drawn = np.zeros((4000, windows))
    for row in drawn:
        row[made.sample(windows, expected)] = 1
    rate, error = 0.2, 4 * math.sqrt(0.2 * 0.8 / 4000)
    assert np.abs(drawn.mean(axis=0) - rate).max() < error  # each as often
    assert drawn.sum(axis=1).var() == pytest.approx(
        windows * rate * (1 - rate), rel=0.1
    )  # the size is binomial, not fixed
    both = (drawn[:, :25] * drawn[:, 25:]).mean(axis=0)
    assert np.abs(both - rate**2).max() < 4 * math.sqrt(0.04 * 0.96 / 4000)  # whatever another does


def test_a_client_with_fewer_examples_than_a_batch_takes_all_of_them() -> None:
    assert rate_of(5, 8) == 1.0
    assert rate_of(400, 8) == 0.02
    assert sanitizer().sample(5, 8).tolist() == [0, 1, 2, 3, 4]


# Accounting


def test_a_step_spends_the_divergence_of_its_two_neighbours() -> None:
    rate, sigma, order = 0.1, 1.3, 6.0

    def log_mixture(x: float) -> float:
        return float(
            np.logaddexp(
                math.log(1 - rate) + stats.norm.logpdf(x, 0, sigma),
                math.log(rate) + stats.norm.logpdf(x, 1, sigma),
            )
        )

    def moment(x: float) -> float:
        return math.exp(order * log_mixture(x) + (1 - order) * stats.norm.logpdf(x, 0, sigma))

    true = math.log(integrate.quad(moment, -25, 35, limit=400)[0]) / (order - 1)
    place = int(np.flatnonzero(order == ORDERS)[0])
    assert rdp_of_steps(rate, sigma, 1)[place] == pytest.approx(true, rel=1e-6)
    assert rdp_of_steps(rate, sigma, 40)[place] == pytest.approx(40 * true, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [(0.02, 0.8, 50), (0.02, 1.5, 1000), (0.3, 3.0, 200), (0.9, 6.0, 30)],
)
def test_two_other_accountants_find_nearly_the_same(rate: float, noise: float, steps: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    found = epsilon_of(0.0, rdp_of_steps(rate, noise, steps), 1e-5)
    other = accountants.RDPAccountant()
    other.history = [(noise, rate, steps)]
    assert (
        0.97 * other.get_epsilon(1e-5) <= found <= other.get_epsilon(1e-5) * 1.001
    )  # of the same bound, at fewer orders
    tight = accountants.PRVAccountant()
    tight.history = [(noise, rate, steps)]
    assert (
        0.99 * tight.get_epsilon(1e-5) <= found <= 1.35 * tight.get_epsilon(1e-5)
    )  # by Fourier transforms, without a bound's slack


@pytest.mark.parametrize("rate", [0.001, 0.02, 1.0])
def test_divergences_are_known_where_they_are_used_and_never_fall_with_the_order(
    rate: float,
) -> None:
    found = rdp_of_steps(rate, 1.0, 1)
    assert np.isfinite(found).all()
    assert (np.diff(found) >= -1e-12).all()
    assert (found <= ORDERS / 2 + 1e-12).all()  # sampling never hurts


def test_each_client_spends_by_its_own_rate_and_steps() -> None:
    found = ExampleAccountant(privacy(noise=1.0, delta=1e-5), largest=1000, expected=10)
    assert found.summary().epsilon == 0.0
    for _ in range(3):
        found.spend({"few": 100, "many": 1000}, {"few": 20, "many": 20})
    found.spend({"many": 1000}, {"many": 20})
    assert found.of_client("few", 1e-5) == epsilon_of(0.0, rdp_of_steps(0.1, 1.0, 60), 1e-5)
    assert found.of_client("many", 1e-5) == epsilon_of(0.0, rdp_of_steps(0.01, 1.0, 80), 1e-5)
    assert found.epsilon(1e-5) == found.of_client("few", 1e-5) > found.of_client("many", 1e-5) > 0
    again = ExampleAccountant(found.privacy, 1000, 10, json.loads(json.dumps(found.runs)))
    assert again == found
    summary = again.summary()
    json.dumps(summary.to_json(), allow_nan=False)
    assert summary.epsilon == summary.clients["few"] > summary.clients["many"]
    assert (
        "at most 80 steps, each on every example of a client with probability 0.01 to 0.1"
        in summary.sampling
    )


def test_without_noise_nobody_is_protected() -> None:
    found = ExampleAccountant(privacy(noise=0.0), largest=100, expected=10)
    found.spend({"ann": 100}, {"ann": 1})
    assert found.epsilon(1e-5) == math.inf
    assert found.summary().epsilon is None
    assert found.summary().clients == {"ann": None}
    assert found.delta == pytest.approx(100**-1.1)


def test_a_single_example_needs_a_delta() -> None:
    with pytest.raises(Refused, match=r"privacy\.delta: there is no default for a single example"):
        ExampleAccountant(privacy(), largest=1, expected=1)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"where": "local"}, "where"),
        ({"adaptive": {"noise": 5.0}}, "adaptive"),
        ({"unit": "client"}, "where"),
        ({"unit": "window"}, "unit"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Privacy.model_validate({"unit": "example", "clip": 1.0, "noise": 1.0} | settings)
    assert [".".join(map(str, e["loc"])) for e in caught.value.errors()] == [where]
