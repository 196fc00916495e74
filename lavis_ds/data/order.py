"""Which samples make up which optimizer step: pure functions of (seed, sizes, batch sizes).

The stream of samples does not depend on ranks, workers or micro-batches. So the state of the data is one number, the
position; resuming is a seek; and another number of GPUs goes on with exactly the samples that were left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lavis_ds.errors import ConfigError, DataError

_CACHED_EPOCHS = 2  # a step may straddle two epochs


@dataclass(frozen=True, slots=True)
class SampleKey:
    """One row of a batch.

    Attributes:
        dataset: number of the dataset.
        index: number of the sample in it.
        epoch: pass over the data that the row belongs to; seeds augmentation.
        is_filler: the row only completes a batch: no target, not counted.
    """

    dataset: int
    index: int
    epoch: int
    is_filler: bool = False


class SampleOrder:
    """The endless stream of samples: epoch after epoch, each a permutation of all samples of all datasets.

    Args:
        sizes: number of samples of each dataset.
        seed: seed of the permutations.
        shuffle: False keeps the datasets' own order.

    Raises:
        DataError: there are no samples at all.
    """

    def __init__(self, sizes: Sequence[int], seed: int, shuffle: bool = True) -> None:
        self.sizes, self.seed, self.shuffle = tuple(sizes), seed, shuffle
        self.total = sum(self.sizes)
        if self.total == 0:
            raise DataError("the datasets hold no samples.", given=f"{len(self.sizes)} dataset(s)")
        self._ends = np.cumsum(self.sizes)
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def at(self, position: int) -> SampleKey:
        """The sample at `position` of the stream."""
        epoch, offset = divmod(position, self.total)
        row = int(self._permutation(epoch)[offset]) if self.shuffle else offset
        dataset = int(np.searchsorted(self._ends, row, side="right"))
        return SampleKey(dataset, row - int(self._ends[dataset]) + self.sizes[dataset], epoch)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            while len(self._permutations) >= _CACHED_EPOCHS:
                self._permutations.pop(next(iter(self._permutations)))
            # NumPy promises the raw bits of a bit generator for ever, but not what Generator.permutation makes of them;
            # a run resumed under another NumPy must see the same order.
            bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.total)
            self._permutations[epoch] = np.argsort(bits, kind="stable")
        return self._permutations[epoch]


@dataclass(frozen=True)
class StepPlan:
    """The rows of one rank in every optimizer step.

    Step s covers positions s * G to (s + 1) * G of the stream, G = `global_batch_size`, and the last one ends at
    `total_samples`; fillers complete it, so that all ranks make the same number of equally large micro-batches. Real
    rows come first in every micro-batch.

    Raises:
        ConfigError: G is no multiple of ranks * micro-batch size.
    """

    order: SampleOrder
    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    dp_rank: int
    total_samples: int

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.data_parallel_size:
            raise ValueError(f"dp_rank {self.dp_rank} of {self.data_parallel_size}")
        if self.global_batch_size % self._rows_at_once:
            raise ConfigError(
                "the global batch is not divisible by ranks x micro-batch size.",
                where="run.global_batch_size",
                given=f"{self.global_batch_size} for {self.data_parallel_size} rank(s) x {self.micro_batch_size}",
                expected=f"a multiple of {self._rows_at_once}",
            )

    @classmethod
    def for_evaluation(cls, sizes: Sequence[int], batch_size: int, data_parallel_size: int, dp_rank: int) -> StepPlan:
        """Every sample once, in the datasets' own order, `batch_size` a rank and step."""
        order = SampleOrder(sizes, seed=0, shuffle=False)
        return cls(order, batch_size * data_parallel_size, batch_size, data_parallel_size, dp_rank, order.total)

    @property
    def _rows_at_once(self) -> int:
        return self.data_parallel_size * self.micro_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.global_batch_size // self._rows_at_once

    @property
    def num_steps(self) -> int:
        return -(-self.total_samples // self.global_batch_size)

    def num_samples(self, step: int) -> int:
        """Samples of `step` over all ranks, fillers left out."""
        return max(0, min(self.global_batch_size, self.total_samples - step * self.global_batch_size))

    def micro_batches(self, step: int) -> list[list[SampleKey]]:
        """The rows of this rank in `step`, one list a micro-batch."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        first = self.dp_rank * self.micro_batch_size
        return [
            [self._row(step, start + first + i) for i in range(self.micro_batch_size)]
            for start in range(0, self.global_batch_size, self._rows_at_once)
        ]

    def _row(self, step: int, row: int) -> SampleKey:
        start = step * self.global_batch_size
        if row < self.num_samples(step):
            return self.order.at(start + row)
        return replace(self.order.at(start), is_filler=True)
