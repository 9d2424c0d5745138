"""Texts that are nearly equal, by their shingles (Broder, 1997)."""

import re
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

SHINGLE = 5  # words
LEAST = 0.7  # estimated share of common shingles from which texts are nearly equal
# Of 64 hashes: texts with 0.7 of their shingles in common share a band in 99 of 100 cases.
_BANDS, _ROWS = 16, 4
# Scripts without spaces: of Thai, Lao, Burmese, Khmer, Japanese and Chinese every character counts.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_FACTORS, _TERMS = np.random.RandomState(1997).randint(2**63, size=(2, 64), dtype=np.uint64)
_FACTORS |= 1  # so that multiplication loses nothing
_POWERS = np.array([31**k for k in range(SHINGLE)], dtype=np.uint64)


def similar(texts: Sequence[str]) -> list[int]:
    """Return for each text the number of the first text that is nearly equal, directly or through
    others; its own number if there is none.

    A text is compared only with the first one that shares a band, so that the time is linear in the
    number of texts; a few pairs are missed.
    """
    parents = list(range(len(texts)))
    # the smallest hash of a text's shingles by each of 64 functions
    signatures = [(_shingles(text)[:, None] * _FACTORS + _TERMS).min(axis=0) for text in texts]
    first: dict[tuple[int, bytes], int] = {}
    for number, signature in enumerate(signatures):
        for band, rows in enumerate(signature.reshape(_BANDS, _ROWS)):
            other = first.setdefault((band, rows.tobytes()), number)
            if (signature == signatures[other]).mean() >= LEAST:
                one, two = sorted((_root(parents, number), _root(parents, other)))
                parents[two] = one
    return [_root(parents, number) for number in range(len(texts))]


def _root(parents: list[int], number: int) -> int:
    """Return the root of a text in the union-find forest, and halve the path to it."""
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def _shingles(text: str) -> Hashes:
    """Return the hashes of all runs of five words; of a shorter text, one hash."""
    words = _WORD.findall(text.casefold())
    hashes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint64)
    if len(hashes) < SHINGLE:
        return _mixed(np.array([zlib.crc32(" ".join(words).encode())], dtype=np.uint64))
    runs = np.lib.stride_tricks.sliding_window_view(_mixed(hashes), SHINGLE)
    return _mixed((runs * _POWERS).sum(axis=1))


def _mixed(hashes: Hashes) -> Hashes:
    """Return hashes in which every bit depends on all bits of the given ones (SplitMix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
