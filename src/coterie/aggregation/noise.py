"""Secret random numbers: a cryptographic generator with a full key, and exact Gaussian noise on a
grid.

The noise of ordinary libraries has two defects. Generators have few streams: PyTorch's on a CPU
ignores the upper half of its seed, and whoever tries 2^32 seeds finds the noise and removes it. And
floating-point numbers do not have the distribution of the proof: which values are possible depends
on the value to be hidden (Mironov, "On Significance of the Least Significant Bits For Differential
Privacy", CCS 2012, for Laplace; Jin et al., "Are We There Yet? Timing and Floating-Point Attacks on
Differential Privacy Systems", S&P 2022, for Gaussian noise).

`Source` is AES-256 in counter mode under a key of 256 bits. `protected` makes noise of it that is
safe in floating point: a value x is put on a grid of step g, and gets g times an integer that is
distributed as round(N(0, sigma^2) / g), exactly. As x lies on the grid, x + g round(N / g) = g
round((x + N) / g): a rounding, by a rule that does not depend on x, of the output of the Gaussian
mechanism on real numbers. So that mechanism's accounting holds, and all that follows, such as
adding public values and rounding to float32, is post-processing. Discrete Gaussian noise (Canonne,
Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020) would do as
well, but its known bounds are Rényi divergences, which lose the exact composition of Gaussian
mechanisms.
"""

import json
import math
import os
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from filelock import FileLock

from coterie.core.errors import Refused, TensorError
from coterie.core.files import writing
from coterie.core.foreign import opened, refusing
from coterie.core.importing import require

KEY = 32  # bytes
# a deviation beyond it is not drawn: too much would have to be settled in long arithmetic
MOST_STEPS = 2.0**32
# a grid's step: at most that of the deviation; but not below that of the norm, for integers of 64
# bits
_FINE, _FINEST = 2.0**-20, 2.0**-45
_ERROR = 2.0**-46  # of scipy's ndtri(p) = z, at most, times |z| + 1; measured: 2^-50
# with bits above the former, the error of z is below the latter, for z up to 9.2
_FEW, _LIKELY = 1 << 42, 2.0**-40
_HUGE = 1e140
_PART = 1 << 14  # values at a time, which stay in a processor's cache
T = TypeVar("T")


class Source:
    """A stream of random numbers: AES-256 in counter mode by a key of 32 bytes, for one purpose
    only. Raises Refused if its library is missing.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"a key of {len(key)} bytes, expected {KEY}")
        self._stream = _cipher(key)

    @classmethod
    def secret(cls) -> "Source":
        """Return a stream that nobody can repeat: the system's generator makes its key."""
        return cls(os.urandom(KEY))

    @classmethod
    def keyed(cls, key: bytes, *purpose: int | str) -> "Source":
        """Return the stream of a secret key for one purpose, which only holders of the key can
        repeat. Raises ValueError unless the key has 32 to 64 bytes. Different purposes have
        different streams, also ("a", "b") and ("a/b",), or (1,) and ("1",).
        """
        if not KEY <= len(key) <= blake2b.MAX_KEY_SIZE:
            raise ValueError(f"a key of {len(key)} bytes, expected {KEY} to {blake2b.MAX_KEY_SIZE}")
        return cls(_digest(purpose, key))

    @classmethod
    def seeded(cls, seed: int, *purpose: int | str) -> "Source":
        """Return the stream of a run's seed, which is not secret, for one purpose: for simulations,
        in which noise protects nobody.
        """
        return cls(_digest((seed, *purpose)))

    def read(self, n: int) -> bytes:
        """Return the next n bytes."""
        return cast(bytes, self._stream.update(bytes(n)))

    def integers(self, n: int) -> np.ndarray:
        """(n,) uint64: the next integers, uniform from 0 to 2^64 - 1."""
        return np.frombuffer(self.read(8 * n), "<u8")

    def uniform(self, n: int) -> np.ndarray:
        """(n,) float64: the next numbers, uniform in [0, 1), multiples of 2^-53."""
        return (self.integers(n) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int) -> int:
        """Return an integer, uniform below `bound`. Raises ValueError unless 0 < bound <= 2^64."""
        if not 0 < bound <= 1 << 64:
            raise ValueError(f"a number below {bound}")
        fair = (1 << 64) - (1 << 64) % bound  # what is beyond would favour the smaller ones
        while (drawn := int.from_bytes(self.read(8), "little")) >= fair:
            pass
        return drawn % bound

    def sample(self, population: Sequence[T], size: int) -> list[T]:
        """Draw `size` elements without replacement, every set exactly as likely (Fisher and Yates'
        shuffle). Raises ValueError for too small a population.
        """
        rest = list(population)
        if not 0 <= size <= len(rest):
            raise ValueError(f"{size} of {len(rest)}")
        for k in range(size):
            other = k + self.below(len(rest) - k)
            rest[k], rest[other] = rest[other], rest[k]
        return rest[:size]

    def gaussian(self, size: int, deviation: float) -> np.ndarray:
        """(size,) int64, distributed exactly as round(N(0, deviation^2)), in steps of the grid.

        Of 64 random bits one is the sign, the others are the first of P, the probability of a value
        farther out, which is uniform. The size is round(deviation |z|), Phi(-|z|) = P.
        Floating-point numbers decide it unless their error bound and the unknown bits leave two
        integers possible (about 1 of 10^7, with a deviation of 2^20); then more bits and decimals
        decide. The time this takes reveals that it happened, at random, and nothing secret. Raises
        ValueError unless 0 < deviation <= 2^32.
        """
        if not 0 < deviation <= MOST_STEPS:
            raise ValueError(f"a deviation of {deviation} steps, expected one in (0, 2^32]")
        drawn, numbers = self.integers(size), np.empty(size, np.int64)
        for start in range(0, size, _PART):
            part = slice(start, start + _PART)
            self._fill(numbers[part], drawn[part], deviation)
        return numbers

    def _fill(self, out: np.ndarray, drawn: np.ndarray, deviation: float) -> None:
        """Turn 64 bits each into integers."""
        from scipy.special import ndtri

        bits = drawn >> np.uint64(1)
        steps = (bits + 0.5) * 2.0**-64
        ndtri(steps, out=steps)
        steps *= -deviation
        size = np.floor(steps + 0.5)
        steps -= size  # from -1/2 to 1/2, with both ends undecided
        for k in np.flatnonzero((np.abs(steps) >= 0.5 - deviation * _LIKELY) | (bits < _FEW)):
            if not _decided(int(bits[k]), steps[k], size[k], deviation):
                size[k] = self._settled(int(bits[k]), deviation)
        out[:] = np.where(drawn & np.uint64(1), -size, size)

    def _settled(self, bits: int, deviation: float) -> int:
        """Return how many k have Phi(-(k + 1/2) / deviation) > P, by the first 64 bits of P."""
        unknown = _Probability(self, bits)
        low, high = -1, 1
        while unknown.below_tail(high, deviation):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if unknown.below_tail(middle, deviation) else (low, middle)
        return high


def _decided(bits: int, rest: float, size: float, deviation: float) -> bool:
    """Return whether all values that the bits leave possible are rounded to `size`."""
    z = (size + 1) / deviation
    # |dz| <= 1.26 dP / P, as phi(z) >= 0.79 Phi(z) for z <= 0
    error = deviation * (2 / bits + (z + 1) * _ERROR) if bits else math.inf
    return abs(rest) < 0.5 - error


class _Probability:
    """A uniform number in [0, 1/2), with as many bits as are compared; the first 64 are given."""

    def __init__(self, source: Source, bits: int) -> None:
        self._source, self._value, self._known = source, bits, 64

    def below_tail(self, k: int, deviation: float) -> bool:
        """Whether it is below Phi(-(k + 1/2) / deviation)."""
        while True:
            tail = _tail(k, deviation, self._known)
            if self._value + 1 <= tail - 1:
                return True
            if self._value >= tail + 1:
                return False
            self._value = self._value << 64 | int.from_bytes(self._source.read(8), "little")
            self._known += 64


def _tail(k: int, deviation: float, bits: int) -> int:
    """2^bits Phi(-x), x = (k + 1/2) / deviation >= 0, error below 1, by Phi(x) - 1/2's series."""
    # 30 digits more than asked, for a few thousand roundings
    with localcontext(Context(prec=bits * 31 // 100 + 30)) as context:
        x: Decimal = (Decimal(k) + Decimal("0.5")) / Decimal(deviation)
        square, term, total, odd = x * x, x, x, 1
        while odd < 2 * square or context.add(total, term) != total:
            odd += 2
            term = term * square / odd
            total += term
        beyond = Decimal("0.5") - (-square / 2).exp() / (2 * _pi(context.prec)).sqrt() * total
        return int(beyond * (1 << bits))


@lru_cache
def _pi(digits: int) -> Decimal:
    """Pi, by Machin's formula: 16 arctan(1/5) - 4 arctan(1/239)."""
    unit: int = 10 ** (digits + 10)

    def arctan(inverse: int) -> int:
        power = total = unit // inverse
        odd, sign = 1, 1
        while power:
            power //= inverse * inverse
            odd, sign = odd + 2, -sign
            total += sign * (power // odd)
        return total

    return Decimal(16 * arctan(5) - 4 * arctan(239)) / unit


def protected(update: np.ndarray, norm: float, deviation: float, source: Source) -> np.ndarray:
    """Return a vector, (d,) float64, on the grid, with Gaussian noise of deviation sigma on every
    coordinate, safe in floating point. It is clipped to the norm C, see `on_grid`: the sensitivity
    to its absence; any two are up to 2C apart. Raises TensorError for a value that is not a number.
    """
    step = grid(norm, deviation)
    noise = source.gaussian(update.size, deviation / step)
    return cast(np.ndarray, (on_grid(update, norm, step) + noise) * step)


def grid(norm: float, deviation: float) -> float:
    """Return the step of the grid: a power of two, at most 2^-20 of the deviation, at least 2^-46
    of the norm. It depends on the mechanism's settings only. Rounding costs no privacy, as norms do
    not grow, and 10^-6 of the noise in accuracy.
    """
    exponent = math.frexp(max(deviation * _FINE, norm * _FINEST))[1] - 1
    return math.ldexp(1.0, exponent)


def on_grid(update: np.ndarray, norm: float, step: float) -> np.ndarray:
    """Return a vector, (d,), clipped to the norm C, in steps of a grid, (d,) int64, rounded towards
    zero: its norm is at most C in exact arithmetic. Raises TensorError: a value is not a number.
    """
    bounded = np.clip(update, -_HUGE, _HUGE)  # of which the norm does not overflow
    size = float(np.linalg.norm(bounded))
    if math.isnan(size):
        problem = "update to be protected: not all values are numbers"
        raise TensorError(problem, "Training diverged: lower the learning rate.")
    # the norm's relative error, and that of the product, are below the difference
    most = norm * (1 - (update.size + 16) * 2.0**-52)
    bounded = bounded * ((1.0 if size <= most else most / size) / step)
    return cast(np.ndarray, np.trunc(bounded).astype(np.int64))


def kept_key(path: Path) -> bytes:
    """Return the key in a file, 32 random bytes; a missing file is made, readable by its owner
    only. Raises Refused if it has no key or cannot be read, SaveError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            _write_key(path)
        remedy = "It must be readable by the user of this process, and by nobody else."
        with refusing(Refused, str(path), remedy), opened(path) as file:
            key = file.read(KEY + 1)
    if len(key) != KEY:
        raise Refused(
            f"{path} holds {'more' if len(key) > KEY else len(key)} bytes, expected a key of {KEY}",
            "Delete it: a new one is made.",
        )
    return key


def _write_key(path: Path) -> None:
    new = path.with_name(f"{path.name}.new")
    with writing(path, "Free some space, or choose another folder."):
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(KEY))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def check_installed() -> None:
    """Raise Refused if the library for secret random numbers is not installed."""
    _cipher(bytes(KEY))


def _digest(purpose: Sequence[int | str], key: bytes = b"") -> bytes:
    return blake2b(
        json.dumps(list(purpose)).encode(), digest_size=KEY, key=key, person=b"coterie.noise"
    ).digest()


def _cipher(key: bytes) -> Any:
    require("privacy: drawing secret random numbers", "privacy", "cryptography")
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
