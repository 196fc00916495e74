"""Shuffling without a table: a random permutation as a function, so that a place in it is found at once.

A Feistel network permutes the smallest power of two that is large enough; values outside are sent through again until
they fall inside (cycle walking), which keeps the map one-to-one. Nothing is stored, whatever the number of samples.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), method 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MULTIPLY_1, _MULTIPLY_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permuted(positions: NDArray[np.int64], size: int, *seed: int) -> NDArray[np.int64]:
    """Where the permutation of `range(size)` that `seed` stands for sends `positions`.

    Args:
        positions: any of 0 to size - 1.
        size: at least 1.
        seed: numbers that tell permutations apart, such as seed and epoch. The same on every machine and version.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed)
    values = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _MULTIPLY_1
        values = (values ^ (values >> np.uint64(27))) * _MULTIPLY_2
    return values ^ (values >> np.uint64(31))


def _keys(seed: tuple[int, ...]) -> list[np.uint64]:
    """A key a round, from Philox by way of SeedSequence, whose bits NumPy promises to keep."""
    raw = np.random.Philox(np.random.SeedSequence(list(seed))).random_raw(_ROUNDS)
    return [np.uint64(word) | np.uint64(1) for word in raw]
