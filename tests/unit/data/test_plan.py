from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lavis_ds.data.lengths import TokenCounts
from lavis_ds.data.order import SampleKey, SampleOrder
from lavis_ds.data.plan import GroupedRows, PackedRows, PlainRows, Row, RowPlan, StepPlan
from lavis_ds.errors import ConfigError

SIZES = (70, 0, 41)
TOTAL = 2 * 111 + 9  # two epochs and a bit, so that windows and steps straddle them
CAPACITY = 64


def counts() -> TokenCounts:
    rng = np.random.default_rng(0)
    return TokenCounts([np.stack([rng.integers(1, 60, size), rng.integers(0, 4, size)], 1) for size in SIZES])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path))


def make(kind: str, rows_a_step: int = 12, **options: Any) -> RowPlan:
    order = SampleOrder(SIZES, seed=9)
    if kind == "plain":
        return PlainRows(order, rows_a_step, TOTAL)
    if kind == "grouped":
        return GroupedRows(order, rows_a_step, TOTAL, counts(), window=50)
    return PackedRows(order, rows_a_step, counts(), CAPACITY, window=50, **{"total": TOTAL, **options})


KINDS = ["plain", "grouped", "packed"]


def everything(plan: RowPlan, first: int = 0) -> list[list[Row]]:
    return [plan.rows(step) for step in range(first, plan.num_steps)]


@pytest.mark.parametrize("kind", KINDS)
class TestRowPlans:
    def test_every_position_of_the_stream_comes_once(self, kind: str) -> None:
        keys = [key for rows in everything(make(kind)) for row in rows for key in row]
        assert sorted(key.position for key in keys) == list(range(TOTAL))
        order = SampleOrder(SIZES, seed=9)
        assert all(key == order.at(key.position) for key in keys)

    def test_any_step_is_found_alone(self, kind: str) -> None:
        whole = everything(make(kind))
        for step in (len(whole) - 1, 3, 0):
            assert make(kind).rows(step) == whole[step]

    def test_only_one_step_is_short(self, kind: str) -> None:
        numbers = [len(rows) for rows in everything(make(kind))]
        assert sorted(numbers)[1:] == [12] * (len(numbers) - 1)

    def test_the_samples_of_a_step_do_not_depend_on_how_it_is_divided(self, kind: str) -> None:
        plan = make(kind)
        for step in (0, 2, plan.num_steps - 1):
            expected = Counter(plan.rows(step))
            for ranks, micro in [(1, 1), (1, 12), (12, 1), (2, 3), (3, 2), (4, 3), (6, 1), (2, 6)]:
                for cost in (None, lambda row: float(sum(key.index for key in row))):
                    plans = [StepPlan(plan, micro, ranks, rank, cost) for rank in range(ranks)]
                    rows = [row for p in plans for batch in p.micro_batches(step) for row in batch]
                    assert len(rows) == 12
                    assert Counter(row for row in rows if row) == expected, (ranks, micro)

    def test_other_settings_are_told_apart(self, kind: str) -> None:
        assert make(kind).describe()["quotas"] == list(SIZES)
        assert make(kind).describe()["batching"] == {"plain": "padded"}.get(kind, kind)


def test_grouped_steps_hold_samples_of_like_length() -> None:
    plan, lengths = make("grouped"), counts()
    spreads = []
    for rows in everything(plan):
        tokens = [lengths.at(row[0])[0] for row in rows]
        spreads.append(max(tokens) - min(tokens))
    assert max(spreads) < 25  # of 58 possible ones
    firsts = [lengths.at(rows[0][0])[0] for rows in everything(plan)]
    assert firsts != sorted(firsts), "steps come in random order"


class TestPackedRows:
    def test_rows_are_full_but_never_over_full(self) -> None:
        lengths = counts()
        tokens = [sum(lengths.at(key)[0] for key in row) for rows in everything(make("packed")) for row in rows]
        assert max(tokens) <= CAPACITY
        assert sum(tokens) / (len(tokens) * CAPACITY) > 0.85  # lengths near the capacity and windows of 50: 0.90

    def test_rows_have_no_more_views_than_they_may(self) -> None:
        lengths, plan = counts(), make("packed", max_views=2)
        views = [sum(lengths.at(key)[1] for key in row) for rows in everything(plan) for row in rows]
        alone = [lengths.at(row[0])[1] for rows in everything(plan) for row in rows if len(row) == 1]
        assert max(views) == 3  # of samples that have so many by themselves
        assert views.count(3) <= sum(int((array[:, 1] == 3).sum()) for array in lengths.of) * 3
        assert alone
        assert {"pack_views": 2}.items() <= plan.describe().items()
        assert "pack_views" not in make("packed").describe()
        assert plan.num_steps > make("packed").num_steps

    def test_a_number_of_steps_goes_through_as_many_epochs_as_it_takes(self) -> None:
        plan = make("packed", total=None, num_steps=30)
        assert plan.num_steps == 30
        rows = [row for step in everything(plan) for row in step]
        assert len(rows) == 360
        assert max(key.epoch for row in rows for key in row) > 2

    def test_the_second_time_nothing_is_planned_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = everything(make("packed"))
        monkeypatch.setattr(PackedRows, "_count_rows", None)
        assert everything(make("packed"), first=5) == whole[5:]

    def test_other_lengths_make_other_numbers(self) -> None:
        first = make("packed")
        longer = TokenCounts([np.minimum(array + 30, CAPACITY) for array in counts().of])
        second = PackedRows(first.order, 12, longer, CAPACITY, 50, total=TOTAL)
        assert second.num_steps > first.num_steps
        assert second.describe() != first.describe()


class TestStepPlan:
    def test_all_ranks_have_the_same_number_of_full_micro_batches(self) -> None:
        for rank in range(3):
            plan = StepPlan(make("plain"), 2, 3, rank)
            for step in range(plan.num_steps):
                assert [len(batch) for batch in plan.micro_batches(step)] == [2, 2]

    def test_the_last_step_is_completed_by_empty_rows_after_the_real_ones(self) -> None:
        plans = [StepPlan(make("plain"), 3, 2, rank) for rank in range(2)]
        last = TOTAL // 12  # 3 samples
        rows = [[[bool(row) for row in batch] for batch in p.micro_batches(last)] for p in plans]
        assert rows == [[[True] * 3, [False] * 3], [[False] * 3] * 2]

    def test_rows_of_like_cost_run_at_the_same_time(self) -> None:
        lengths = counts()

        def cost(row: Row) -> float:
            return float(sum(lengths.at(key)[1] for key in row))

        def gaps(cost_or_none: Any) -> float:
            plans = [StepPlan(make("packed"), 1, 4, rank, cost_or_none) for rank in range(4)]
            batches = [zip(*(p.micro_batches(step) for p in plans), strict=True) for step in range(8)]
            together = [[cost(batch[0]) for batch in ranks] for step in batches for ranks in step]
            return sum(max(costs) - min(costs) for costs in together)

        assert gaps(cost) < 0.5 * gaps(None)

    def test_the_largest_rows_of_several_micro_batches_do_not_meet_on_one_rank(self) -> None:
        plans = [StepPlan(make("plain"), 6, 2, rank, lambda row: float(row[0].position)) for rank in range(2)]
        totals = [sum(row[0].position for row in p.micro_batches(0)[0]) for p in plans]
        assert totals[0] == totals[1]

    def test_evaluation_sees_every_sample_once_in_order(self) -> None:
        plans = [StepPlan.for_evaluation((7, 0, 4), 2, 2, rank) for rank in range(2)]
        assert [(p.num_steps, p.accumulation) for p in plans] == [(3, 1)] * 2
        rows = [row[0] for step in range(3) for p in plans for row in p.micro_batches(step)[0] if row]
        assert rows == [SampleKey(0, i, 0, i) for i in range(7)] + [SampleKey(2, i, 0, 7 + i) for i in range(4)]

    def test_what_does_not_divide_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"12 for 2 rank\(s\) x 5.*a multiple of 10"):
            StepPlan(make("plain"), 5, 2, 0)

    def test_steps_beyond_the_end_are_refused(self) -> None:
        plan = StepPlan(make("plain"), 1, 1, 0)
        with pytest.raises(IndexError, match="step 20 of 20"):
            plan.micro_batches(20)
