"""Secret random numbers: full keys, exact distributions, the grid, and the attack that found the
noise among 2^32 seeds.
"""

import errno
import math
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import coterie
from coterie.aggregation.noise import Source, grid, kept_key, on_grid, protected
from coterie.aggregation.privacy import Privacy, central, local
from coterie.client.outbound import Outbound
from coterie.core.errors import Refused, SaveError, TensorError
from coterie.core.tensors import Tensors
from coterie.methods.fedavg import FedAvg

KEY = bytes(range(32))


def source(seed: int = 0) -> Source:
    return Source.seeded(seed, "tests")


# Streams


def test_a_stream_is_of_the_whole_key_and_of_the_purpose() -> None:
    streams = [
        Source.keyed(KEY).read(32),
        Source.keyed(KEY + b"\0").read(32),
        Source.seeded(0).read(32),
    ]
    streams += [Source.keyed(KEY[:k] + b"\xff" + KEY[k + 1 :]).read(32) for k in range(32)]
    streams += [
        Source.keyed(KEY, *purpose).read(32)
        for purpose in (("a", "b"), ("a/b",), ("ab",), (1,), ("1",), (1, ""), (-1,))
    ]
    streams += [Source.secret().read(32) for _ in range(3)]
    streams += [Source.seeded(seed).read(32) for seed in (1, 2**32, 2**32 + 1, 2**63)]
    assert len(set(streams)) == len(streams)
    assert Source.keyed(KEY, "a", 1).read(32) == Source.keyed(KEY, "a", 1).read(32)


def test_a_stream_goes_on_where_it_was() -> None:
    parts = source()
    assert b"".join(parts.read(n) for n in (1, 15, 17, 0, 67)) == source().read(100)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(65)])
def test_a_key_that_is_too_short_is_no_key(key: bytes) -> None:
    with pytest.raises(ValueError, match="a key of"):
        Source.keyed(key)


def test_a_missing_library_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(Refused, match=r"pip install -e '\.\[privacy\]'"):
        Source.secret()


# Distributions: fixed streams, so that what holds once always holds


def test_uniform_numbers_are_uniform() -> None:
    found = source().uniform(200_000)
    assert found.min() >= 0
    assert found.max() < 1
    assert (found * 2.0**53 % 1 == 0).all()
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert stats.kstest(found * 2.0**20 % 1, "uniform").pvalue > 0.01  # the lower bits too


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 2**63 + 1, 2**64])
def test_whole_numbers_below_a_bound(bound: int) -> None:
    drawn = source()
    found = [drawn.below(bound) for _ in range(3000)]
    assert 0 <= min(found) <= max(found) < bound
    if bound > 1:
        counts = np.bincount([x * min(bound, 10) // bound for x in found], minlength=min(bound, 10))
        assert stats.chisquare(counts).pvalue > 0.01


def test_every_set_of_three_of_six_is_drawn_as_often() -> None:
    drawn = source()
    sets = [tuple(sorted(drawn.sample(range(6), 3))) for _ in range(8000)]
    kinds, counts = np.unique(np.array(sets), axis=0, return_counts=True)
    assert len(kinds) == math.comb(6, 3)
    assert stats.chisquare(counts).pvalue > 0.01
    assert sorted(drawn.sample("abcd", 4)) == list("abcd")
    assert drawn.sample("abcd", 0) == []
    with pytest.raises(ValueError, match="5 of 4"):
        drawn.sample("abcd", 5)


@pytest.mark.parametrize("deviation", [0.2, 0.7, 3.0, 12.5])
def test_integers_have_the_probabilities_of_a_rounded_gaussian(deviation: float) -> None:
    n = 200_000
    found = source().gaussian(n, deviation)
    assert found.dtype == np.int64
    least = next(
        k for k in range(100) if n * stats.norm.cdf(-(k + 0.5) / deviation) < 10
    )  # what is beyond counts as one
    ends = np.arange(-least, least + 1) - 0.5
    expected = n * np.diff(
        stats.norm.cdf(np.concatenate([[-np.inf], ends[1:-1], [np.inf]]) / deviation)
    )
    counts = np.bincount(np.clip(found, -least, least - 1) + least, minlength=2 * least)
    assert stats.chisquare(counts, expected).pvalue > 0.01


@pytest.mark.parametrize("deviation", [2.0**20, 1.9 * 2.0**20])
def test_on_a_fine_grid_they_are_gaussian_to_the_tails(deviation: float) -> None:
    found = source().gaussian(500_000, deviation) / deviation
    assert stats.kstest(found, "norm").pvalue > 0.01
    for k in (1, 2, 3, 4):
        moment, spread = np.mean(found**k), math.sqrt(stats.norm.moment(2 * k) / len(found))
        assert moment == pytest.approx(stats.norm.moment(k), abs=3 * spread)
    assert 4.3 < np.abs(found).max() < 6.0
    assert (
        stats.chisquare(np.bincount(np.abs(source().gaussian(500_000, deviation)) % 16)).pvalue
        > 0.01
    )  # the lower bits too


def exact(drawn: int, deviation: float) -> tuple[int, float]:
    """round(deviation z) with Phi(-|z|) = (drawn >> 1) / 2^64 in long arithmetic, and how far it
    is from another integer.
    """
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(50):
        tail = (drawn >> 1) / mpmath.mpf(2) ** 64
        z = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * tail)
        steps = mpmath.mpf(deviation) * z
        size = int(mpmath.floor(steps + mpmath.mpf("0.5")))
        return (-size if drawn & 1 else size), float(abs(steps - size - 0.5))


def test_each_integer_is_the_exact_rounding_also_where_floating_point_does_not_tell() -> None:
    deviation = 1.3 * 2.0**31  # of which floating-point numbers leave some undecided
    found, drawn = source().gaussian(20_000, deviation), source().integers(20_000)
    z = np.abs(found / deviation)
    near = [k for k in range(20_000) if abs(exact_distance(drawn[k], deviation)) < 2e-3]
    assert len(near) > 5
    assert z.max() < 5
    for k in [*near, *range(100)]:
        expected, margin = exact(int(drawn[k]), deviation)
        assert found[k] == expected or margin < 1e-8  # where the bits to come decide


def exact_distance(drawn: int, deviation: float) -> float:
    """How far deviation |z| is from a half, as floating-point numbers see it."""
    steps = -deviation * float(stats.norm.ppf((int(drawn) >> 1) * 2.0**-64))
    return steps - math.floor(steps) - 0.5


def test_far_out_the_bits_to_come_decide() -> None:
    class Small(Source):
        """A stream that begins with the smallest tail."""

        def read(self, n: int) -> bytes:
            self.parts = getattr(self, "parts", iter([bytes(8)]))
            return next(self.parts, b"\x80" + bytes(n - 1))  # then 2^-64 (2^-57 + ...)

    (found,) = Small(KEY).gaussian(1, 2.0**20)
    tail = (128 / 2.0**64) * 2.0**-64
    assert found == math.floor(-(2.0**20) * stats.norm.ppf(tail) + 0.5)


@pytest.mark.parametrize("deviation", [0.0, -1.0, math.nan, math.inf, 2.0**33])
def test_deviations_that_cannot_be_drawn(deviation: float) -> None:
    with pytest.raises(ValueError, match="deviation"):
        source().gaussian(3, deviation)


# The grid


@given(
    st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30),
    st.floats(1e-3, 1e3),
    st.floats(1e-12, 1e3),
)
def test_on_the_grid_no_norm_is_beyond_the_bound(
    values: list[float], norm: float, noise: float
) -> None:
    step = grid(norm, noise * norm)
    assert math.frexp(step)[0] == 0.5  # a power of two
    assert step <= max(noise * norm * 2.0**-20, norm * 2.0**-45)
    found = on_grid(np.array(values), norm, step)
    assert sum(int(k) ** 2 for k in found) <= (int(norm * 2**1000) / int(step * 2**1000)) ** 2 * (
        1 + 1e-15
    )
    if math.sqrt(math.fsum(x * x for x in values)) < 0.99 * norm:
        np.testing.assert_allclose(found * step, values, atol=step)


def test_the_norm_holds_in_exact_arithmetic() -> None:
    rng = np.random.default_rng(0)
    for clip in (1.0, 0.3, 7.7):
        step = grid(clip, clip)
        for _ in range(50):
            found = on_grid(rng.normal(size=1000) * 10.0 ** rng.integers(-3, 4), clip, step)
            assert (
                sum(int(k) ** 2 for k in found) * int(step * 2**60) ** 2 <= int(clip * 2**60) ** 2
            )


def test_what_leaves_is_on_the_grid_whatever_the_update_was() -> None:
    sent = {"A": torch.zeros(1000, dtype=torch.float64)}
    privacy = Privacy(where="local", clip=2.0, noise=0.5)
    for update in (
        torch.zeros(1000),
        torch.full((1000,), 0.05),
        torch.randn(1000, generator=torch.Generator().manual_seed(0)),
    ):
        (found,) = local({"A": update.double()}, sent, privacy, source()).values()
        steps = found.numpy() / grid(2.0, 1.0)
        assert (steps == np.round(steps)).all()
        assert len(np.unique(steps % 2)) == 2  # and on no coarser one


def test_a_sum_tells_nothing_but_the_sum() -> None:
    # Two federations whose updates, on the grid, have the same sum: whatever is sent is the same,
    # to the last bit.
    step = grid(1.0, 1.0)
    privacy, sent = (
        Privacy(where="central", clip=1.0, noise=1.0),
        {"A": torch.linspace(0, 1, 50) / 3},
    )
    to = {"a": sent, "b": sent}

    def moved(*by: float) -> dict[str, Tensors]:
        return {i: {"A": sent["A"].double() + x * step} for i, x in zip(to, by, strict=True)}

    doubles = {i: {"A": t["A"].double()} for i, t in to.items()}
    results = [
        central(moved(*by), doubles, privacy, 1.0, source())[0]
        for by in ((1000.0, -7.0), (493.0, 500.0), (0.0, 993.0))
    ]
    for found in results:
        assert torch.equal(found["a"]["A"], found["b"]["A"])
        assert torch.equal(found["a"]["A"], results[0]["a"]["A"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e200])
def test_an_endless_update_is_clipped_like_any_other(value: float) -> None:
    found = on_grid(np.array([value, 1.0]), 1.0, 2.0**-20)
    assert abs(found).tolist() == [2**20 - 1, 0]


def test_what_is_no_number_does_not_leave() -> None:
    with pytest.raises(TensorError, match="not all values are numbers"):
        protected(np.array([0.0, math.nan]), 1.0, 1.0, source())


# Attacks

ORDINARY = re.compile(
    r"randbits|Generator\(|default_rng|RandomState|np\.random\.\w+\(|torch\.rand\w*\(|import "
    r"random|uniform_\(|normal_\("
)
HARMLESS = {  # files that draw from generators which anybody can predict, and what for
    "aggregation/robust.py": "lies of simulated clients",
    "audit/auditing.py": "which rows an audit looks at",
    "audit/statistics.py": "resampling for intervals",
    "client/outbound.py": "lies of simulated clients",
    "adapt/distillation.py": "which tokens are replaced in the text of one client, on it",
    "core/isolation.py": "the caller's generator, which is restored",
    "methods/fedamole.py": "which experts a client has at first",
    "methods/fedfomo.py": "whose models are sent, by chance",
    "methods/flora.py": "new values of factors, the same for all clients",
    "methods/parts.py": "the server's draws, the same for each part",
    "data/canaries.py": "canaries of an experiment, whose coins follow from its seed",
    "data/schemes.py": "how data are dealt out to simulated clients",
    "data/splits.py": "the order of a client's own batches",
    "data/splitting.py": "hash functions of nearly equal texts, the same for every run",
    "export/check.py": "tokens on which a model without text is compared",
    "methods/pairwise.py": "which pairs of clients CoBo compares, see below",
    "models/adapter.py": "where training starts",
    "models/common.py": "splits of public data",
    "models/generalising.py": "noise of a method's objective, which stays on the client",
    "models/generalising_networks.py": "noise of a method's objective, which stays on the client",
    "models/networks.py": "where training starts",
    "models/text.py": "where training starts",
    "personal/api/preparation.py": "the seed of an answer, where whoever asks gives none",
    "personal/running_batch.py": "tokens of answers",
    "personal/sampling.py": "tokens of answers",
    "runs/estimate.py": "a trial round before a run, of which nothing is kept or sent",
    "runs/execution.py": "draws of pairs of clients: with privacy no such method runs",
    "runs/recipes/sections.py": "who takes part, where nothing depends on its being unknown",
    "testing/run.py": "rounds, tiny data and models of the conformance suite",
}


def test_ordinary_generators_are_where_nothing_is_secret() -> None:
    # A new one fails here: either what it draws is harmless, and stands above, or it is drawn from
    # `Source`.
    root = Path(coterie.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if ORDINARY.search(path.read_text(encoding="utf-8"))
    }
    assert found == HARMLESS.keys()


def explained(noise: np.ndarray, seeds: Iterator[int]) -> list[int]:
    """Seeds of PyTorch's generator on a CPU that draw this noise: what the attack tried, on one
    core, for all 2^32 of them.
    """
    like = torch.from_numpy(noise)
    return [
        s
        for s in seeds
        if torch.allclose(
            torch.randn(len(noise), generator=torch.Generator().manual_seed(s)), like, atol=0.05
        )
    ]


def noise_of(leaving: Outbound, *purpose: int) -> np.ndarray:
    """The noise that a device adds to the update 0, over its deviation, 1."""
    sent = {"A": torch.zeros(64)}
    return leaving(FedAvg.local_round, "ann", sent, sent, *purpose)["A"].numpy()


def test_no_seed_of_32_bits_explains_a_devices_noise() -> None:
    # The attack on a space that a test can search: keys of which all but a few bits are beyond the
    # lower 32 of any seed that is derived.
    privacy = Privacy(where="local", clip=1.0, noise=1.0)
    weak = torch.randn(64, generator=torch.Generator().manual_seed((1 << 40) + 777)).numpy()
    assert explained(weak, iter(range(2048))) == [
        777
    ]  # the generator has forgotten the upper half of its seed
    for key in (b"", KEY):
        for secret in (False, True):
            assert (
                explained(
                    noise_of(Outbound(777, privacy, secret=secret, key=key), 0, 0),
                    iter(range(2048)),
                )
                == []
            )


def streams(count: int, key: bytes) -> int:
    """How many unlike noises a device with this key adds for so many clients."""
    sent = {"A": torch.zeros(4)}
    leaving = Outbound(0, Privacy(where="local", clip=1.0, noise=1.0), secret=True, key=key)
    return len(
        {
            leaving(FedAvg.local_round, f"c{k}", sent, sent, 0, 0)["A"].numpy().tobytes()
            for k in range(count)
        }
    )


def test_two_streams_that_were_one_are_two() -> None:
    # With this key, PyTorch's generator drew the same noise for c1702 and c1797: their seeds agreed
    # in the lower 32 bits.
    assert streams(1800, (4709).to_bytes(32, "little")) == 1800


@pytest.mark.slow
def test_there_are_more_than_two_to_the_32_streams() -> None:
    # Of 2^32 streams two of 200,000 are the same with a chance of 99 % (the birthday paradox).
    assert streams(200_000, KEY) == 200_000


def test_seeds_that_agree_in_their_lower_half_give_other_noise() -> None:
    privacy = Privacy(where="local", clip=1.0, noise=1.0)
    drawn = [noise_of(Outbound(5, privacy, key=KEY[:-1] + bytes([k])), 0, 0) for k in range(64)]
    drawn += [noise_of(Outbound(5 + (k << 32), privacy), 0, 0) for k in range(64)]
    assert len({noise.tobytes() for noise in drawn}) == len(drawn)


def test_a_reply_has_its_noise_whatever_a_server_says_and_another_size_another() -> None:
    """Run, seed, round and phase are a server's: noise of them could be averaged away. Two sizes
    of one noise would tell all.
    """
    privacy = Privacy(where="local", clip=1.0, noise=1.0)
    leaving = Outbound(0, privacy, secret=True, key=KEY)
    again = [noise_of(leaving, *purpose) for purpose in ((0, 0), (0, 0), (0, 1), (1, 0), (0, -1))]
    again += [
        noise_of(Outbound(seed, privacy, secret=True, key=KEY), 0, 0) for seed in (1, 1 << 32)
    ]
    assert all((again[0] == other).all() for other in again)
    twice = noise_of(
        Outbound(0, Privacy(where="local", clip=1.0, noise=2.0), secret=True, key=KEY), 0, 0
    )
    larger = noise_of(
        Outbound(0, Privacy(where="local", clip=2.0, noise=1.0), secret=True, key=KEY), 0, 0
    )
    for other in (twice, larger):
        assert abs(np.corrcoef(again[0], other)[0, 1]) < 0.5
    fresh = Outbound(0, Privacy(where="local", clip=1.0, noise=1.0), secret=True)
    assert not (noise_of(fresh, 0, 0) == noise_of(fresh, 0, 0)).any()


# Keys that are kept


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "secret"
    key = kept_key(path)
    assert len(key) == 32
    assert kept_key(path) == key != kept_key(tmp_path / "other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_key_is_refused_and_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(Refused, match="5 bytes, expected a key of 32"):
        kept_key(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Refused, match="cannot be read"):
        kept_key(tmp_path / "folder")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match="No space left"):
        kept_key(tmp_path / "new")
    assert not (tmp_path / "new").exists()
