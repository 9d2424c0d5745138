"""Rules that combine what clients sent: against loops, and against clients who mean ill."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.aggregation import robust
from coterie.aggregation.collaboration import CHUNK
from coterie.aggregation.means import SAMPLES, Combining, Mean, by_holders
from coterie.aggregation.robust import (
    ClippedMean,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
)
from coterie.client.blueprint import Blueprint
from coterie.core.errors import RecipeError, TensorError
from coterie.core.tensors import Tensors
from coterie.methods.fedavg import FedAvg
from coterie.runs.recipes.recipe import validate

Vectors = NDArray[np.float64]  # (n, d)
RULES: dict[str, Combining] = {
    "mean": Mean(),
    "mean by samples": Mean(weighting="samples"),
    "median": Median(),
    "trimmed mean": TrimmedMean(trim=0.25),
    "krum": Krum(attackers=2),
    "multi-krum": MultiKrum(attackers=2),
    "multi-krum of two": MultiKrum(attackers=1, keep=2),
    "geometric median": GeometricMedian(),
    "clipped mean": ClippedMean(),
    "clipped mean, given": ClippedMean(norm=2.5),
}
SHAPES = {"w": (3, 5), "b": (4,), "scalar": ()}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())
SEEDS = st.integers(0, 10_000)


def named(vector: Sequence[float] | Vectors, dtype: torch.dtype = torch.float64) -> Tensors:
    """One vector as tensors of `SHAPES`."""
    flat = torch.as_tensor(np.asarray(vector)).to(dtype)
    parts = torch.split(flat, [math.prod(shape) for shape in SHAPES.values()])
    return {
        name: part.reshape(shape) for part, (name, shape) in zip(parts, SHAPES.items(), strict=True)
    }


def flat(tensors: Tensors) -> Vectors:
    assert tensors.keys() == SHAPES.keys()
    found: Vectors = torch.cat([tensors[name].flatten() for name in SHAPES]).double().numpy()
    return found


def replies(models: Vectors, dtype: torch.dtype = torch.float64) -> dict[str, Tensors]:
    return {
        f"c{k:02}": named(model, dtype) | {SAMPLES: torch.tensor(k + 1)}
        for k, model in enumerate(models)
    }


def combined(rule: Combining, models: Vectors, around: Vectors | None = None) -> Vectors:
    return flat(rule.combine(replies(models), {} if around is None else named(around)))


# Naive formulations.


def naive_median(models: Vectors, around: Vectors) -> Vectors:
    return np.array([np.median(column) for column in models.T])


def naive_trimmed(models: Vectors, around: Vectors, share: float = 0.25) -> Vectors:
    n, k = len(models), 0
    while k < share * n and 2 * (k + 1) < n:
        k += 1
    return np.array([sum(sorted(column)[k : n - k]) / (n - 2 * k) for column in models.T])


def krum_order(models: Vectors, f: int) -> list[int]:
    """The clients from the best score on, by explicit loops (Blanchard et al. 2017, Section 4)."""
    n = len(models)
    while f and n < 2 * f + 3:
        f -= 1
    scores = []
    for i in range(n):
        squared = sorted(
            float(sum((a - b) ** 2 for a, b in zip(models[i], models[j], strict=True)))
            for j in range(n)
            if j != i
        )
        scores.append(sum(squared[: max(n - f - 2, 0)]))
    return sorted(range(n), key=lambda i: scores[i])


def naive_multikrum(models: Vectors, f: int, keep: int | None) -> Vectors:
    n = len(models)
    order = krum_order(models, f)
    while f and n < 2 * f + 3:
        f -= 1
    found: Vectors = np.mean([models[i] for i in order[: min(keep or n, n - f)]], axis=0)
    return found


def naive_clipped(models: Vectors, around: Vectors, norm: float | None = None) -> Vectors:
    norms = [math.sqrt(sum(u * u for u in model - around)) for model in models]
    tau = float(np.median(norms)) if norm is None else norm
    return around + sum(
        (m - around) * (1.0 if s <= tau else tau / s) for m, s in zip(models, norms, strict=True)
    ) / len(models)  # type: ignore[no-any-return]


NAIVE: dict[str, Callable[[Vectors, Vectors], Vectors]] = {
    "mean": lambda models, around: np.mean(models, axis=0),
    "mean by samples": lambda models, around: np.average(
        models, axis=0, weights=range(1, len(models) + 1)
    ),
    "median": naive_median,
    "trimmed mean": naive_trimmed,
    "krum": lambda models, around: models[krum_order(models, 2)[0]],
    "multi-krum": lambda models, around: naive_multikrum(models, 2, None),
    "multi-krum of two": lambda models, around: naive_multikrum(models, 1, 2),
    "clipped mean": naive_clipped,
    "clipped mean, given": lambda models, around: naive_clipped(models, around, 2.5),
}


@pytest.mark.parametrize("rule", NAIVE)
@settings(max_examples=25)
@given(seed=SEEDS, n=st.integers(1, 12), chunk=st.sampled_from([1, 4, 1 << 13]))
def test_a_rule_is_what_its_paper_says(rule: str, seed: int, n: int, chunk: int) -> None:
    random = np.random.default_rng(seed)
    around = 3 * random.standard_normal(SIZE)
    models = around + random.standard_normal((n, SIZE)) * random.uniform(0.1, 2, (n, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "CHUNK", chunk)
        found = combined(RULES[rule], models, around)
    np.testing.assert_allclose(found, NAIVE[rule](models, around), rtol=1e-9, atol=1e-12)


@settings(max_examples=25)
@given(seed=SEEDS, n=st.integers(2, 12))
def test_at_the_geometric_median_unit_vectors_to_all_models_cancel(seed: int, n: int) -> None:
    """The first-order condition; where the median is one of the models, those to the others do
    not outweigh it.
    """
    random = np.random.default_rng(seed)
    models = random.standard_normal((n, SIZE)) * random.uniform(0.5, 3, (n, 1))
    z = combined(GeometricMedian(iterations=3000, eps=1e-9), models)
    distances = np.linalg.norm(models - z, axis=1)
    here = distances < 1e-4
    resultant = sum((m - z) / d for m, d in zip(models[~here], distances[~here], strict=True))
    assert np.linalg.norm(resultant) <= (1e-3 if not here.any() else here.sum() + 1e-3)


def test_the_geometric_median_of_known_points() -> None:
    """Of a triangle with angles below 120 degrees the point of Fermat; on a line the middle
    point.
    """
    triangle = np.zeros((3, SIZE))
    triangle[1, 0], triangle[2, 0], triangle[2, 1] = 1, 0.5, math.sqrt(3) / 2
    fermat = np.zeros(SIZE)
    fermat[:2] = 0.5, math.sqrt(3) / 6
    np.testing.assert_allclose(combined(GeometricMedian(), triangle), fermat, atol=1e-9)
    line = np.outer([0.0, 1.0, 100.0], np.ones(SIZE))
    np.testing.assert_allclose(
        combined(GeometricMedian(iterations=500), line), np.ones(SIZE), atol=1e-3
    )


@given(seed=SEEDS, size=st.floats(0.01, 100))
def test_eps_makes_near_models_count_alike(seed: int, size: float) -> None:
    models = np.random.default_rng(seed).standard_normal((5, SIZE)) * size
    np.testing.assert_allclose(
        combined(GeometricMedian(eps=1e4 * size), models), models.mean(axis=0), atol=1e-9 * size
    )


# What holds for every rule.


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=25)
@given(seed=SEEDS, n=st.integers(1, 9))
def test_the_order_of_clients_changes_no_bit(rule: Combining, seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    found, around = (
        replies(random.standard_normal((n, SIZE)), torch.float32),
        named(random.standard_normal(SIZE), torch.float32),
    )
    shuffled = {
        i: dict(reversed(found[i].items())) for i in random.permutation(sorted(found)).tolist()
    }
    a, b = rule.combine(found, around), rule.combine(shuffled, around)
    assert a.keys() == b.keys() == SHAPES.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=25)
@given(seed=SEEDS)
def test_of_one_client_it_is_exactly_that_client(rule: Combining, seed: int) -> None:
    random = np.random.default_rng(seed)
    own, around = (
        named(random.standard_normal(SIZE) / 4, torch.float32),
        named(random.standard_normal(SIZE) / 4, torch.float32),
    )
    found = rule.combine({"ann": own | {SAMPLES: torch.tensor(3)}}, around)
    assert found.keys() == own.keys()
    for name, tensor in own.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_clients_sent_stays_as_it_is(rule: Combining) -> None:
    found, around = (
        replies(np.random.default_rng(0).standard_normal((7, SIZE))),
        named(np.ones(SIZE)),
    )
    before = {i: {name: t.clone() for name, t in reply.items()} for i, reply in found.items()}
    for tensor in rule.combine(found, around).values():
        tensor.zero_()
    assert all(
        torch.equal(t, before[i][name]) for i, reply in found.items() for name, t in reply.items()
    )
    assert all(bool((t == 1).all()) for t in around.values())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=25)
@given(seed=SEEDS, shift=st.floats(-5, 5))
def test_all_is_relative_to_what_was_sent(rule: Combining, seed: int, shift: float) -> None:
    """Moving the models and what was sent moves the result as far; a name that was not sent is
    relative to zero.
    """
    random = np.random.default_rng(seed)
    models, around = random.standard_normal((8, SIZE)), random.standard_normal(SIZE)
    np.testing.assert_allclose(
        combined(rule, models + shift, around + shift),
        combined(rule, models, around) + shift,
        atol=1e-7,
    )
    np.testing.assert_allclose(
        combined(rule, models), combined(rule, models, np.zeros(SIZE)), atol=1e-12
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_clients_that_differ_in_form_and_no_clients_are_refused(rule: Combining) -> None:
    found = replies(np.zeros((3, SIZE)))
    found["c01"]["b"] = torch.zeros(5, dtype=torch.float64)
    with pytest.raises(TensorError, match="'b'"):
        rule.combine(found, {})
    with pytest.raises(ValueError, match="no replies"):
        rule.combine({}, {})


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many values the largest float64 tensor has that is made within."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float64:
            self.values = max(self.values, found.numel())
        return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_of_large_models_there_is_no_copy_in_double_precision(rule: Combining) -> None:
    n, d = 6, 5 * CHUNK + 3
    found = {f"c{k}": {"w": torch.randn(d), SAMPLES: torch.tensor(2)} for k in range(n)}
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        rule.combine(found, {"w": torch.randn(d)})
    assert largest.values <= n * CHUNK


def test_clients_that_say_they_have_no_samples_count_alike_if_all_do() -> None:
    found = replies(np.array([np.zeros(SIZE), np.ones(SIZE), 5 * np.ones(SIZE)]))
    for reply, samples in zip(found.values(), (0, 3, 1), strict=True):
        reply[SAMPLES] = torch.tensor(samples)
    np.testing.assert_allclose(flat(Mean(weighting="samples").combine(found, {})), 2.0)
    for reply in found.values():
        reply[SAMPLES] = torch.tensor(0)
    np.testing.assert_allclose(flat(Mean(weighting="samples").combine(found, {})), 2.0)


def test_only_a_mean_by_samples_asks_for_samples_and_only_a_uniform_mean_is_a_sum() -> None:
    assert [name for name, rule in RULES.items() if rule.counts] == ["mean by samples"]
    assert [name for name, rule in RULES.items() if rule.needs_only_mean] == ["mean"]


# Attackers: n = 8 clients, the last of whom send something else than their update.

N, SPREAD = 8, 0.3
D = 300


def honest(seed: int) -> Vectors:
    """Updates that agree, (n, d), each a common direction of length 1 and a deviation of about
    `SPREAD`.
    """
    random = np.random.default_rng(seed)
    return np.full(D, 1 / math.sqrt(D)) + random.standard_normal((N, D)) * SPREAD / math.sqrt(D)


ATTACKS: dict[str, Callable[[Vectors, Any], Vectors]] = {
    "sign flip x10": lambda update, random: -10 * update,
    "scaled x100": lambda update, random: 100 * update,
    "noise x10": lambda update, random: 10 * random.standard_normal(D) / math.sqrt(D),
    "together": lambda update, random: -1e6 * np.ones(D),
}
# The rule for f attackers, how many it withstands of eight, and how far it is then from the honest
# mean.
WITHSTANDS: dict[str, tuple[Combining, int, float]] = {
    "median": (Median(), 3, 0.6),
    "trimmed mean": (TrimmedMean(trim=0.25), 2, 0.6),
    "krum": (Krum(attackers=2), 2, 0.6),
    "multi-krum": (MultiKrum(attackers=2), 2, 0.3),
    "geometric median": (GeometricMedian(), 3, 0.7),
    "clipped mean": (ClippedMean(), 3, 0.9),
}


def attacked(models: Vectors, f: int, attack: str, seed: int) -> tuple[Vectors, Vectors]:
    """What the clients send, the last f of them attackers, and the mean of the others."""
    random = np.random.default_rng([seed, 1])
    sent = models.copy()
    for k in range(N - f, N):
        sent[k] = ATTACKS[attack](models[k], random)
    return sent, models[: N - f].mean(axis=0)


def distance(rule: Combining, sent: Vectors, mean: Vectors) -> float:
    found = rule.combine(
        {f"c{k}": {"w": torch.tensor(own)} for k, own in enumerate(sent)},
        {"w": torch.zeros(D, dtype=torch.float64)},
    )
    return float(np.linalg.norm(found["w"].numpy() - mean))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", WITHSTANDS)
def test_a_robust_rule_stays_near_the_honest_mean_and_the_mean_does_not(
    rule: str, attack: str
) -> None:
    combining, most, near = WITHSTANDS[rule]
    for seed in range(5):
        for f in range(1, most + 1):
            sent, mean = attacked(honest(seed), f, attack, seed)
            assert distance(combining, sent, mean) < near, f
            assert distance(Mean(), sent, mean) > 1, f


@pytest.mark.parametrize(
    ("rule", "attackers"),
    [
        ("median", 4),
        ("trimmed mean", 3),
        ("krum", 4),
        ("multi-krum", 3),
        ("geometric median", 4),
        ("clipped mean", 4),
    ],
)
def test_with_as_many_attackers_as_break_it_they_move_it_as_far_as_they_like(
    rule: str, attackers: int
) -> None:
    combining, _, near = WITHSTANDS[rule]
    assert distance(combining, *attacked(honest(0), attackers, "together", 0)) > 1e4
    assert distance(combining, *attacked(honest(0), attackers - 1, "together", 0)) < near


def test_a_single_attacker_moves_the_mean_as_far_as_it_likes() -> None:
    sent, mean = attacked(honest(0), 1, "together", 0)
    assert distance(Mean(), sent, mean) > 1e4


def test_with_a_norm_that_is_given_nobody_moves_a_clipped_mean_further_than_that() -> None:
    for f in range(1, N):
        sent, _ = attacked(honest(0), f, "together", 0)
        assert distance(ClippedMean(norm=1.5), sent, np.zeros(D)) <= 1.5 + 1e-9


@pytest.mark.parametrize("rule", WITHSTANDS)
def test_values_at_the_end_of_what_floats_hold_do_no_harm(rule: str) -> None:
    combining, _, near = WITHSTANDS[rule]
    models = honest(0)
    found = {f"c{k}": {"w": torch.tensor(own, dtype=torch.float32)} for k, own in enumerate(models)}
    found["c7"] = {"w": torch.full((D,), torch.finfo(torch.float32).max)}
    w = combining.combine(found, {"w": torch.zeros(D)})["w"]
    assert float(np.linalg.norm(w.numpy() - models[:7].mean(axis=0))) < near


# Pools, and recipes.


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_of_a_pool_each_member_is_combined_over_those_that_had_it(rule: Combining) -> None:
    """Tensors that the same clients have are one vector: what Krum chooses, it chooses for all
    of them.
    """
    random = np.random.default_rng(0)
    members = {
        "gate": "abcdefg",
        "expert/0": "abcdef",
        "expert/1": "acdefg",
        "expert/2": "abcdef",
        "expert/3": "g",
    }
    found = {
        i: {
            name: torch.tensor(random.standard_normal(3))
            for name, holders in members.items()
            if i in holders
        }
        for i in "gfabcde"
    }
    for k, reply in enumerate(found.values()):
        reply[SAMPLES] = torch.tensor(k + 1)
    around = {name: torch.tensor(random.standard_normal(3)) for name in members}
    expected: Tensors = {}
    for names in (["gate"], ["expert/0", "expert/2"], ["expert/1"], ["expert/3"]):
        held = {i: {n: found[i][n] for n in (*names, SAMPLES)} for i in members[names[0]]}
        few = len(held) < rule.fewest  # then nothing moves
        expected |= {n: around[n] for n in names} if few else rule.combine(held, around)
    result = by_holders(rule, found, around)
    assert result.keys() == members.keys()
    for name in members:
        assert torch.equal(result[name], expected[name])
    assert by_holders(rule, {}, around) == {}


def test_with_too_few_replies_krum_withstands_as_many_as_it_can() -> None:
    """An f of 2 needs 7 clients: of 5 or 6 it withstands 1, of 4 or less none."""
    models = np.random.default_rng(3).standard_normal((7, SIZE))
    for n, f in ((7, 2), (6, 1), (5, 1), (4, 0), (3, 0), (2, 0), (1, 0)):
        np.testing.assert_allclose(
            combined(MultiKrum(attackers=2), models[:n]),
            combined(MultiKrum(attackers=f), models[:n]),
        )
        np.testing.assert_array_equal(
            combined(Krum(attackers=2), models[:n]), models[krum_order(models[:n], f)[0]]
        )
        assert len(models[:n]) - f == round(1 / shares(MultiKrum(attackers=2), n).max())


def shares(rule: Combining, n: int) -> Vectors:
    """How much each of n clients counts, who are all alike but for what tells them apart."""
    models = np.zeros((n, SIZE))
    models[np.arange(n), np.arange(n)] = 1
    return combined(rule, models)[:n]


ADAPTER: TypeAdapter[Combining] = TypeAdapter(Rule)


def test_a_recipe_names_a_rule_and_its_fields() -> None:
    assert ADAPTER.validate_python({}) == Mean()
    assert ADAPTER.validate_python({"weighting": "samples"}) == Mean(weighting="samples")
    for rule in RULES.values():
        assert ADAPTER.validate_python(rule.model_dump(mode="json")) == rule
        assert hash(rule) == hash(ADAPTER.validate_python(rule.model_dump(mode="json")))
    found = {str(rule.model_dump()["rule"]) for rule in RULES.values()}
    assert found == {
        "mean",
        "median",
        "trimmed-mean",
        "krum",
        "multi-krum",
        "geometric-median",
        "clipped-mean",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rule": "medain"}, "method.aggregation: rule should be 'mean', 'median', 'trimmed-mean'"),
        ("median", "method.aggregation: rule should be 'mean'"),
        (
            {"rule": "trimmed-mean", "trim": 0.5},
            "method.aggregation.trim: input should be less than 0.5",
        ),
        (
            {"rule": "krum", "attackers": -1},
            "method.aggregation.attackers: input should be greater",
        ),
        ({"rule": "krum", "keep": 2}, "method.aggregation.keep: unknown key"),
        (
            {"weighting": "size"},
            "method.aggregation.weighting: input should be 'uniform' or 'samples'",
        ),
        (
            {"rule": "clipped-mean", "norm": 0},
            "method.aggregation.norm: input should be greater than 0",
        ),
    ],
)
def test_a_mistake_in_a_rule_is_named_by_its_field(given: object, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        validate(
            {
                "name": "x",
                "data": {"kind": "stdlib"},
                "method": {"name": "fedavg", "aggregation": given},
            },
            "x",
        )
    assert said in str(refused.value)
    assert len(refused.value.mistakes) == 1


@pytest.mark.parametrize(
    ("rule", "clients", "said"),
    [
        (
            Krum(attackers=2),
            6,
            "method.aggregation.attackers: 2 among 6 clients that are averaged together, where 7 "
            "are needed; use at most 1",
        ),
        (MultiKrum(attackers=1), 4, "method.aggregation.attackers: 1 among 4 .* use at most 0"),
        (
            Krum(attackers=0),
            2,
            "method.aggregation.attackers: 0 among 2 .* 3 are needed; use another rule",
        ),
        (
            MultiKrum(attackers=1, keep=5),
            5,
            "method.aggregation.keep: 5 of 5 clients, 1 of which may be attackers; use at most 4",
        ),
    ],
)
def test_krum_of_too_few_clients_is_refused_before_the_start(
    rule: Combining, clients: int, said: str
) -> None:
    world = Blueprint(lambda layout: None, {}, 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(RecipeError, match=said):
        FedAvg(aggregation=rule).check(world, [str(k) for k in range(clients)], None)  # type: ignore[arg-type]
    FedAvg(aggregation=rule).check(world, [str(k) for k in range(clients + 1)], None)  # type: ignore[arg-type]
