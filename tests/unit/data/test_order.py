from __future__ import annotations

from collections import Counter

import pytest

from lavis_ds.data.order import SampleOrder
from lavis_ds.errors import DataError

SIZES = (7, 0, 4)


class TestSampleOrder:
    def test_every_epoch_has_every_sample_once(self) -> None:
        order = SampleOrder(SIZES, seed=3)
        everything = {(0, i) for i in range(7)} | {(2, i) for i in range(4)}
        for epoch in range(3):
            keys = [order.at(epoch * order.total + i) for i in range(order.total)]
            assert len(keys) == 11
            assert {(key.dataset, key.index) for key in keys} == everything
            assert {key.epoch for key in keys} == {epoch}

    def test_epochs_and_seeds_differ(self) -> None:
        def epoch(order: SampleOrder, number: int) -> list[tuple[int, int]]:
            keys = [order.at(number * order.total + i) for i in range(order.total)]
            return [(key.dataset, key.index) for key in keys]

        first = SampleOrder([50], seed=1)
        assert epoch(first, 0) != epoch(first, 1)
        assert epoch(first, 0) != epoch(SampleOrder([50], seed=2), 0)
        assert epoch(first, 0) == epoch(SampleOrder([50], seed=1), 0)

    def test_any_order_of_asking_gives_the_same(self) -> None:
        forward, jumping = SampleOrder(SIZES, seed=5), SampleOrder(SIZES, seed=5)
        positions = [40, 3, 100, 0, 39, 12, 55]
        expected = {position: forward.at(position) for position in sorted(positions)}
        assert {position: jumping.at(position) for position in positions} == expected

    def test_the_permutation_is_what_it_always_was(self) -> None:
        """A resumed run relies on it, whatever the versions."""
        order = SampleOrder([10], seed=42)
        assert [order.at(i).index for i in range(10)] == [6, 1, 7, 9, 5, 0, 2, 8, 3, 4]
        assert [order.at(i).index for i in range(10, 20)] == [6, 2, 3, 1, 5, 8, 9, 4, 0, 7]

    def test_a_quota_of_twice_the_size_brings_every_sample_twice_an_epoch(self) -> None:
        order = SampleOrder([5, 6], seed=1, quotas=[10, 3])
        epochs = [[order.at(epoch * 13 + i) for i in range(13)] for epoch in range(4)]
        for number, keys in enumerate(epochs):
            assert Counter(key.index for key in keys if key.dataset == 0) == dict.fromkeys(range(5), 2)
            assert {key.epoch for key in keys if key.dataset == 0} == {2 * number, 2 * number + 1}
        for first, second in (epochs[:2], epochs[2:]):  # half of it an epoch: all of it in two
            assert Counter(key.index for key in (*first, *second) if key.dataset == 1) == dict.fromkeys(range(6), 1)

    def test_a_stretch_is_what_its_positions_are(self) -> None:
        order = SampleOrder([5, 6], seed=1, quotas=[7, 3])
        keys = order.keys(4, 29)
        assert [keys[i] for i in range(len(keys))] == [order.at(position) for position in range(4, 29)]

    def test_without_shuffling_the_datasets_follow_each_other(self) -> None:
        order = SampleOrder(SIZES, seed=0, shuffle=False)
        assert [(order.at(i).dataset, order.at(i).index) for i in range(12)] == [
            *((0, i) for i in range(7)),
            *((2, i) for i in range(4)),
            (0, 0),
        ]

    def test_no_samples_at_all_are_an_error(self) -> None:
        with pytest.raises(DataError, match="no samples"):
            SampleOrder([0, 0], seed=0)
