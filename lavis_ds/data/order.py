"""The endless stream of samples, a pure function of (seed, sizes, mixture).

It does not depend on ranks, workers or batch sizes. So the state of the data is one number, the position; resuming is a
seek; and another number of GPUs goes on with exactly the samples that were left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lavis_ds.data.shuffle import permuted
from lavis_ds.errors import DataError


@dataclass(frozen=True, slots=True)
class SampleKey:
    """One sample in the stream.

    Attributes:
        dataset: number of the dataset.
        index: number of the sample in it.
        epoch: pass over its dataset; seeds augmentation.
        position: place in the stream.
    """

    dataset: int
    index: int
    epoch: int
    position: int


@dataclass(frozen=True)
class Keys:
    """A stretch of the stream as arrays of one length, which is how plans look at many samples at once."""

    dataset: NDArray[np.int64]
    index: NDArray[np.int64]
    epoch: NDArray[np.int64]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, number: int) -> SampleKey:
        return SampleKey(
            int(self.dataset[number]), int(self.index[number]), int(self.epoch[number]), int(self.position[number])
        )


class SampleOrder:
    """Epoch after epoch, each a permutation of what the datasets give to it.

    A dataset gives its quota to every epoch, and goes round itself: with a quota of twice its size every sample comes
    twice an epoch, with half its size every second epoch, and always each once before any comes again.

    Args:
        sizes: number of samples of each dataset.
        seed: seed of the permutations.
        quotas: samples that each dataset gives to an epoch; its size where left out.
        shuffle: False keeps the datasets' own order.

    Raises:
        DataError: there are no samples at all.
    """

    def __init__(
        self, sizes: Sequence[int], seed: int, quotas: Sequence[int] | None = None, shuffle: bool = True
    ) -> None:
        self.sizes, self.seed, self.shuffle = tuple(sizes), seed, shuffle
        self.quotas = self.sizes if quotas is None else tuple(quotas)
        self.total = sum(self.quotas)
        if self.total == 0:
            raise DataError("the datasets hold no samples.", given=f"{len(self.sizes)} dataset(s)")
        self._ends = np.cumsum(self.quotas)

    def at(self, position: int) -> SampleKey:
        """The sample at `position` of the stream."""
        return self.keys(position, position + 1)[0]

    def keys(self, start: int, stop: int) -> Keys:
        """The samples at positions `start` to `stop` of the stream."""
        positions = np.arange(start, stop)
        epochs, slots = np.divmod(positions, self.total)
        if self.shuffle:
            slots = self._each(epochs, slots, self.total, [0])
        dataset = np.searchsorted(self._ends, slots, side="right")
        index, own_epoch = np.empty_like(slots), np.empty_like(slots)
        for number in np.unique(dataset):
            chosen = dataset == number
            quota, size = self.quotas[number], self.sizes[number]
            given = epochs[chosen] * quota + slots[chosen] - (self._ends[number] - quota)
            own_epoch[chosen], index[chosen] = np.divmod(given, size)
            if self.shuffle and quota != size:  # else the epoch's permutation has shuffled it already
                index[chosen] = self._each(own_epoch[chosen], index[chosen], size, [1, int(number)])
        return Keys(dataset, index, own_epoch, positions)

    def _each(
        self, epochs: NDArray[np.int64], slots: NDArray[np.int64], size: int, stream: list[int]
    ) -> NDArray[np.int64]:
        """`slots` sent through the permutations of their epochs."""
        result = np.empty_like(slots)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permuted(slots[chosen], size, self.seed, *stream, int(epoch))
        return result
