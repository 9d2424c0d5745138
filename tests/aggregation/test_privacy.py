"""Differential privacy of what is shared: clipping and noise against their definitions, epsilon
against closed forms and integrals.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import integrate, optimize, special, stats

from coterie.aggregation.accountant import Accountant, epsilon_of_gaussians, rdp_of_drawn
from coterie.aggregation.noise import Source
from coterie.aggregation.privacy import Adaptive, Privacy, central, clipped, local
from coterie.core.errors import Refused, TensorError
from coterie.core.tensors import Tensors, dot, norm

PAGE = Path(__file__).parents[2] / "docs/privacy.md"


def vectors(*values: float) -> Tensors:
    """The values in two tensors, one of them a matrix."""
    return {
        "b": torch.tensor(values[:1], dtype=torch.float32),
        "A": torch.tensor([values[1:]], dtype=torch.float32),
    }


def source(seed: int = 0) -> Source:
    return Source.seeded(seed, "tests")


def accountant(
    *exchanges: tuple[int, int],
    where: str = "central",
    z: float = 1.0,
    clients: int = 100,
    **settings: float,
) -> Accountant:
    """One that has counted these exchanges."""
    pytest.importorskip("opacus")
    found = Accountant(Privacy(where=where, clip=1.0, noise=z, **settings), clients)
    for participants, population in exchanges:
        found.spend(participants, population)
    return found


# Clipping


def test_an_update_beyond_the_norm_keeps_its_direction() -> None:
    sent, reply = vectors(1, 1, 1), vectors(1, 4, 5)  # an update of (0, 3, 4)
    found, cut = clipped(reply, sent, 2.5)
    assert cut
    assert torch.equal(found["b"], torch.tensor([1.0]))
    torch.testing.assert_close(found["A"], torch.tensor([[2.5, 3.0]]))


@pytest.mark.parametrize("update", [(0.0, 0.0, 0.0), (0.0, 3.0, 4.0)])
def test_an_update_within_the_norm_is_exactly_the_reply(update: tuple[float, ...]) -> None:
    sent = vectors(0.1, 0.2, 0.3)
    reply = {name: sent[name] + t for name, t in vectors(*update).items()}
    found, cut = clipped(reply, sent, 5.001)
    assert not cut
    assert all(torch.equal(found[name], reply[name]) for name in reply)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=8), st.floats(1e-3, 1e3))
def test_no_update_leaves_the_ball(update: list[float], most: float) -> None:
    zero = vectors(*[0.0] * len(update))
    found, cut = clipped(vectors(*update), zero, most)
    assert norm(found) <= most * (1 + 1e-6)
    assert cut == (norm(vectors(*update)) > most)


def test_integers_and_what_was_only_sent_are_left_alone() -> None:
    sent, reply = (
        {"A": torch.zeros(3), "other": torch.zeros(2)},
        {"A": torch.ones(3), "samples": torch.tensor(7)},
    )
    privacy = Privacy(where="central", clip=0.1, noise=1.0)
    for found in (clipped(reply, sent, 0.1)[0], local(reply, sent, privacy, source())):
        assert found.keys() == reply.keys()
        assert found["samples"] is reply["samples"]
    assert torch.equal(reply["A"], torch.ones(3))


def test_what_has_no_update_does_not_leave_unprotected() -> None:
    with pytest.raises(TensorError, match="'new'"):
        clipped({"A": torch.ones(3), "new": torch.ones(3)}, {"A": torch.zeros(3)}, 1.0)
    with pytest.raises(TensorError, match="'A'"):
        clipped({"A": torch.ones(3)}, {"A": torch.zeros(1)}, 1.0)


# Noise


def drawn_replies(n: int, seed: int = 0) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Replies of n clients with updates of unlike norms, and what they had got; not in the order
    of the ids.
    """
    rng = np.random.default_rng(seed)
    ids = [f"c{i}" for i in rng.permutation(n)]
    to = {i: vectors(*rng.normal(size=5).astype(np.float32)) for i in ids}
    replies = {
        i: {
            name: t + (k + 1) * torch.tensor(rng.normal(size=t.shape), dtype=t.dtype)
            for name, t in to[i].items()
        }
        for k, i in enumerate(ids)
    }
    return replies, to


def test_without_noise_the_mean_is_that_of_naively_clipped_updates() -> None:
    replies, to = drawn_replies(6)
    found, clip = central(replies, to, Privacy(where="central", clip=2.0, noise=0), 2.0, source())
    assert clip == 2.0
    assert list(found) == list(replies)

    def flat(named: Tensors) -> np.ndarray:
        return torch.cat([named["b"], named["A"][0]]).double().numpy()

    naive = []
    for i in replies:
        update = flat(replies[i]) - flat(to[i])
        naive.append(flat(to[i]) + update / max(1.0, float(np.linalg.norm(update)) / 2.0))
    np.testing.assert_allclose(
        np.mean([flat(found[i]) for i in found], axis=0),
        np.mean(naive, axis=0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("n", [1, 4, 25])
def test_the_mean_has_noise_of_z_c_over_n(n: int) -> None:
    z, clip, d = 1.5, 0.4, 4000
    sent = {"A": torch.ones(d), "b": torch.ones(d)}
    replies = {f"c{i}": dict(sent) for i in range(n)}  # zero updates: what is left is the noise
    found, _ = central(
        replies,
        dict.fromkeys(replies, sent),
        Privacy(where="central", clip=9.0, noise=z),
        clip,
        source(),
    )
    mean = torch.cat(
        [torch.stack([found[i][name] for i in found]).mean(dim=0) - 1 for name in sent]
    )
    assert float(mean.std()) == pytest.approx(
        z * clip / n, rel=4 / math.sqrt(2 * 2 * d)
    )  # four standard errors
    assert abs(float(mean.mean())) < 4 * z * clip / n / math.sqrt(2 * d)
    assert (
        abs(dot({"x": mean[:d]}, {"x": mean[d:]})) < 4 * math.sqrt(d) * (z * clip / n) ** 2
    )  # no tensor has another's noise


def test_local_noise_is_z_c_on_every_coordinate() -> None:
    d = 8000
    found = local(
        {"A": torch.full((d,), 5.0)},
        {"A": torch.zeros(d)},
        Privacy(where="local", clip=2.0, noise=0.5),
        source(),
    )["A"]
    assert float(found.std()) == pytest.approx(0.5 * 2.0, rel=4 / math.sqrt(2 * d))
    assert float(found.mean()) == pytest.approx(
        2 / math.sqrt(d), abs=4 / math.sqrt(d)
    )  # the update of norm 2


def test_noise_depends_on_the_seed_and_the_ids_alone() -> None:
    replies, to = drawn_replies(5)
    privacy = Privacy(where="central", clip=1.0, noise=1.0, adaptive=Adaptive(noise=2.0))
    one, clip = central(replies, to, privacy, 1.0, source(3))
    turned = {
        i: dict(sorted(replies[i].items())) for i in sorted(replies)
    }  # ids and names in another order
    other, same = central(turned, to, privacy, 1.0, source(3))
    assert clip == same
    assert all(torch.equal(one[i][name], other[i][name]) for i in one for name in one[i])
    assert any(
        not torch.equal(one[i]["A"], t["A"])
        for i, t in central(replies, to, privacy, 1.0, source(4))[0].items()
    )


def test_nobody_replied() -> None:
    privacy = Privacy(where="central", clip=1.0, noise=1.0, adaptive=Adaptive(noise=2.0))
    assert central({}, {}, privacy, 0.7, source()) == ({}, 0.7)


# The adaptive norm


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [1e-2, 1e2])
def test_the_norm_finds_its_quantile(quantile: float, start: float) -> None:
    rng, random, clip = np.random.default_rng(0), source(), start
    privacy = Privacy(
        where="central", clip=start, noise=0, adaptive=Adaptive(quantile=quantile, noise=2.0)
    )
    trace = []
    for _ in range(150):
        replies = {
            f"c{i}": {"A": torch.tensor([x])}
            for i, x in enumerate(rng.lognormal(0.0, 1.0, size=40))
        }
        _, clip = central(
            replies,
            {i: {"A": torch.zeros(1, dtype=torch.float64)} for i in replies},
            privacy,
            clip,
            random,
        )
        trace.append(clip)
    assert stats.lognorm(s=1.0).cdf(np.exp(np.mean(np.log(trace[-50:])))) == pytest.approx(
        quantile, abs=0.05
    )


def test_the_count_takes_its_part_of_the_noise_multiplier() -> None:
    privacy = Privacy(where="central", clip=1.0, noise=1.2, adaptive=Adaptive(noise=2.0))
    # Together the noisy sum, of sensitivity C, and the noisy count, of bits around 1/2, are one
    # Gaussian mechanism with multiplier z.
    assert privacy.update_noise**-2 + (0.5 / 2.0) ** 2 == pytest.approx(1.2**-2)
    sent = {"A": torch.zeros(20_000)}
    found, _ = central({"a": sent}, {"a": sent}, privacy, 3.0, source())
    assert float(found["a"]["A"].std()) == pytest.approx(3.0 * privacy.update_noise, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"where": "local", "adaptive": {"noise": 5.0}}, "adaptive"),
        (
            {"adaptive": {"noise": 0.5}},
            "adaptive",
        ),  # 2 sigma_b = z: nothing is left for the updates
        ({"adaptive": {}}, "adaptive.noise"),
        ({"clip": 0.0}, "clip"),
        ({"noise": -1.0}, "noise"),
        ({"delta": 1.0}, "delta"),
        ({"epsilon": 8.0}, "epsilon"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Privacy.model_validate({"where": "central", "clip": 1.0, "noise": 1.0} | settings)
    assert [".".join(map(str, e["loc"])) for e in caught.value.errors()] == [where]


# Accounting


def exact_delta(epsilon: float, mu: float) -> float:
    """Balle and Wang (2018), Theorem 8, for sensitivity mu and noise 1."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(
        epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    )


def exact_epsilon(mu: float, delta: float) -> float:
    return optimize.brentq(lambda e: exact_delta(e, mu) - delta, 0, 450, xtol=1e-10)


@pytest.mark.parametrize(
    ("steps", "z", "delta"),
    [(1, 1.0, 1e-5), (1, 4.0, 1e-6), (100, 5.0, 1e-3), (1000, 20.0, 1e-6), (50, 0.7, 1e-4)],
)
def test_full_participation_is_the_closed_form_of_the_gaussian_mechanism(
    steps: int, z: float, delta: float
) -> None:
    found = accountant(*[(100, 100)] * steps, z=z).epsilon(delta)
    assert found == pytest.approx(exact_epsilon(math.sqrt(steps) / z, delta), rel=1e-6)


def test_a_local_reply_is_against_any_other_of_its_norm() -> None:
    found = accountant((10, 100), (10, 100), where="local", z=8.0)
    assert found.epsilon(1e-5) == pytest.approx(
        exact_epsilon(2 * math.sqrt(2) / 8.0, 1e-5), rel=1e-6
    )


def test_opacus_renyi_accountant_is_above_but_near() -> None:
    opacus = pytest.importorskip("opacus.accountants")
    other = opacus.RDPAccountant()
    for _ in range(30):
        other.step(noise_multiplier=6.0, sample_rate=1.0)
    found = accountant(*[(7, 7)] * 30, z=6.0).epsilon(1e-5)
    assert found <= other.get_epsilon(1e-5) <= 1.15 * found


def naive_renyi_epsilon(rate: float, sigma: float, steps: int, delta: float) -> float:
    """Wang et al. (2019), Theorem 9 as it is printed, at whole orders, converted as by Balle et
    al. (2020), Theorem 21.
    """
    candidates = []
    for alpha in range(2, 80):
        total = 1.0 + rate**2 * special.binom(alpha, 2) * min(
            4 * (math.exp(1 / sigma**2) - 1), 2 * math.exp(1 / sigma**2)
        )
        for j in range(3, alpha + 1):
            total += rate**j * special.binom(alpha, j) * 2 * math.exp((j - 1) * j / (2 * sigma**2))
        rdp = steps * math.log(total) / (alpha - 1)
        candidates.append(
            rdp + math.log((alpha - 1) / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)
        )
    return min(candidates)


@pytest.mark.parametrize(("drawn", "z", "steps"), [(10, 8.0, 200), (50, 10.0, 100), (20, 6.0, 300)])
def test_drawn_clients_are_counted_as_the_paper_bounds_them(
    drawn: int, z: float, steps: int
) -> None:
    found, naive = (
        accountant(*[(drawn, 1000)] * steps, z=z).epsilon(1e-5),
        naive_renyi_epsilon(drawn / 1000, z / 2, steps, 1e-5),
    )
    assert found <= naive + 1e-9  # orders between the whole ones can only help
    assert found >= 0.97 * naive


def mixture(x: np.ndarray | float, rate: float, sigma: float, usual: float, own: float) -> Any:
    """The log density of what an exchange sends, by whether a client was drawn: around what all
    others give, or around what it gives.
    """
    parts = [
        math.log1p(-rate) + stats.norm.logpdf(x, usual, sigma),
        math.log(rate) + stats.norm.logpdf(x, own, sigma),
    ]
    return special.logsumexp(parts, axis=0)


PAIRS = [
    (0.0, 0.5, -0.5),
    (0.5, 0.5, -0.5),
    (0.5, -0.5, 0.5),
]  # what others give, what the client gives, and what it gives instead


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("sigma", [0.6, 1.0, 4.0])
@pytest.mark.parametrize("order", [1.5, 2.0, 3.7, 8.0])
def test_the_bound_is_above_the_divergence_of_true_neighbours(
    order: float, sigma: float, rate: float, pair: tuple[float, ...]
) -> None:
    usual, one, other = pair

    def integrand(x: float) -> float:
        return math.exp(
            order * mixture(x, rate, sigma, usual, one)
            + (1 - order) * mixture(x, rate, sigma, usual, other)
        )

    moment, _ = integrate.quad(integrand, -12 * sigma - order, 12 * sigma + order, limit=400)
    true, bound = math.log(moment) / (order - 1), rdp_of_drawn(rate, sigma, order)
    assert 0 < true <= bound <= order / (2 * sigma**2)


def epsilon_of_neighbours(
    rate: float,
    sigma: float,
    steps: int,
    delta: float,
    pair: tuple[float, ...],
    width: float = 1e-3,
) -> float:
    """Epsilon of two true neighbours after so many exchanges: the privacy loss, in cells of a
    width, rounded down, composed by Fourier transforms (Koskela, Jälkö and Honkela, 2020).
    """
    usual, one, other = pair
    x = np.linspace(-12 * sigma - 1, 12 * sigma + 1, 100_001)
    middle = (x[1:] + x[:-1]) / 2
    masses = np.exp(mixture(middle, rate, sigma, usual, one)) * np.diff(x)
    losses = mixture(middle, rate, sigma, usual, one) - mixture(middle, rate, sigma, usual, other)
    cells = np.floor(losses / width).astype(int)
    size = 1 << 17  # losses from -65 to 65
    composed = np.fft.irfft(np.fft.rfft(np.bincount(cells % size, masses, size)) ** steps, size)
    loss = np.fft.fftfreq(size, 1 / size) * width

    def found(epsilon: float) -> float:
        beyond = loss > epsilon
        return float(-(composed[beyond] * np.expm1(epsilon - loss[beyond])).sum())

    return optimize.brentq(lambda epsilon: found(epsilon) - delta, 0, 30)


def test_the_second_formulation_agrees_where_nobody_is_drawn() -> None:
    for sigma, steps in ((4.0, 30), (2.0, 3)):
        found = epsilon_of_neighbours(1 - 1e-12, sigma, steps, 1e-5, (0.0, 0.5, -0.5))
        assert found == pytest.approx(
            exact_epsilon(math.sqrt(steps) / sigma, 1e-5), abs=2e-3 * steps
        )


@pytest.mark.parametrize(
    ("drawn", "clients", "z", "steps"),
    [(500, 10_000, 4.0, 30), (1000, 10_000, 3.0, 30), (10, 1000, 2.0, 100)],
)
def test_what_is_claimed_of_drawn_clients_is_above_what_neighbours_spend(
    drawn: int, clients: int, z: float, steps: int
) -> None:
    claimed = accountant(*[(drawn, clients)] * steps, z=z, clients=clients).epsilon(1e-5)
    true = max(epsilon_of_neighbours(drawn / clients, z / 2, steps, 1e-5, pair) for pair in PAIRS)
    assert true < claimed < 4 * true  # a bound, and not an idle one
    assert claimed < exact_epsilon(math.sqrt(steps) / (z / 2), 1e-5)


def test_everybody_drawn_is_nobody_drawn() -> None:
    assert rdp_of_drawn(1.0, 2.0, 3.0) == 3.0 / 8
    assert rdp_of_drawn(1 - 1e-12, 2.0, 3.0) == pytest.approx(3.0 / 8)


def test_one_exchange_with_a_part_changes_the_neighbours_of_all() -> None:
    full = accountant(*[(100, 100)] * 10, z=8.0)
    mixed = accountant(*[(100, 100)] * 10, (1, 100), z=8.0)
    assert full.multiplier == 8.0
    assert mixed.multiplier == 4.0
    replaced = exact_epsilon(math.sqrt(10) / 4.0, 1e-5)
    assert replaced < mixed.epsilon(1e-5) <= exact_epsilon(math.sqrt(11) / 4.0, 1e-5) + 1e-6


@pytest.mark.parametrize("drawn", [1, 30, 98])
@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize("z", [2.0, 6.0])
def test_epsilon_grows_with_what_is_spent_and_drawing_never_hurts(
    drawn: int, steps: int, z: float
) -> None:
    found = accountant(*[(drawn, 100)] * steps, z=z)
    before = found.epsilon(1e-5)
    assert 0 < before <= accountant(*[(drawn + 1, 100)] * steps, z=z).epsilon(1e-5)
    assert before <= accountant(*[(100, 100)] * steps, z=z / 2).epsilon(1e-5)
    found.spend(drawn, 100)
    assert before < found.epsilon(1e-5)


def test_the_state_is_json_and_resumes() -> None:
    one = accountant((3, 10), (3, 10), (10, 10), (0, 10), z=5.0)
    runs = json.loads(json.dumps(one.runs))
    assert runs == [[2, 0.3], [1, 1.0]]
    again = Accountant(one.privacy, one.clients, runs)
    for found in (one, again):
        found.spend(3, 10)
    assert again.runs == one.runs == [(3, 0.3), (1, 1.0)]
    assert again.summary() == one.summary()


def test_what_unlike_runs_have_spent_adds_up() -> None:
    pytest.importorskip("opacus")
    assert epsilon_of_gaussians([], 1e-6) == 0
    uses = [(10, 1.0, 4.0), (25, 1.0, 7.5), (2, 1.0, 4.0)]
    mu = math.sqrt(12 / 4.0**2 + 25 / 7.5**2)
    before = epsilon_of_gaussians(uses, 1e-6)
    assert before == pytest.approx(exact_epsilon(mu, 1e-6), rel=1e-6)
    uses.append((5, 0.01, 3.0))
    found = epsilon_of_gaussians(uses, 1e-6)
    assert before < found < exact_epsilon(math.sqrt(mu**2 + 5 / 9), 1e-6)
    assert epsilon_of_gaussians([*uses, (1, 1.0, 0.0)], 1e-6) == math.inf


def test_nothing_spent_and_no_noise() -> None:
    assert accountant().epsilon(1e-5) == 0
    for exchange in ((5, 5), (2, 5)):
        none = accountant(exchange, z=0.0)
        assert none.epsilon(1e-5) == math.inf
        assert none.summary().epsilon is None
    assert accountant(*[(100, 100)] * 1000, z=0.5).epsilon(1e-5) == math.inf
    for exchange in ((100, 100), (5, 100)):
        assert accountant(exchange, z=100.0).epsilon(0.5) == 0
    with pytest.raises(ValueError, match="3 participants of 2"):
        accountant((3, 2))


def test_the_summary_names_what_was_assumed() -> None:
    full, drawn, own = (
        accountant((100, 100)),
        accountant((5, 100)),
        accountant((5, 100), where="local", delta=1e-6),
    )
    assert full.summary().to_json().keys() == {
        "epsilon",
        "delta",
        "where",
        "noise",
        "clip",
        "sampling",
        "experiment",
        "assumes",
        "covers",
    }
    assert full.summary().delta == pytest.approx(100**-1.1)
    assert full.summary().epsilon == full.epsilon(100**-1.1)
    assert own.summary().delta == 1e-6
    for found, words in (
        (full, "added or removed"),
        (drawn, "without replacement"),
        (own, "took part in all"),
    ):
        assert words in found.summary().sampling
    assert "the server too" in own.summary().covers
    assert "the server too" not in full.summary().covers
    assert ["who was drawn" in found.summary().assumes for found in (full, drawn, own)] == [
        False,
        True,
        False,
    ]
    drawn.experiment = True
    assert "an experiment: whoever has the recipe's seed" in drawn.summary().assumes
    json.dumps([full.summary().to_json(), drawn.summary().to_json()], allow_nan=False)


def test_one_client_needs_a_delta() -> None:
    with pytest.raises(Refused, match=r"privacy\.delta"):
        accountant(clients=1)
    assert accountant(clients=1, delta=1e-5).delta == 1e-5


def test_a_missing_library_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(Refused, match=r"pip install -e '\.\[privacy\]'"):
        Accountant(Privacy(where="central", clip=1.0, noise=1.0), 10)


# The page


def test_the_figures_on_the_page_are_the_accountants() -> None:
    page = PAGE.read_text()
    cells = (
        r"^\| (central|local) \| (\d+) of (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) C \|"
    )
    rows = re.findall(cells, page, re.MULTILINE)
    section = page.partition("## Choosing z and C")[2].partition("### A thousand clients")[0]
    (d,) = {int(found.replace(",", "")) for found in re.findall(r"d = ([\d,]+\d)", section)}
    assert len(rows) == 8
    for where, participants, clients, exchanges, z, epsilon, noise in rows:
        n = int(participants)
        found = accountant(
            *[(n, int(clients))] * int(exchanges),
            where=where,
            z=float(z),
            clients=int(clients),
            delta=1e-5,
        )
        assert found.summary().epsilon == pytest.approx(float(epsilon), abs=0.051), (
            where,
            participants,
            z,
        )
        deviation = float(z) / (n if where == "central" else math.sqrt(n))
        assert deviation * math.sqrt(d) == pytest.approx(float(noise), rel=0.02)
