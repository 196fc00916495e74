from __future__ import annotations

import numpy as np
import pytest

from lavis_ds.data.packing import best_fit


def test_the_fullest_bin_with_room_takes_the_next_longest() -> None:
    bins = best_fit(np.array([4, 7, 3, 6]), 10)
    assert bins == [[1, 2], [3, 0]]


def test_every_sample_is_in_one_bin_and_none_is_over_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 101, 5000)
    bins = best_fit(lengths, 100)
    assert sorted(i for content in bins for i in content) == list(range(5000))
    assert max(int(lengths[content].sum()) for content in bins) <= 100


@pytest.mark.parametrize("capacity", [4096, 8192])
def test_log_normal_lengths_leave_less_than_three_percent_empty(capacity: int) -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1, 8192).astype(np.int64), 1, capacity)
    bins = best_fit(lengths, capacity)
    assert lengths.sum() / (len(bins) * capacity) > 0.97  # measured 0.999


def test_samples_without_tokens_take_no_room() -> None:
    assert best_fit(np.array([0, 5, 0]), 5) == [[1, 0, 2]]


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="11 does not fit into 10"):
        best_fit(np.array([3, 11]), 10)
