"""What padding costs, by the very plans that training goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lavis_ds.config.schema import RootConfig
from lavis_ds.data.lengths import TokenCounts
from lavis_ds.data.order import SampleOrder
from lavis_ds.data.plan import GroupedRows, PackedRows, PlainRows, Row, RowPlan, StepPlan
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.errors import ConfigError
from lavis_ds.models.work import Work

_MOST_ROWS, _FEWEST_STEPS = 20_000, 20
"""Rows that are looked at, times ranks, evenly spread over the epoch; a longer one is not gone through as a whole."""


@dataclass(frozen=True)
class Layout:
    """One way to make batches, over one epoch.

    Attributes:
        batching: as `data.batching`.
        pack_length: tokens of a packed row; None where rows are single samples.
        padding: share of the places in batches that no token fills.
        samples_a_row: mean number of samples in a row.
        tokens_a_step: mean number of tokens in an optimizer step.
        num_steps: optimizer steps.
        num_steps_seen: steps that the numbers before are of.
    """

    batching: str
    pack_length: int | None
    padding: float
    samples_a_row: float
    tokens_a_step: float
    num_steps: int
    num_steps_seen: int


def pack_lengths(config: RootConfig, wanted: list[int]) -> list[int]:
    """The pack lengths to compute: those wanted, else the run's own, twice and four times that.

    Raises:
        ConfigError: one of them holds less than the longest sample may have.
    """
    longest = config.model.max_txt_len
    for length in wanted:
        if length < longest:
            raise ConfigError(
                f"rows must hold any sample, and model.max_txt_len is {longest}.",
                where="--pack-lengths",
                given=length,
                expected=f"at least {longest}",
                hint="Lower model.max_txt_len with --options to see what shorter rows would do.",
            )
    own = config.data.pack_length or longest
    return wanted or [own, 2 * own, 4 * own]


def layouts(
    config: RootConfig,
    order: SampleOrder,
    counts: TokenCounts,
    batch: BatchPlan,
    *,
    lengths: list[int],
    num_ranks: int,
    work: Work,
    row_multiple: int,
) -> Iterator[Layout]:
    """Padded, grouped and, for each pack length, packed.

    Args:
        config: the run.
        order: its stream of samples.
        counts: tokens of every sample.
        batch: rows of a step and of a micro-batch.
        lengths: pack lengths; none where lengths are not known beforehand, and then nothing is grouped either.
        num_ranks: ranks of the run.
        work: what a sample costs, by which packed rows are shared out among ranks.
        row_multiple: rows of a batch are padded to a multiple of this.
    """
    window, rows, total = config.data.plan_window, batch.global_batch_size, order.total

    def of(batching: str, plan: RowPlan, length: int | None = None) -> Layout:
        cost = _cost(work, counts) if batching == "packed" else None
        ranks = [StepPlan(plan, batch.micro_batch_size, num_ranks, rank, cost) for rank in range(num_ranks)]
        return _measure(batching, length, ranks, counts, row_multiple)

    yield of("padded", PlainRows(order, rows, total))
    if lengths:
        yield of("grouped", GroupedRows(order, rows, total, counts, window))
    for length in lengths:
        views = config.data.pack_views
        yield of("packed", PackedRows(order, rows, counts, length, window, max_views=views, total=total), length)


def _cost(work: Work, counts: TokenCounts) -> Callable[[Row], float]:
    return lambda row: sum(work.of(*counts.at(key)) for key in row)


def _measure(
    batching: str, length: int | None, ranks: list[StepPlan], counts: TokenCounts, row_multiple: int
) -> Layout:
    num_steps = ranks[0].num_steps
    most = max(_FEWEST_STEPS, _MOST_ROWS // (ranks[0].plan.rows_a_step * len(ranks)))
    seen = np.unique(np.linspace(0, num_steps - 1, min(num_steps, most)).astype(int)).tolist()
    places = filled = samples = rows = 0
    for micro_batch in chain.from_iterable(plan.micro_batches(step) for step in seen for plan in ranks):
        lengths = [[tokens for key in row if (tokens := counts.at(key)[0])] for row in micro_batch]  # 0: left out
        width = -(-max(1, *map(sum, lengths)) // row_multiple) * row_multiple
        places += width * len(micro_batch)
        filled += sum(map(sum, lengths))
        samples += sum(map(len, lengths))
        rows += sum(len(row) > 0 for row in lengths)
    means = (samples / max(1, rows), filled / len(seen))
    return Layout(batching, length, 1 - filled / places, *means, num_steps, len(seen))
