"""Which samples make up which row, and which rows which optimizer step: pure functions, whatever the number of ranks.

A row is a list of samples that lie one behind the other. A step has `rows_a_step` of them, the run's global batch; the
last one may have fewer.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_ds.data import cache
from lavis_ds.data.lengths import TokenCounts
from lavis_ds.data.order import Keys, SampleKey, SampleOrder
from lavis_ds.data.packing import best_fit
from lavis_ds.data.shuffle import permuted
from lavis_ds.errors import ConfigError

Row = tuple[SampleKey, ...]

_CACHED_WINDOWS = 2  # a step may straddle two
_STRETCH = 1024  # positions looked up at once, which costs little more than one


class RowPlan(ABC):
    """The rows of every optimizer step.

    Attributes:
        order: the stream of samples.
        rows_a_step: rows of the global batch.
        num_steps: optimizer steps until the end.
    """

    order: SampleOrder
    rows_a_step: int
    num_steps: int

    @abstractmethod
    def rows(self, step: int) -> list[Row]:
        """The rows of a step; fewer than `rows_a_step` only in the last one of the run, or of its last window."""

    def describe(self) -> dict[str, Any]:
        """What the rows depend on besides seed, sizes and rows a step, as JSON: a resumed run must have the same."""
        return {"batching": "padded", "quotas": list(self.order.quotas)}


class PlainRows(RowPlan):
    """A sample a row, in the order of the stream.

    Args:
        order: the stream of samples.
        rows_a_step: rows of the global batch.
        total: samples until the end.
    """

    def __init__(self, order: SampleOrder, rows_a_step: int, total: int) -> None:
        self.order, self.rows_a_step, self.total = order, rows_a_step, total
        self.num_steps = -(-total // rows_a_step)
        self._stretch = lru_cache(_CACHED_WINDOWS)(
            lambda number: order.keys(number * _STRETCH, (number + 1) * _STRETCH)
        )

    def rows(self, step: int) -> list[Row]:
        start = step * self.rows_a_step
        return [(self._key(position),) for position in range(start, min(start + self.rows_a_step, self.total))]

    def _key(self, position: int) -> SampleKey:
        stretch, place = divmod(position, _STRETCH)
        return self._stretch(stretch)[place]


class GroupedRows(RowPlan):
    """A sample a row; samples of a window are sorted by length and cut into steps, whose order is shuffled.

    Args:
        order: the stream of samples.
        rows_a_step: rows of the global batch.
        total: samples until the end.
        counts: tokens of every sample.
        window: samples looked at together; rounded down to whole steps.
    """

    def __init__(self, order: SampleOrder, rows_a_step: int, total: int, counts: TokenCounts, window: int) -> None:
        self.order, self.rows_a_step, self.total, self.counts = order, rows_a_step, total, counts
        self.steps_a_window = max(1, window // rows_a_step)
        self.num_steps = -(-total // rows_a_step)
        self._window = lru_cache(_CACHED_WINDOWS)(self._plan)

    def rows(self, step: int) -> list[Row]:
        window, offset = divmod(step, self.steps_a_window)
        return self._window(window)[offset]

    def describe(self) -> dict[str, Any]:
        windows = {"batching": "grouped", "steps_a_window": self.steps_a_window}
        return {**super().describe(), **windows, "token_counts": self.counts.digest}

    def _plan(self, window: int) -> list[list[Row]]:
        size = self.steps_a_window * self.rows_a_step
        keys = self.order.keys(window * size, min((window + 1) * size, self.total))
        by_length = np.argsort(self.counts.tokens(keys), kind="stable").tolist()
        steps = [by_length[i : i + self.rows_a_step] for i in range(0, len(keys), self.rows_a_step)]
        return [[(keys[i],) for i in steps[number]] for number in _shuffled(len(steps), self.order.seed, window)]


class PackedRows(RowPlan):
    """Rows of up to `capacity` tokens, and `max_views` views of pictures, filled with whole samples.

    The rows of a window come in random order.

    How many rows each window has must be known to find a step, and the last one for the schedule. All windows are
    planned once for it, about 1.5 s for a million samples, and the numbers are kept on disk.

    Args:
        order: the stream of samples.
        rows_a_step: rows of the global batch.
        counts: tokens of every sample.
        capacity: tokens of a row.
        window: samples packed together.
        max_views: views of a row; any number where left out. A sample with more shares its row with such as have none.
        total: samples until the end; None where `num_steps` is given.
        num_steps: optimizer steps until the end.
    """

    def __init__(
        self,
        order: SampleOrder,
        rows_a_step: int,
        counts: TokenCounts,
        capacity: int,
        window: int,
        *,
        max_views: int | None = None,
        total: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.order, self.rows_a_step, self.counts = order, rows_a_step, counts
        self.capacity, self.window, self.max_views, self.total = capacity, window, max_views, total
        made_from = [order.sizes, order.quotas, order.seed, order.shuffle, counts.digest, capacity, window, max_views]
        wanted = None if num_steps is None else num_steps * rows_a_step
        made = cache.arrays(
            "packs", cache.fingerprint(made_from, total, wanted), lambda: {"rows": self._count_rows(wanted)}
        )
        self._ends: NDArray[np.int64] = np.cumsum(made["rows"])
        self.num_steps = -(-int(self._ends[-1]) // rows_a_step) if num_steps is None else num_steps
        self._window_rows = lru_cache(_CACHED_WINDOWS)(self._plan)

    def rows(self, step: int) -> list[Row]:
        start = step * self.rows_a_step
        stop = min(start + self.rows_a_step, int(self._ends[-1]))
        return [self._row(number) for number in range(start, stop)]

    def describe(self) -> dict[str, Any]:
        packs = {"batching": "packed", "pack_length": self.capacity, "plan_window": self.window}
        if self.max_views is not None:
            packs["pack_views"] = self.max_views
        return {**super().describe(), **packs, "token_counts": self.counts.digest}

    def _row(self, number: int) -> Row:
        window = int(np.searchsorted(self._ends, number, side="right"))
        rows = self._window_rows(window)
        return rows[number - int(self._ends[window]) + len(rows)]

    def _plan(self, window: int) -> list[Row]:
        keys = self.order.keys(*self._span(window))
        bins = self._bins(keys)
        return [
            tuple(keys[i] for i in sorted(bins[number])) for number in _shuffled(len(bins), self.order.seed, window)
        ]

    def _bins(self, keys: Keys) -> list[list[int]]:
        views = None if self.max_views is None else self.counts.views(keys)
        return best_fit(self.counts.tokens(keys), self.capacity, views, self.max_views)

    def _span(self, window: int) -> tuple[int, int]:
        start, stop = window * self.window, (window + 1) * self.window
        return start, stop if self.total is None else min(stop, self.total)

    def _count_rows(self, wanted: int | None) -> NDArray[np.int64]:
        """Number of rows of each window, until there are no more samples, or as many rows as wanted."""
        numbers: list[int] = []
        windows = itertools.count() if self.total is None else range(-(-self.total // self.window))
        left = math.inf if wanted is None else wanted
        for window in windows:
            if left <= 0:
                break
            keys = self.order.keys(*self._span(window))
            numbers.append(len(self._bins(keys)))
            left -= numbers[-1]
        return np.array(numbers, np.int64)


@dataclass(frozen=True)
class StepPlan:
    """The rows of one rank in every optimizer step, as equally many micro-batches of equally many rows on all ranks.

    Args:
        plan: the rows of all ranks.
        micro_batch_size: rows of a micro-batch.
        data_parallel_size: number of ranks.
        dp_rank: this rank.
        cost: work that a row makes. With it, rows of like cost run at the same time on all ranks, so that none waits.

    Raises:
        ConfigError: the global batch is no multiple of ranks * micro-batch size.
    """

    plan: RowPlan
    micro_batch_size: int
    data_parallel_size: int
    dp_rank: int
    cost: Callable[[Row], float] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.data_parallel_size:
            raise ValueError(f"dp_rank {self.dp_rank} of {self.data_parallel_size}")
        if self.plan.rows_a_step % self._rows_at_once:
            raise ConfigError(
                "the global batch is not divisible by ranks x micro-batch size.",
                where="run.global_batch_size",
                given=f"{self.plan.rows_a_step} for {self.data_parallel_size} rank(s) x {self.micro_batch_size}",
                expected=f"a multiple of {self._rows_at_once}",
            )

    @classmethod
    def for_evaluation(cls, sizes: Sequence[int], batch_size: int, data_parallel_size: int, dp_rank: int) -> StepPlan:
        """Every sample once, in the datasets' own order, `batch_size` a rank and step."""
        order = SampleOrder(sizes, seed=0, shuffle=False)
        plan = PlainRows(order, batch_size * data_parallel_size, order.total)
        return cls(plan, batch_size, data_parallel_size, dp_rank)

    @property
    def _rows_at_once(self) -> int:
        return self.data_parallel_size * self.micro_batch_size

    @property
    def num_steps(self) -> int:
        return self.plan.num_steps

    @property
    def samples_an_epoch(self) -> int:
        return self.plan.order.total

    def describe(self) -> dict[str, Any]:
        """What the order of samples depends on, as JSON."""
        return self.plan.describe()

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.plan.rows_a_step // self._rows_at_once

    def micro_batches(self, step: int) -> list[list[Row]]:
        """The rows of this rank in `step`, one list a micro-batch; empty rows complete the last ones."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        rows = self.plan.rows(step)
        if self.cost is not None:
            rows = sorted(rows, key=self.cost, reverse=True)
        rows = rows + [()] * (self.plan.rows_a_step - len(rows))
        return list(self._own(rows))

    def _own(self, rows: list[Row]) -> Iterator[list[Row]]:
        for start in range(0, len(rows), self._rows_at_once):
            together = rows[start : start + self._rows_at_once]
            if self.cost is None:
                yield together[self.dp_rank * self.micro_batch_size : (self.dp_rank + 1) * self.micro_batch_size]
            else:
                yield [row for i, row in enumerate(together) if _snake(i, self.data_parallel_size) == self.dp_rank]


def _snake(number: int, ranks: int) -> int:
    """Rank of the row at place `number`: dealt out 0, 1, 2, 2, 1, 0, 0, 1, ..., so that the largest do not add up."""
    round_number, place = divmod(number, ranks)
    return place if round_number % 2 == 0 else ranks - 1 - place


def _shuffled(size: int, seed: int, window: int) -> list[int]:
    return [int(i) for i in permuted(np.arange(size), size, seed, 2, window)]
