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


@pytest.mark.parametrize(("capacity", "max_views"), [(4096, 24_576), (4096, 16_384), (8192, 16_384)])
def test_of_two_budgets_the_scarcer_one_is_used_up(capacity: int, max_views: int) -> None:
    """Measured: 0.99, 0.93 and 0.90 of it, where no plan could reach more than 1."""
    rng = np.random.default_rng(2)
    lengths = np.clip(rng.lognormal(5.8, 0.8, 8192).astype(np.int64), 1, 4096)
    views = np.where(rng.random(8192) < 0.9, 784 * rng.integers(1, 4, 8192), 0)
    bins = best_fit(lengths, capacity, views, max_views)
    assert sorted(i for content in bins for i in content) == list(range(8192))
    assert max(int(lengths[content].sum()) for content in bins) <= capacity
    assert max(int(views[content].sum()) for content in bins) <= max_views
    assert max(lengths.sum() / capacity, views.sum() / max_views) / len(bins) > 0.88


def test_a_budget_that_is_never_reached_changes_little() -> None:
    lengths = np.random.default_rng(3).integers(1, 101, 1000)
    assert len(best_fit(lengths, 400, np.ones_like(lengths), 10_000)) <= len(best_fit(lengths, 400)) + 1


def test_a_sample_with_more_views_than_a_bin_shares_it_with_text_alone() -> None:
    bins = best_fit(np.array([5, 3, 2, 1]), 10, np.array([9, 1, 0, 0]), 4)
    assert sorted(map(sorted, bins)) in ([[0, 2, 3], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0], [1, 2, 3]])
    assert best_fit(np.array([], np.int64), 10, np.array([], np.int64), 4) == []
