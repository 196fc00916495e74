from __future__ import annotations

import numpy as np
import pytest

from lavis_ds.data.shuffle import permuted


@pytest.mark.parametrize("size", [1, 2, 3, 5, 22, 1000, 4096, 4097])
def test_it_is_a_permutation(size: int) -> None:
    for epoch in range(3):
        assert sorted(permuted(np.arange(size), size, 42, epoch)) == list(range(size))


def test_any_place_is_found_alone() -> None:
    whole = permuted(np.arange(1000), 1000, 7)
    assert [int(permuted(np.array([i]), 1000, 7)[0]) for i in (0, 999, 500)] == whole[[0, 999, 500]].tolist()


def test_a_large_one_needs_no_table() -> None:
    size = 10**12
    places = permuted(np.arange(1000), size, 1)
    assert len(set(places.tolist())) == 1000
    assert 0.4 < places.mean() / size < 0.6  # 0.5 and a deviation of 0.009


def test_places_are_equally_likely() -> None:
    """Chi-square over 22 x 22 cells has 441 degrees of freedom: 441 on average, with a deviation of 30."""
    size, draws = 22, 3000
    table = np.zeros((size, size))
    for seed in range(draws):
        table[np.arange(size), permuted(np.arange(size), size, 7, seed)] += 1
    expected = draws / size
    assert ((table - expected) ** 2 / expected).sum() < 441 + 4 * 30  # measured 460 with 5,000 draws


def test_neighbours_part() -> None:
    places = permuted(np.arange(100_000), 100_000, 3)
    assert abs(np.corrcoef(np.arange(100_000), places)[0, 1]) < 0.02  # deviation 0.003
    assert np.abs(np.diff(places)).mean() / 100_000 == pytest.approx(1 / 3, abs=0.01)
