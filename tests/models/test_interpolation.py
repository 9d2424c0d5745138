"""Mixed predictions against probabilities that are multiplied out, fitted weights against closed
forms and a grid, and the theorems of docs/theory.md on hostile texts.
"""

import math
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.core.errors import TensorError
from coterie.core.tensors import from_bytes, to_bytes
from coterie.models.interpolation import (
    Follower,
    evidence,
    fit_weights,
    grid,
    interpolate,
    settled,
    simplest,
)

PROBABILITIES = st.one_of(
    st.sampled_from([0.0, 1e-300, 1e-30, 1e-9, 0.05, 0.5, 0.999, 1.0]), st.floats(1e-300, 1)
)


@st.composite
def texts(draw: st.DrawFn, least: int = 0, most: int = 40) -> Tensor:
    """Probabilities of up to `most` tokens in two or three parts, (P, T): any, or in long runs in
    which one part is right, so that what was right is wrong at once.
    """
    parts = draw(st.integers(2, 3))
    if draw(st.booleans()):
        token = st.lists(PROBABILITIES, min_size=parts, max_size=parts)
        tokens = draw(st.lists(token, min_size=least, max_size=most))
    else:
        runs = st.tuples(st.integers(1, 15), st.integers(0, parts - 1), PROBABILITIES)
        tokens = [
            [0.9 if part == right else wrong for part in range(parts)]
            for length, right, wrong in draw(st.lists(runs, min_size=1, max_size=4))
            for _ in range(length)
        ]
    return torch.tensor(tokens, dtype=torch.float64).reshape(-1, parts).T


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def log_of_mixture(probabilities: Tensor, weights: Tensor) -> list[float]:
    """Logarithms of each token's probability, by multiplying and adding."""
    return [
        log(sum(w * p for w, p in zip(weights.tolist(), token, strict=True)))
        for token in probabilities.T.tolist()
    ]


@given(texts(), st.integers(0, 65))
def test_a_mixture_is_the_weighted_mean_of_the_probabilities(text: Tensor, number: int) -> None:
    weights = grid(len(text))[number % len(grid(len(text)))]
    mixed = interpolate(text.log(), weights)
    assert mixed.tolist() == pytest.approx(log_of_mixture(text, weights), rel=1e-12, abs=1e-12)


def test_one_part_alone_is_that_part_to_the_bit_whatever_the_others_say() -> None:
    log_probs = seeded(1, 3, 4, 5).float().log_softmax(dim=-1)
    log_probs[2] = -math.inf
    mixed = interpolate(log_probs, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    assert torch.equal(mixed, log_probs[1])
    assert interpolate(log_probs, torch.tensor([0.0, 0.0, 1.0])).eq(-math.inf).all()


def test_a_mixture_of_distributions_is_one() -> None:
    mixed = interpolate(seeded(2, 2, 7, 11).log_softmax(dim=-1), torch.tensor([0.3, 0.7]))
    torch.testing.assert_close(mixed.exp().sum(dim=-1), torch.ones(7, dtype=torch.float64))


def density(text: Tensor, weights: Tensor, prior: float) -> float:
    """The logarithm of the posterior density, but for a constant; without impossible tokens."""
    logs = log_of_mixture(text[:, text.amax(dim=0) > 0], weights)
    of_prior = sum(log(weight) for weight in weights.tolist()) if prior else 0.0
    return sum(logs) + prior / len(text) * of_prior


@given(texts(), st.sampled_from([0.0, 0.5, 10.0]))
def test_fitted_weights_are_the_best_of_all(text: Tensor, prior: float) -> None:
    weights = fit_weights(text.log(), prior)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    best = max(density(text, mixture, prior) for mixture in grid(len(text)))
    assert density(text, weights, prior) >= best - 1e-3 - 1e-9 * abs(best)


@given(texts())
def test_the_evidence_for_mixtures_is_their_log_likelihood(text: Tensor) -> None:
    """With no token less likely than the least float64, and without those that are impossible."""
    mixtures = grid(len(text), 20)
    assert len(mixtures) <= 20
    possible = text[:, text.amax(dim=0) > 0]
    expected = [sum(max(log, -745) for log in log_of_mixture(possible, w)) for w in mixtures]
    assert evidence(text.log(), mixtures).tolist() == pytest.approx(expected)


@given(texts(), st.sampled_from([0.0, 1e-3, 10.0]))
def test_an_iteration_is_never_a_step_down(text: Tensor, prior: float) -> None:
    reached = [
        density(text, fit_weights(text.log(), prior, 0.0, steps), prior)
        for steps in (0, 1, 2, 3, 5, 8, 13, 21)
    ]
    assert all(later >= earlier - 1e-10 * abs(earlier) for earlier, later in pairwise(reached))


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("better", [0.0, 0.5])
def test_weights_of_a_long_text_are_found_soon(scale: float, better: float) -> None:
    """The first has expected likelihood ratio 1, so that the largest weight lies at the border."""
    noise = seeded(3, 100_000) * scale
    scores = torch.stack([torch.zeros_like(noise), noise - better * scale**2]) - 2
    weights = fit_weights(scores, 0.0, steps=200)
    mixture = weights @ scores.exp()
    assert float((scores.exp() / mixture).sum(dim=1).max()) <= 100_000 + 1e-3


def test_weights_of_two_tokens_are_the_root_of_a_linear_equation() -> None:
    a, b, c, d = 0.5, 0.1, 0.2, 0.4
    weights = fit_weights(torch.tensor([[a, b], [c, d]]).double().log(), 0.0, 1e-12)
    assert float(weights[0]) == pytest.approx(-(c / (a - c) + d / (b - d)) / 2)


def test_weights_where_each_token_has_one_part_are_dirichlet_s_mode() -> None:
    text = torch.eye(3, dtype=torch.float64)[:, [0, 0, 0, 0, 1, 1]]
    weights = fit_weights(text.log(), 9.0, 1e-12)
    expected = torch.tensor([4 + 3, 2 + 3, 0 + 3], dtype=torch.float64) / (6 + 9)
    torch.testing.assert_close(weights, expected)
    centre = torch.tensor([2 / 3, 1 / 3, 0], dtype=torch.float64)
    centred = fit_weights(text.log(), 9.0, 1e-12, centre=centre)
    expected = torch.tensor([4 + 6, 2 + 3, 0], dtype=torch.float64) / (6 + 9)
    torch.testing.assert_close(centred, expected)
    without = fit_weights(text.log(), 0.0, 1e-12)
    torch.testing.assert_close(without, torch.tensor([2 / 3, 1 / 3, 0], dtype=torch.float64))


def test_a_part_that_is_always_better_gets_all_weight_and_with_a_prior_nearly_all() -> None:
    scores = torch.tensor([[-1.0], [-2.0]]).double().expand(2, 1000)
    assert float(fit_weights(scores, 0.0)[0]) > 1 - 1e-5
    assert 0.98 < float(fit_weights(scores, 10.0)[0]) < 0.995


@pytest.mark.parametrize("prior", [0.0, 10.0])
def test_what_says_nothing_leaves_the_prior_s_mean(prior: float) -> None:
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    impossible = torch.full((3, 5), -math.inf)
    equal = torch.tensor([-1.0, -20.0, -3.0]).expand(3, 3)
    for scores in (torch.zeros(3, 0), impossible, equal):
        torch.testing.assert_close(fit_weights(scores, prior), even)
    scores = torch.tensor([[-1.0, -5.0], [-2.0, -1.0], [-4.0, -1.0]])
    more = torch.cat([scores, impossible], dim=1)
    assert torch.equal(fit_weights(scores, prior), fit_weights(more, prior))


HALVES = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_a_part_that_is_better_everywhere_stands_alone() -> None:
    scores = torch.stack([seeded(4, 1000) - 3, seeded(4, 1000) - 4 + 0.1 * seeded(5, 1000)])
    weights = fit_weights(scores, 10.0)
    assert 0 < float(weights[1]) < 0.05
    assert settled(scores, weights).tolist() == [1, 0]
    assert settled(scores.flip(0), weights.flip(0)).tolist() == [0, 1]
    three = torch.cat([scores, scores[1:] - 1])
    assert settled(three, fit_weights(three, 10.0)).tolist() == [1, 0, 0]


def test_parts_that_complete_each_other_are_mixed() -> None:
    """One is better, by far more than its error, and the mixture is better still."""
    scores = torch.tensor([[0.9, 0.9, 0.1], [0.1, 0.1, 0.9]]).log().repeat(1, 400)
    weights = fit_weights(scores, 10.0)
    assert settled(scores, weights) is weights


def test_without_a_clear_difference_nothing_is_settled() -> None:
    equal = seeded(6, 1, 1000).expand(2, 1000)
    assert settled(equal, HALVES) is HALVES
    few = torch.tensor([[-1.0], [-2.0]]).expand(2, 63)
    assert settled(few, HALVES) is HALVES
    assert settled(few.repeat(1, 2)[:, :64], torch.tensor([1 - 1e-4, 1e-4])).tolist() == [1, 0]
    assert settled(torch.zeros(2, 0), HALVES) is HALVES


def test_neighbouring_tokens_are_no_independent_observations() -> None:
    """Of 64 paragraphs 37 are for the first part: not sure, however long they are."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    paragraphs = torch.where(order < 37, 0.01, -0.01).double().repeat_interleave(100)
    scores = torch.stack([paragraphs - 3, -paragraphs - 3])
    weights = torch.tensor([0.99, 0.01], dtype=torch.float64)
    assert settled(scores, weights) is weights
    apart = scores[:, torch.randperm(6400, generator=torch.Generator().manual_seed(0))]
    assert settled(apart, weights).tolist() == [1, 0]


def test_a_part_for_which_something_that_happened_is_impossible_never_stands_alone() -> None:
    scores = torch.tensor([[-1.0], [-3.0]]).repeat(1, 1000)
    weights = fit_weights(scores, 10.0)
    assert settled(scores, weights).tolist() == [1, 0]
    for surprise in (-math.inf, -200.0):  # one token's gain is no more than its own error
        scores[0, 500] = surprise
        assert settled(scores, weights) is weights
    scores[:, 500] = -math.inf  # for all parts: it says nothing
    assert settled(scores, weights).tolist() == [1, 0]
    scores[1, 100:900] = -math.inf
    assert settled(scores, weights).tolist() == [1, 0]


def naive_simplest(scores: list[list[float]]) -> int:
    """The one-standard-error rule, block by block."""
    blocks = min(100, math.isqrt(len(scores[0])))
    length = len(scores[0]) // blocks
    best = max(range(len(scores)), key=lambda part: sum(scores[part]))
    for part, own in enumerate(scores):
        behind = [b - a for a, b in zip(own, scores[best], strict=True)]
        means = [sum(behind[k * length : (k + 1) * length]) / length for k in range(blocks)]
        mean = sum(means) / blocks
        spread = math.sqrt(sum((m - mean) ** 2 for m in means) / (blocks - 1))
        if mean <= spread / math.sqrt(blocks):
            return part
    raise AssertionError(best)


@pytest.mark.parametrize("behind", [0.0, 0.01, 0.03, 0.06, 0.1, 0.3])
def test_the_simplest_part_within_one_standard_error_is_chosen(behind: float) -> None:
    for seed in range(5):
        noise = seeded(seed, 3, 1000)
        scores = torch.stack([noise[0] - 2 * behind, noise[1] - behind, noise[2]]) - 5
        assert simplest(scores) == naive_simplest(scores.tolist())


def test_more_is_chosen_only_if_it_is_surely_better() -> None:
    noise = seeded(1, 2, 2000)
    assert simplest(torch.stack([noise[0], noise[0] + 0.01])) == 1  # paired: always better
    assert simplest(torch.stack([noise[0], noise[1] + 0.01])) == 0
    assert simplest(torch.stack([noise[0], noise[0] - 1])) == 0
    assert simplest(torch.tensor([[-2.0], [-1.0]]).repeat(1, 63)) == 0  # too few tokens to tell
    impossible = torch.stack([noise[0], noise[0]])
    impossible[0, ::2] = -math.inf
    assert simplest(impossible) == 1
    assert simplest(torch.zeros(2, 0)) == 0


def test_the_grid_is_even_and_has_every_part_alone() -> None:
    assert [len(grid(parts)) for parts in (1, 2, 3, 4, 70)] == [1, 21, 66, 56, 70]
    assert grid(2)[:, 0].tolist() == [k / 20 for k in range(21)]
    for parts in range(1, 8):
        mixtures = grid(parts)
        torch.testing.assert_close(mixtures.sum(dim=1), torch.ones(len(mixtures)).double())
        assert len({tuple(mixture) for mixture in mixtures.tolist()}) == len(mixtures) <= 66
        assert {tuple(row) for row in torch.eye(parts).tolist()} <= set(
            map(tuple, mixtures.tolist())
        )


def most_regret(mass: float, tokens: int, share: bool) -> float:
    """The nats that a mixture with this mass at the start can be ahead in all."""
    if not share or not tokens:
        return -math.log(mass)
    exact = math.log(tokens) + math.lgamma(mass) + math.lgamma(tokens)
    exact -= math.lgamma(tokens + mass)
    assert exact <= -math.log(mass) + math.log(tokens) + 1e-12
    return exact


def check_theorem(text: Tensor, follower: Follower, predicted: Tensor, share: bool) -> None:
    """Each mixture against what was predicted."""
    total, tokens = float(predicted.sum()), text.shape[1]
    assert not math.isnan(total)
    for mixture, mass in zip(follower.mixtures, follower.log_prior.exp().tolist(), strict=True):
        of_mixture = sum(log_of_mixture(text, mixture))
        slack = 1e-9 * (1 + abs(of_mixture)) if of_mixture > -math.inf else 0.0
        assert total >= of_mixture - most_regret(mass, tokens, share) - slack


@given(texts(), st.booleans(), st.sampled_from([None, 0, 1, 2]))
def test_no_mixture_is_ahead_by_more_than_the_theorem_says(
    text: Tensor, share: bool, start: int | None
) -> None:
    starts = grid(len(text))[[0, 7, 13]] * 0.97 + 0.03 / len(text)
    follower = Follower(len(text), None if start is None else starts[start], share)
    check_theorem(text, follower, follower.observe(text.log()), share)


@given(st.integers(2, 3), st.sampled_from([0.0, 1e-300, 1e-3, 0.4]), st.booleans())
def test_nor_if_the_text_is_written_against_the_weights(
    parts: int, wrong: float, share: bool
) -> None:
    """Whatever part has the largest weight is wrong in the next token."""
    follower, tokens, predicted = Follower(parts, share=share), [], []
    for _ in range(60):
        token = torch.ones(parts, 1, dtype=torch.float64)
        token[follower.weights.argmax()] = wrong
        tokens.append(token)
        predicted.append(follower.observe(token.log()))
    check_theorem(torch.cat(tokens, dim=1), follower, torch.cat(predicted), share)


def test_the_theorem_holds_where_probabilities_are_below_what_a_float_holds() -> None:
    scores = torch.full((2, 40_000), -math.log(2.0), dtype=torch.float64)
    scores[0, 0], scores[1, 1:] = -1e4, -1.0
    for share in (False, True):
        total = float(Follower(2, share=share).observe(scores).sum())
        best = float((scores[:, None] + grid(2).T.log()[:, :, None]).logsumexp(0).sum(1).max())
        assert total >= best - most_regret(1 / 21, 40_000, share) - 1e-6


def test_the_bound_is_that_of_a_text_for_which_all_but_one_mixture_is_impossible() -> None:
    """So no smaller one holds for any experts: here mixtures are replaced by one-hot ones."""
    for share, tokens in product((False, True), (1, 2, 50)):
        follower = Follower(3, share=share)
        follower.mixtures = torch.eye(3, dtype=torch.float64)
        follower.log_prior = follower.log_posterior = torch.full((3,), 1 / 3).double().log()
        text = torch.tensor([[1.0], [0.0], [0.0]]).expand(3, tokens)
        lost = -float(follower.observe(text.log()).sum())
        assert lost == pytest.approx(most_regret(1 / 3, tokens, share), rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=4))
def test_mixtures_that_take_turns_cost_as_much_for_each_turn(runs: list[tuple[int, int]]) -> None:
    """Each run has tokens of the mixture that is best in it: 9 in 10 of the larger weight."""
    text, of_turns = [], 0.0
    for length, number in runs:
        mixture = grid(2)[number]
        tokens = torch.tensor([[0.8, 0.01], [0.01, 0.8]], dtype=torch.float64)
        run = tokens[:, (torch.arange(length) % 10 == 0).long() ^ int(number < 10)]
        of_turns += sum(log_of_mixture(run, mixture))
        text.append(run)
    ends = torch.tensor([length for length, _ in runs]).cumsum(0).tolist()
    cost = len(runs) * math.log(21) + sum(math.log(end) for end in ends)
    total = float(Follower(2).observe(torch.cat(text, dim=1).log()).sum())
    assert total >= of_turns - cost - 1e-9


def test_without_a_share_it_is_bayes_by_multiplied_fractions() -> None:
    text = [(Fraction(1, 2), Fraction(1, 7)), (Fraction(0), Fraction(1, 3)), (Fraction(1), 0)]
    mixtures = [(Fraction(k, 20), Fraction(20 - k, 20)) for k in range(21)]
    likelihoods = [Fraction(1, 21)] * 21
    expected = []
    for token in text:
        before = sum(likelihoods)
        for k, (first, second) in enumerate(mixtures):
            likelihoods[k] *= first * token[0] + second * token[1]
        expected.append(math.log(sum(likelihoods) / before))
    scores = torch.tensor([[float(p) for p in token] for token in text]).double().T.log()
    follower = Follower(2, share=False)
    assert follower.observe(scores).tolist() == pytest.approx(expected, rel=1e-6)
    mean = sum(p * first for p, (first, _) in zip(likelihoods, mixtures, strict=True))
    assert float(follower.weights[0]) == pytest.approx(float(mean / sum(likelihoods)), rel=1e-6)


def test_with_a_share_it_is_the_sum_over_all_sequences_of_mixtures() -> None:
    """A sequence's mass: 1/K, times 1 - a if the mixture stays, and a/K whichever comes next."""
    text = torch.tensor([[0.5, 0.1, 0.7], [0.2, 0.6, 0.01]], dtype=torch.float64)
    of_token = [[log_of_mixture(text, mixture)[t] for mixture in grid(2)] for t in range(3)]
    total = 0.0
    for sequence in product(range(21), repeat=3):
        mass = 1 / 21
        for t, (k, following) in enumerate(pairwise(sequence)):
            mass *= (1 - 1 / (t + 2)) * (k == following) + 1 / (t + 2) / 21
        total += mass * math.exp(sum(of_token[t][k] for t, k in enumerate(sequence)))
    predicted = Follower(2).observe(text.log())
    assert float(predicted.sum()) == pytest.approx(math.log(total), rel=1e-12)


@given(texts(), st.booleans())
def test_what_it_predicts_is_the_mixture_with_its_weights_token_by_token(
    text: Tensor, share: bool
) -> None:
    at_once, one_by_one = Follower(len(text), share=share), Follower(len(text), share=share)
    predicted = at_once.observe(text.log()).tolist()
    for t, expected in enumerate(predicted):
        mixed = interpolate(text[:, t].log(), one_by_one.weights)
        assert float(mixed) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert one_by_one.observe(text[:, [t]].log()).item() == expected
    assert torch.equal(at_once.log_posterior, one_by_one.log_posterior)
    assert one_by_one.tokens == int((text.amax(dim=0) > 0).sum())


def test_an_impossible_token_changes_nothing() -> None:
    follower = Follower(2)
    follower.observe(torch.tensor([[-1.0, -2.0], [-3.0, -1.0]]))
    before = follower.weights
    assert follower.observe(torch.full((2, 2), -math.inf)).tolist() == [-math.inf] * 2
    assert torch.equal(follower.weights, before)
    assert follower.tokens == 2


def test_weights_follow_a_text_that_changes() -> None:
    follower = Follower(2)
    scores = torch.tensor([[0.4], [0.2]]).log().repeat(1, 300)
    assert follower.weights.tolist() == pytest.approx([0.5, 0.5])
    follower.observe(scores)
    assert float(follower.weights[0]) > 0.95
    follower.observe(scores.flip(0)[:, :30])
    assert float(follower.weights[1]) > 0.9


def test_it_starts_from_fitted_weights_at_half_of_the_mass() -> None:
    start = torch.tensor([0.87, 0.13], dtype=torch.float64)
    weights = Follower(2, start).weights
    torch.testing.assert_close(weights, (start + 0.5) / 2)


def test_it_resumes_bit_for_bit_from_a_file() -> None:
    scores = seeded(8, 3, 50) - 3
    start = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    whole, first, second = (Follower(3, start) for _ in range(3))
    predicted = whole.observe(scores)
    first.observe(scores[:, :20])
    second.resume(from_bytes(to_bytes(first.state())))
    assert torch.equal(second.observe(scores[:, 20:]), predicted[20:])
    assert torch.equal(second.weights, whole.weights)


def test_a_state_of_another_follower_or_of_none_is_refused() -> None:
    follower = Follower(2)
    states = [{}, Follower(3).state(), Follower(2, HALVES).state()]
    for name, value in (
        ("tokens", torch.tensor(-2)),
        ("log_posterior", torch.full((21,), math.nan, dtype=torch.float64)),
        ("log_posterior", torch.zeros(21, dtype=torch.float64)),
    ):
        states.append(follower.state() | {name: value})
    for state in states:
        with pytest.raises(TensorError, match="weights that follow a text"):
            follower.resume(state)
    assert follower.tokens == 0
