"""Secret random numbers: a cryptographic generator with a full key, and exact Gaussian noise on a
grid.

Two things go wrong with the noise of an ordinary library. Its generator has few streams: PyTorch's
on a CPU ignores the upper half of its seed, and whoever tries 2^32 seeds finds the noise and takes
it away. And its floating-point numbers are not the distribution of the proof: which values can come
out at all depends on the value that is to be hidden (Mironov, "On Significance of the Least
Significant Bits For Differential Privacy", CCS 2012, for Laplace; Jin et al., "Are We There Yet?
Timing and Floating-Point Attacks on Differential Privacy Systems", S&P 2022, for Gaussian noise).

`Source` is AES-256 in counter mode under a key of 256 bits. `protected` makes noise of it that is
safe in floating point: a value x is put on a grid of step g, and gets g times an integer that is
distributed as round(N(0, sigma^2) / g), exactly. As x lies on the grid, x + g round(N / g) = g
round((x + N) / g): the rounding, by a rule that does not depend on x, of what the Gaussian
mechanism of real numbers releases. So the accounting of that mechanism holds as it is. What is done
with the result afterwards, such as adding what was public before and rounding to float32, is
post-processing too. Discrete Gaussian noise (Canonne, Kamath and Steinke, "The Discrete Gaussian
for Differential Privacy", NeurIPS 2020) would do as well, but its known bounds are Rényi
divergences, and the exact composition of Gaussian mechanisms would be lost.
"""

import json
import math
import os
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

from coterie.core.errors import Refused, SaveError, TensorError, extra
from coterie.core.foreign import opened

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
    """A stream of random numbers: AES-256 in counter mode.

    Args:
        key: 32 bytes, from which everything follows: of one use only.

    Raises:
        Refused: The library of the cipher is not installed.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"a key of {len(key)} bytes, expected {KEY}")
        self._stream = _cipher(key)

    @classmethod
    def secret(cls) -> "Source":
        """Return a stream that nobody can draw again: its key is of the operating system's
        generator, and is not kept.
        """
        return cls(os.urandom(KEY))

    @classmethod
    def keyed(cls, key: bytes, *purpose: int | str) -> "Source":
        """Return the stream of a secret key for one purpose: it can be drawn again by whoever has
        the key, and by nobody else.

        Args:
            key: 32 to 64 random bytes.
            purpose: Other purposes have other streams, also ("a", "b") and ("a/b",), or (1,) and
                ("1",).

        Raises:
            ValueError: The key is too short, or too long.
        """
        if not KEY <= len(key) <= blake2b.MAX_KEY_SIZE:
            raise ValueError(f"a key of {len(key)} bytes, expected {KEY} to {blake2b.MAX_KEY_SIZE}")
        return cls(_digest(purpose, key))

    @classmethod
    def seeded(cls, seed: int, *purpose: int | str) -> "Source":
        """Return the stream of a run's seed for one purpose. The seed is no secret: for
        simulations, where noise protects nobody.
        """
        return cls(_digest((seed, *purpose)))

    def read(self, n: int) -> bytes:
        """Return the next n bytes."""
        drawn: bytes = self._stream.update(bytes(n))
        return drawn

    def integers(self, n: int) -> np.ndarray:
        """(n,) uint64: the next whole numbers from 0 to 2^64 - 1, each as likely."""
        return np.frombuffer(self.read(8 * n), "<u8")

    def uniform(self, n: int) -> np.ndarray:
        """(n,) float64: the next numbers from [0, 1), multiples of 2^-53, each as likely."""
        return (self.integers(n) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int) -> int:
        """Return the next whole number from 0 to bound - 1, each exactly as likely. Raises
        ValueError unless 0 < bound <= 2^64.
        """
        if not 0 < bound <= 1 << 64:
            raise ValueError(f"a number below {bound}")
        fair = (1 << 64) - (1 << 64) % bound  # what is beyond would favour the smaller ones
        while (drawn := int.from_bytes(self.read(8), "little")) >= fair:
            pass
        return drawn % bound

    def sample(self, population: Sequence[T], size: int) -> list[T]:
        """Draw some of a population without replacement, every set of them exactly as likely
        (Fisher and Yates' shuffle, its beginning). Raises ValueError: there are not so many.
        """
        rest = list(population)
        if not 0 <= size <= len(rest):
            raise ValueError(f"{size} of {len(rest)}")
        for k in range(size):
            other = k + self.below(len(rest) - k)
            rest[k], rest[other] = rest[other], rest[k]
        return rest[:size]

    def gaussian(self, size: int, deviation: float) -> np.ndarray:
        """Integers that are distributed as round(N(0, deviation^2)), exactly: no probability is
        approximated.

        Of 64 random bits one is the sign, the others are the first of P, the probability of what is
        farther out, which is uniform. The size is round(deviation |z|), Phi(-|z|) = P.
        Floating-point numbers decide it unless a bound on their error, and on what the bits to come
        can change, leaves two integers possible (about 1 of 10^7, with a deviation of 2^20); then
        more bits and decimals decide. How long that takes tells that it happened, at random, and
        nothing of any secret.

        Args:
            size: How many.
            deviation: In steps of the grid.

        Returns:
            (size,) int64.

        Raises:
            ValueError: The deviation is not positive, or beyond 2^32.
        """
        if not 0 < deviation <= MOST_STEPS:
            raise ValueError(f"a deviation of {deviation} steps, expected one in (0, 2^32]")
        drawn, numbers = self.integers(size), np.empty(size, np.int64)
        for start in range(0, size, _PART):
            part = slice(start, start + _PART)
            self._fill(numbers[part], drawn[part], deviation)
        return numbers

    def _fill(self, out: np.ndarray, drawn: np.ndarray, deviation: float) -> None:
        """Make integers of 64 bits each."""
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
        """Return the number of k = 0, 1, ... with Phi(-(k + 1/2) / deviation) > P, of which the
        first 64 bits are known, by bisection.
        """
        unknown = _Probability(self, bits)
        low, high = -1, 1
        while unknown.below_tail(high, deviation):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if unknown.below_tail(middle, deviation) else (low, middle)
        return high


def _decided(bits: int, rest: float, size: float, deviation: float) -> bool:
    """Return whether every value that the bits leave possible is rounded to `size`."""
    z = (size + 1) / deviation
    # |dz| <= 1.26 dP / P, as phi(z) >= 0.79 Phi(z) for z <= 0
    error = deviation * (2 / bits + (z + 1) * _ERROR) if bits else math.inf
    return abs(rest) < 0.5 - error


class _Probability:
    """A uniform number of [0, 1/2), of which as many bits are drawn as a comparison needs; the
    first 64 are known, an integer below 2^63.
    """

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
    """2^bits Phi(-x) for x = (k + 1/2) / deviation >= 0, with an error below 1: by the series of
    Phi(x) - 1/2, whose terms are positive.
    """
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
    """Return a vector with Gaussian noise, safe in floating point: (d,) float64, multiples of the
    grid's step. Raises TensorError: a value is not a number.

    Args:
        update: (d,) float64. It is clipped to the norm, on the grid, see `on_grid`.
        norm: C, the sensitivity to the vector's absence; any two are up to 2C apart.
        deviation: sigma, of every coordinate.
        source: Of the noise.
    """
    step = grid(norm, deviation)
    noise = source.gaussian(update.size, deviation / step)
    noisy: np.ndarray = (on_grid(update, norm, step) + noise) * step
    return noisy


def grid(norm: float, deviation: float) -> float:
    """Return the step of the grid: a power of two, at most 2^-20 of the deviation, and not below
    2^-46 of the norm.

    It is of the mechanism's settings alone. Rounding costs nothing in privacy, as norms do not
    grow, and 10^-6 of the noise in accuracy.
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
        raise TensorError(
            "update to be protected: not all values are numbers",
            "Training diverged: lower the learning rate.",
        )
    # the norm's relative error, and that of the product, are below the difference
    most = norm * (1 - (update.size + 16) * 2.0**-52)
    bounded = bounded * ((1.0 if size <= most else most / size) / step)
    steps: np.ndarray = np.trunc(bounded).astype(np.int64)
    return steps


def kept_key(path: Path) -> bytes:
    """Return the key of a file, 32 random bytes, which is made where it is missing, readable by its
    owner alone.

    Raises:
        Refused: The file holds something else, or cannot be read.
        SaveError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            _write_key(path)
        try:
            with opened(path) as file:
                key = file.read(KEY + 1)
        except OSError as error:
            raise Refused(
                f"cannot read {path}: {error.strerror}",
                "It must be readable by the user of this process, and by nobody else.",
            ) from None
    if len(key) != KEY:
        raise Refused(
            f"{path} holds {'more' if len(key) > KEY else len(key)} bytes, expected a key of {KEY}",
            "Delete it: a new one is made.",
        )
    return key


def _write_key(path: Path) -> None:
    """Write a key file atomically. Raises SaveError."""
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(KEY))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise SaveError(
            f"cannot write {path}: {error.strerror}", "Free some space, or choose another folder."
        ) from error


def check_installed() -> None:
    """Refuse a run if secret random numbers cannot be drawn. Raises Refused."""
    _cipher(bytes(KEY))


def _digest(purpose: Sequence[int | str], key: bytes = b"") -> bytes:
    """Return a key of 256 bits for one purpose."""
    return blake2b(
        json.dumps(list(purpose)).encode(), digest_size=KEY, key=key, person=b"coterie.noise"
    ).digest()


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        problem = "privacy: cryptography, which draws secret random numbers, is not installed"
        raise Refused(problem, extra("privacy")) from None
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
