from __future__ import annotations

from collections import Counter

import pytest

from lavis_ds.data.order import SampleKey, SampleOrder, StepPlan
from lavis_ds.errors import ConfigError, DataError

SIZES = (7, 0, 4)


def plan(
    order: SampleOrder, ranks: int = 1, micro: int = 1, rank: int = 0, total: int = 40, batch: int = 12
) -> StepPlan:
    return StepPlan(order, batch, micro, ranks, rank, total)


def real_rows(order: SampleOrder, ranks: int, micro: int, step: int) -> Counter[SampleKey]:
    plans = [plan(order, ranks, micro, rank) for rank in range(ranks)]
    return Counter(row for p in plans for batch in p.micro_batches(step) for row in batch if not row.is_filler)


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
        """A resumed run relies on it, whatever the version of NumPy."""
        order = SampleOrder([10], seed=42)
        assert [order.at(i).index for i in range(10)] == [0, 1, 4, 2, 6, 8, 5, 9, 7, 3]
        assert [order.at(i).index for i in range(10, 20)] == [7, 3, 4, 2, 5, 9, 6, 8, 0, 1]

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


class TestStepPlan:
    def test_the_samples_of_a_step_do_not_depend_on_how_it_is_divided(self) -> None:
        order = SampleOrder(SIZES, seed=9)
        for step in range(4):
            expected = Counter(order.at(p) for p in range(step * 12, min((step + 1) * 12, 40)))
            for ranks, micro in [(1, 1), (1, 12), (12, 1), (2, 3), (3, 2), (4, 3), (6, 1), (2, 6)]:
                assert real_rows(order, ranks, micro, step) == expected, (ranks, micro)

    def test_all_ranks_have_the_same_number_of_full_micro_batches(self) -> None:
        order = SampleOrder(SIZES, seed=9)
        for rank in range(3):
            for step in range(4):
                batches = plan(order, ranks=3, micro=2, rank=rank).micro_batches(step)
                assert [len(batch) for batch in batches] == [2, 2]

    def test_the_last_step_is_completed_by_fillers_after_the_real_rows(self) -> None:
        order = SampleOrder(SIZES, seed=9)
        plans = [plan(order, ranks=2, micro=3, rank=rank) for rank in range(2)]
        assert [p.num_steps for p in plans] == [4, 4]
        assert [plans[0].num_samples(step) for step in range(5)] == [12, 12, 12, 4, 0]
        rows = [[[row.is_filler for row in batch] for batch in p.micro_batches(3)] for p in plans]
        assert rows == [[[False] * 3, [True] * 3], [[False, True, True], [True] * 3]]
        fillers = {row for p in plans for batch in p.micro_batches(3) for row in batch if row.is_filler}
        first = order.at(36)
        assert fillers == {SampleKey(first.dataset, first.index, first.epoch, is_filler=True)}

    def test_two_ranks_never_share_a_row(self) -> None:
        order = SampleOrder([100], seed=1)
        rows = [
            row
            for rank in range(4)
            for step in range(8)
            for batch in StepPlan(order, 12, 3, 4, rank, 96).micro_batches(step)
            for row in batch
        ]
        assert len(set(rows)) == len(rows) == 96

    def test_evaluation_sees_every_sample_once_in_order(self) -> None:
        plans = [StepPlan.for_evaluation(SIZES, 2, 2, rank) for rank in range(2)]
        assert [(p.num_steps, p.accumulation) for p in plans] == [(3, 1)] * 2
        rows = [row for step in range(3) for p in plans for row in p.micro_batches(step)[0] if not row.is_filler]
        assert rows == [SampleKey(0, i, 0) for i in range(7)] + [SampleKey(2, i, 0) for i in range(4)]

    def test_what_does_not_divide_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"12 for 2 rank\(s\) x 5.*a multiple of 10"):
            plan(SampleOrder(SIZES, 0), ranks=2, micro=5)

    def test_steps_beyond_the_end_are_refused(self) -> None:
        with pytest.raises(IndexError, match="step 4 of 4"):
            plan(SampleOrder(SIZES, 0)).micro_batches(4)
